"""Commands that are given a bank that does not fit: what they print, how they end, and that nothing is written."""

import json

import numpy as np
import pytest

from milvus_hubness import connect
from tests.support.galleries import hubby_gallery, plain_collection
from tests.support.real_data import load_task, needs_real_data

ITEMS, QUERIES, _ = hubby_gallery()


@pytest.fixture
def shop(files, monkeypatch):
    """The collection `photos` beside a bank that fits, one that does not, and 100 real queries."""
    monkeypatch.delenv("MILVUS_HUBNESS_VERDICT")
    client = connect("shop.db")
    plain_collection(client, "photos", ITEMS, "IP")
    np.save("fitting.npy", QUERIES[:400])
    np.save("photos.npy", ITEMS[:300])
    np.save("foreign.npy", np.ascontiguousarray(QUERIES[:400, ::-1]))
    np.save("real.npy", QUERIES[400:500])
    return client


@pytest.mark.parametrize(
    "command",
    [
        ("migrate", "run", "photos", "--no-writers"),
        ("migrate", "run", "--rehearse", "photos", "--no-writers"),
        ("enable", "photos"),
    ],
)
def test_a_bank_of_items_stops_the_command(shop, run, command):
    before = shop.list_collections()
    done = run(*command, "--bank", "photos.npy")
    assert done.returncode == 3
    assert "leave it alone" in done.stdout
    assert "this looks like a bank of items" in done.stderr
    assert "(--force goes on all the same)" in done.stderr
    assert "verdict=" not in done.stderr
    assert shop.list_collections() == before

    as_json = run(*command, "--bank", "foreign.npy", "--queries", "real.npy", "--json")
    assert as_json.returncode == 3
    error = json.loads(as_json.stdout.splitlines()[-1])["error"]
    assert error["type"] == "CorrectionNotRecommended"
    assert "they fall by less than 12%" in error["message"]


def test_force_goes_on(shop, run):
    done = run("migrate", "run", "photos", "--bank", "photos.npy", "--no-writers", "--force")
    assert done.returncode == 0
    assert "photos_hubness" in shop.list_collections()


def test_a_plan_shows_the_verdict_and_exits_with_0(shop, run):
    done = run("migrate", "run", "--plan", "photos", "--bank", "photos.npy")
    assert done.returncode == 0
    assert "leave it alone" in done.stdout
    planned = json.loads(
        run(
            "migrate",
            "run",
            "--plan",
            "photos",
            "--bank",
            "fitting.npy",
            "--queries",
            "real.npy",
            "--json",
        ).stdout
    )["plan"]
    assert planned["verdict"]["verdict"] == "apply"
    assert planned["verdict"]["judged_by"] == "100 real queries"


def test_refresh_refuses_it_and_status_shows_what_was_judged(shop, run):
    assert run("enable", "photos", "--bank", "fitting.npy").returncode == 0
    done = run("refresh", "photos", "--bank", "photos.npy")
    assert done.returncode == 3
    assert "looks like a bank of items" in done.stdout
    shown = run("status", "photos")
    assert "apply" in shown.stdout
    [verdict] = json.loads(run("status", "photos", "--json").stdout)["status"]["verdicts"]
    assert verdict["in_use"]
    assert verdict["judged_by"].startswith("half of the bank")


@needs_real_data
@pytest.mark.parametrize("queries", [(), ("--queries", "real.npy")], ids=["alone", "real queries"])
def test_photos_as_the_bank_of_a_search_by_titles_stop_a_migration_on_real_data(
    files, run, monkeypatch, queries
):
    """It took R@1 from 38.2 to 12.1, with exit code 0."""
    monkeypatch.delenv("MILVUS_HUBNESS_VERDICT")
    task = load_task("clip_products t2i")
    plain_collection(connect("shop.db"), "photos", task.gallery, "COSINE")
    np.save("photos.npy", task.target_bank)
    np.save("titles.npy", task.bank)
    np.save("real.npy", task.query[:100])
    run_it = ("migrate", "run", "photos", "--no-writers", *queries)
    assert run(*run_it, "--bank", "photos.npy").returncode == 3
    assert "photos_hubness" not in connect("shop.db").list_collections()
    assert run(*run_it, "--bank", "titles.npy").returncode == 0
