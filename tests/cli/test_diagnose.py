"""`diagnose` shows texts and images, slices by a field, and fails a CI job beyond a threshold."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from milvus_hubness import connect
from milvus_hubness.cli.reports import _show_diagnosis
from milvus_hubness.correction.banks.bank import QueryBank
from milvus_hubness.reports.report import diagnose
from tests.cli.conftest import DIM, assert_fails
from tests.support.galleries import hubby_gallery, vectors

NNN = ("--bank", "bank.npy", "--method", "nnn", "--k", "4")
PAIRS = ("diagnose", "products", "--pairs", "pairs.parquet", *NNN)


@pytest.fixture
def pairs(files):
    queries = vectors(np.random.default_rng(7), 30, DIM)
    table = {
        "query": list(queries),
        "key": list(range(30)),
        "question": [f"who sells {n}?" for n in range(30)],
    }
    pq.write_table(pa.table(table), "pairs.parquet")
    np.savez("queries.npz", query=queries, question=np.array(table["question"]))


def test_the_page_has_the_texts_images_and_slices_that_were_named(pairs, files, run):
    client = connect("shop.db")
    rows = client.query("products", filter="id >= 0", output_fields=["*"], limit=100)
    client.upsert(
        "products", [{**row, "photo": f"https://shop.test/{row['id']}.jpg"} for row in rows]
    )
    named = (
        "--query-text",
        "question",
        "--image-field",
        "photo",
        "--slice-by",
        "group",
        "--group-by",
        "group",
    )
    done = run(*PAIRS, *named)
    assert done.returncode == 0, done.stderr
    page = (files / "hubness.html").read_text()
    assert "“who sells " in page
    assert '<a href="https://shop.test/' in page
    assert "By group" in page
    assert "By value" in done.stdout
    assert "Shares of the answers by group" in page
    shares = done.stdout.split("Shares by value")[1]
    assert "excess, raw" in shares
    assert shares.count("20.0%") >= 5
    result = json.loads(run(*PAIRS, *named, "--json").stdout)
    slices = result["diagnosis"]["slices"]
    assert sorted((part["value"], part["items"]) for part in slices) == [
        (str(value), 12) for value in range(5)
    ]
    assert sum(part["queries"] for part in slices) == 30
    assert sum(
        group["right"]["estimate"] for group in result["diagnosis"]["groups"]
    ) == pytest.approx(1)
    assert result["crossed"] == []
    assert any(
        "who sells" in query["text"]
        for hub in result["diagnosis"]["hubs"]
        for query in hub["swallows"]
    )
    done = run(
        "diagnose",
        "products",
        "--queries",
        "queries.npz",
        *NNN,
        "--query-text",
        "question",
        "--json",
    )
    assert done.returncode == 0, done.stderr
    hubs = json.loads(done.stdout)["diagnosis"]["hubs"]
    assert all("who sells" in query["text"] for hub in hubs for query in hub["swallows"])


def test_only_images_of_the_named_folder_are_embedded(pairs, files, run):
    (files / "images").mkdir()
    for path in ("images/a.png", "outside.png"):
        Image.new("RGB", (4, 4), "red").save(files / path)
    client = connect("shop.db")
    rows = client.query("products", filter="id >= 0", output_fields=["*"], limit=100)
    names = ("a.png", "../outside.png", str(files / "outside.png"), "/proc/kmsg")
    client.upsert("products", [{**row, "photo": names[row["id"] % 4]} for row in rows])
    field = ("--image-field", "photo")
    done = run(*PAIRS, *field, "--image-folder", "images")
    page = (files / "hubness.html").read_text()
    assert done.returncode == 0, done.stderr
    shown, [line] = page.count("<img"), done.stderr.splitlines()
    assert shown > 0
    left_out = json.loads(run(*PAIRS, *field, "--image-folder", "images", "--json").stdout)[
        "images_left_out"
    ]
    assert left_out > 0
    assert line.startswith(f"milvus-hubness: warning: {left_out} images left out: not a PNG")
    assert f"{left_out} images left out" in page
    done = run(*PAIRS, *field)
    assert done.returncode == 0, done.stderr
    assert "<img" not in (files / "hubness.html").read_text()
    assert (
        f"{left_out + shown} images left out: files are shown only with --image-folder"
        in done.stderr
    )
    for wrong, words in (
        (("--image-folder", "images"), "--image-folder needs --image-field"),
        ((*field, "--image-folder", "outside.png"), "is no folder: name one"),
    ):
        done = run(*PAIRS, *wrong)
        assert done.returncode == 2
        assert words in done.stderr


def test_texts_and_slices_that_are_missing_are_named(pairs, run):
    for options, *words in (
        (("--query-text", "answer"), "pairs.parquet has no column 'answer'"),
        (("--group-by", "colour"), "no scalar field 'colour'", "--group-by"),
        (
            ("--slice-by", "colour"),
            "no scalar field 'colour': choose one of",
            "group",
            "--slice-by",
        ),
    ):
        assert_fails(run(*PAIRS, *options), 1, *words)


def test_thresholds_decide_about_the_exit_code(pairs, files, run):
    measured = json.loads(run(*PAIRS, "--json").stdout)["diagnosis"]
    skewness, gain = measured["after"]["skewness"], 100 * measured["gain"]["estimate"]
    kept = run(*PAIRS, "--max-skewness", f"{skewness + 0.01}", "--min-gain", f"{gain - 0.01}")
    assert (kept.returncode, kept.stderr) == (0, "")
    (files / "hubness.html").unlink()
    done = run(
        *PAIRS, "--max-skewness", f"{skewness - 0.01:.3f}", "--min-gain", f"{gain + 0.01:.3f}"
    )
    assert done.returncode == 3
    first, second = done.stderr.splitlines()
    assert first.startswith(
        f"milvus-hubness: the skewness after correction, {skewness:.2f}, is above --max-skewness {skewness - 0.01:.3f}"
    )
    assert second.startswith(
        f"milvus-hubness: the gain of R@1, {gain:+.2f} points, is below --min-gain"
    )
    assert "skewness of N_10" in done.stdout
    before, after = (measured[when]["hub_occurrence"] for when in ("before", "after"))
    assert f"{before:.1%} -> {after:.1%}" in next(
        line for line in done.stdout.splitlines() if "N_10 ≥ 20" in line
    )
    reciprocity = measured["reciprocity"]
    shown = f"{reciprocity['before']:.1%} -> {reciprocity['after']:.1%} of 30 distinct queries"
    assert shown in " ".join(done.stdout.split())
    assert (files / "hubness.html").exists(), "the page shows why"
    done = run(*PAIRS, "--max-skewness", "-9", "--json")
    assert (done.returncode, len(json.loads(done.stdout)["crossed"])) == (3, 1)
    without_answers = run("diagnose", "products", "--queries", "bank.npy", *NNN, "--min-gain", "1")
    assert without_answers.returncode == 2
    assert "--min-gain needs right answers: pass --pairs" in without_answers.stderr


def test_a_log_and_its_demand_are_shown(capsys):
    """Of a bank without near copies there is nothing to say."""
    items, queries, _ = hubby_gallery()
    asked = np.repeat(np.arange(100), np.r_[120, np.ones(99, int)])
    noise = 0.01 * np.random.default_rng(0).standard_normal((219, items.shape[1]))
    log = QueryBank((queries[asked] + noise).astype(np.float32), groups=asked)
    biases = (queries[:100] @ items.T).max(0)
    for bank, count in ((log, 1), (QueryBank(queries[:100], groups=np.arange(100)), 0)):
        _show_diagnosis(diagnose(queries[300:350], items, biases, bank=bank), Path("page.html"))
        shown = " ".join(capsys.readouterr().out.split())
        assert shown.count("219 queries are 100 groups of near copies") == count
        assert shown.count("demand and correction") == count
        assert shown.count("their rank correlation is") == count
