"""A refresh as the terminal shows it."""

import json
from dataclasses import replace

import numpy as np
import pytest

from milvus_hubness import HubnessClient
from milvus_hubness.cli.refresh import show_refresh
from milvus_hubness.jobs.refresh.evaluation import RefreshEvaluation
from milvus_hubness.jobs.refresh.result import RefreshResult
from milvus_hubness.quality.measures import Interval
from tests.cli.conftest import DIM, assert_fails
from tests.support.galleries import vectors


def refused(**facts):
    evaluation = {
        "items": 500,
        "queries": 1_200,
        "real_queries": False,
        "excess_answers": {"raw": 0.4712, "old": 0.2604, "new": 0.3},
        "noise": {"raw": 0.01, "old": 0.01},
        "skewness": {"raw": 2.5, "old": 1.994, "new": 1.208},
        "overlap": 0.8,
        "measure": "R@1",
        "measured": {},
        "measured_rows": 0,
        "gains": {},
        "objection": "excess answers taken by hubs rise",
    }
    judged = RefreshEvaluation(**evaluation | facts)
    return RefreshResult("products", "refused", judged.objection, 0, 0, 3, judged=judged)


def test_the_figure_that_decides_is_shown_with_its_queries(capsys):
    show_refresh(refused())
    shown = " ".join(capsys.readouterr().out.split())
    assert "Did not refresh products" in shown
    assert "excess answers taken by hubs raw 47.1%, old 26.0%, new 30.0%" in shown
    assert "1,200 held-out queries, among 500 rows" in shown

    show_refresh(refused(real_queries=True, queries=97))
    assert "97 real queries" in capsys.readouterr().out


def test_a_measure_has_its_interval_and_the_number_of_rows(capsys):
    measured = {"raw": 0.398, "old": 0.695, "new": 0.69}
    gains = {"raw": Interval(0.292, 0.25, 0.33), "old": Interval(-0.005, -0.01, 0.001)}
    show_refresh(
        replace(refused(measured=measured, gains=gains, measured_rows=30_000), rows=30_000)
    )
    shown = " ".join(capsys.readouterr().out.split())
    assert "queries, among 500 of 30,000 rows, which flatters all three" in shown
    assert "(95% interval −1.0 to +0.1), among 30,000 rows" in shown
    assert (
        "R@1 raw 39.8%, old 69.5%, new 69.0%, new over raw +29.2 points (95% interval +25.0"
        in shown
    )
    assert "new over old −0.5 points (95% interval −1.0 to +0.1)" in shown


def test_json_has_all_figures():
    judged = refused().to_dict()["judged"]
    assert judged["excess_answers"]["new"] == 0.3
    assert judged["noise"] == {"raw": 0.01, "old": 0.01}
    assert judged["real_queries"] is False


def test_a_refit_that_lacks_queries_is_reported_and_no_failure(run, files):
    bank = ("--bank", "bank.npy", "--no-writers", "--force")
    assert run("migrate", "run", "products", *bank).returncode == 0
    client = HubnessClient("shop.db")
    rng = np.random.default_rng(8)
    rows = [
        {"id": 100 + n, "vector": row, "group": 1} for n, row in enumerate(vectors(rng, 240, DIM))
    ]
    client.insert("products_hubness", rows)
    client.close()

    done = run("refresh", "products_hubness", "--refit-share", "0.5", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)["refresh"]
    assert told["action"] == "none"
    assert told["unfitted_share"] == pytest.approx(0.8)
    assert told["new_bank_due"].startswith(
        "a new bank is due: 80.0% of the rows are new or changed"
    )

    shown = " ".join(run("refresh", "products_hubness", "--refit-share", "0.5").stdout.split())
    assert "a new bank is due: 80.0% of the rows are new or changed since" in shown
    assert "rows new or changed 80.0% since the bank was fitted" in shown

    shown = " ".join(run("status", "products_hubness").stdout.split())
    assert "80.0% of the rows are new or changed since" in shown
    assert "new bank a new bank is due: 80.0%" in shown
    told = json.loads(run("status", "products_hubness", "--json").stdout)["status"]
    assert told["unfitted_share"] == pytest.approx(0.8)
    assert told["new_bank_due"].startswith("a new bank is due")


@pytest.mark.parametrize("share", ["0", "-0.2", "1.2", "nan"])
def test_a_share_that_is_none_is_one_line(run, files, share):
    done = run("refresh", "products", "--refit-share", share)
    assert done.returncode == 2
    [line] = done.stderr.strip().splitlines()
    assert line.endswith(f"--refit-share is above 0 and up to 1, got {float(share):g}")


def test_a_share_and_a_decision_exclude_each_other(run, files):
    done = run("refresh", "products", "--refit-share", "0.2", "--refit")
    assert done.returncode == 2
    assert "leave out --refit, which has decided" in " ".join(done.stderr.split())


def test_queries_of_another_width_are_named_before_the_rows_are_read(run, files, monkeypatch):
    assert run("enable", "products", "--bank", "bank.npy", "--force").returncode == 0
    wide = vectors(np.random.default_rng(3), 30, 2 * DIM)
    np.save("wide.npy", wide)
    np.savez("wide.npz", query=wide, key=np.arange(30))
    np.save("other.npy", vectors(np.random.default_rng(4), 50, DIM))
    monkeypatch.setattr("milvus_hubness.jobs.refresh.refreshing.sampled", lambda *given: 1 / 0)
    for option, name in (("--queries", "wide.npy"), ("--pairs", "wide.npz")):
        done = run("refresh", "products", "--bank", "other.npy", option, name)
        words = f"'products' has dimension {DIM}; the bank from {name} has {2 * DIM}: embed both"
        assert_fails(done, 1, words)
