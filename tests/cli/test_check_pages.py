"""`check --page` shows texts and images, slices by a field, and fails a CI job beyond a threshold."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from milvus_hubness import connect
from milvus_hubness.cli.pages import show_diagnosis
from milvus_hubness.correction.banks.bank import QueryBank
from tests.cli.conftest import DIM, assert_fails
from tests.support.diagnoses import diagnose
from tests.support.galleries import hubby_gallery, plain_collection, vectors

PAGE = ("--bank", "bank.npy", "--page", "hubness.html")
PAIRS = ("check", "products", "--pairs", "pairs.parquet", *PAGE)


@pytest.fixture
def pairs(files):
    """A gallery without hubs, so that a verdict is against its correction, or for it by chance."""
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
    assert done.returncode in (0, 3), done.stderr
    page = (files / "hubness.html").read_text()
    assert "“who sells " in page
    assert '<a href="https://shop.test/' in page
    assert "By group" in page
    assert "By value" in done.stdout
    assert "Shares of the answers by group" in page
    shares = done.stdout.split("Shares by value")[1]
    assert "excess, raw" in shares
    assert shares.count("20.0%") >= 5
    result = json.loads(run(*PAIRS, *named, "--json").stdout)["check"]
    slices = result["diagnosis"]["slices"]
    assert sorted((part["value"], part["items"]) for part in slices) == [
        (str(value), 12) for value in range(5)
    ]
    assert sum(part["queries"] for part in slices) == 30
    assert sum(
        group["right"]["estimate"] for group in result["diagnosis"]["groups"]
    ) == pytest.approx(1)
    assert any(
        "who sells" in query["text"]
        for hub in result["diagnosis"]["hubs"]
        for query in hub["swallows"]
    )
    done = run(
        "check",
        "products",
        "--queries",
        "queries.npz",
        *PAGE,
        "--query-text",
        "question",
        "--json",
    )
    assert done.returncode in (0, 3), done.stderr
    hubs = json.loads(done.stdout)["check"]["diagnosis"]["hubs"]
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
    assert done.returncode in (0, 3), done.stderr
    shown, [line] = page.count("<img"), done.stderr.splitlines()
    assert shown > 0
    of_folder = run(*PAIRS, *field, "--image-folder", "images", "--json")
    left_out = json.loads(of_folder.stdout)["check"]["images_left_out"]
    assert left_out > 0
    assert line.startswith(f"milvus-hubness: warning: {left_out} images left out: not a PNG")
    assert f"{left_out} images left out" in page
    done = run(*PAIRS, *field)
    assert done.returncode in (0, 3), done.stderr
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


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--slice-by", "colour"), "choose one of group, id, note with --slice-by"),
        (("--group-by", "colour"), "choose one of group, id, note with --group-by"),
        (("--image-field", "colour"), "choose one of group, id, note with --image-field"),
        (("--save-run", "raw.trec", "corrected.trec"), "the key a 0 cannot be in raw.trec"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else None,
)
def test_what_the_rows_cannot_show_is_said_before_the_methods_are_tried(
    pairs, files, run, monkeypatch, options, words
):
    """On many rows these take minutes."""
    monkeypatch.setattr("milvus_hubness.reports.tuned.tuning.tune", None)
    named = PAIRS
    if "--save-run" in options:
        keys = np.array([f"a {number}" for number in range(60)])
        np.savez("items.npz", vector=vectors(np.random.default_rng(4), 60, DIM), key=keys)
        np.savez("judged.npz", query=np.load("queries.npz")["query"], key=keys[:30])
        named = ("check", "--items", "items.npz", "--queries", "bank.npy", "--pairs", "judged.npz")
    assert_fails(run(*named, *options), 1, words)
    assert not (files / "hubness.html").exists()


def test_a_file_of_items_has_no_fields(pairs, run, monkeypatch):
    monkeypatch.setattr("milvus_hubness.reports.tuned.tuning.tune", None)
    np.save("items.npy", vectors(np.random.default_rng(4), 60, DIM))
    words = ("check", "--items", "items.npy", "--queries", "bank.npy", "--group-by", "group")
    assert_fails(run(*words), 1, "no scalar field 'group', nor any other: leave out --group-by")


@pytest.fixture
def photos(files, monkeypatch):
    """A gallery whose correction gains, and pairs that show it."""
    monkeypatch.delenv("MILVUS_HUBNESS_VERDICT")
    items, queries, answers = hubby_gallery()
    plain_collection(connect("shop.db"), "photos", items, "IP")
    np.save("past.npy", queries[:400])
    np.savez("pairs.npz", queries=queries[400:], label=answers[400:])
    return "check", "photos", "--bank", "past.npy", "--pairs", "pairs.npz"


def test_the_figures_of_the_hubs_are_shown_beside_the_page(photos, files, run):
    done = run(*photos, "--page", "hubness.html", "--json")
    measured = json.loads(done.stdout)["check"]["diagnosis"]
    shown = run(*photos, "--page", "hubness.html")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "skewness of N_10" in shown.stdout
    before, after = (measured[when]["hub_occurrence"] for when in ("before", "after"))
    assert f"{before:.1%} -> {after:.1%}" in next(
        line for line in shown.stdout.splitlines() if "N_10 ≥ 20" in line
    )
    reciprocity = measured["reciprocity"]
    words = (
        f"{reciprocity['before']:.1%} -> {reciprocity['after']:.1%} of "
        f"{reciprocity['distinct']:,} distinct queries"
    )
    assert words in " ".join(shown.stdout.split())
    assert (files / "hubness.html").exists()


def test_what_options_about_the_hubs_need_is_said_before_the_work(photos, run):
    bank = photos[:4]
    for options, words in (
        (("--save-run", "a.trec", "b.trec"), "--save-run is about queries apart from the bank"),
        (("--query-text", "question"), "--query-text is about queries apart from the bank"),
        (("--image-field", "photo"), "--image-field is about a page: pass --page"),
    ):
        done = run(*bank, *options)
        assert done.returncode == 2
        assert words in " ".join(done.stderr.split())


def test_a_log_and_its_demand_are_shown(capsys):
    """Of a bank without near copies there is nothing to say."""
    items, queries, _ = hubby_gallery()
    asked = np.repeat(np.arange(100), np.r_[120, np.ones(99, int)])
    noise = 0.01 * np.random.default_rng(0).standard_normal((219, items.shape[1]))
    log = QueryBank((queries[asked] + noise).astype(np.float32), groups=asked)
    biases = (queries[:100] @ items.T).max(0)
    for bank, count in ((log, 1), (QueryBank(queries[:100], groups=np.arange(100)), 0)):
        show_diagnosis(diagnose(queries[300:350], items, biases, bank=bank))
        shown = " ".join(capsys.readouterr().out.split())
        assert shown.count("219 queries are 100 groups of near copies") == count
        assert shown.count("demand and correction") == count
        assert shown.count("their rank correlation is") == count
