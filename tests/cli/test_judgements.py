"""Commands judge by right rows of every form, and count a query with several of them once."""

import json
from html import unescape

import ir_measures
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from milvus_hubness import MilvusStore, Recipe, connect, migrate, plan_correction
from tests.cli.conftest import DIM, assert_fails
from tests.support.galleries import vectors

BANK = ("--bank", "bank.npy")
CHECK = ("check", "products", *BANK, "--page", "hubness.html", "--json", "--pairs")
COUNT, ANSWERED, FIRST = 60, 53, 22
"""Queries; those that find one of their two right rows; those that find the one that is named first."""


@pytest.fixture
def judged(files):
    """The 60 vectors of the rows, as queries that find their own row, and two right rows of each."""
    rows = connect("shop.db").query("products", filter="id >= 0", output_fields=["id", "vector"])
    queries = np.array([row["vector"] for row in sorted(rows, key=lambda row: row["id"])])
    keys = []
    for number in range(COUNT):
        following = (number + 1) % COUNT
        own = number if number < ANSWERED else (number + 2) % COUNT
        keys.append([own, following] if number < FIRST else [following, own])
    return queries, keys


def ids_of(folder, queries):
    names = [f"q{number}" for number in range(len(queries))]
    np.savez(folder / "queries.npz", query_id=names, query=queries)
    return names


def in_rows(folder, queries, keys):
    table = {
        "query": queries.repeat(2, axis=0).tolist(),
        "key": [key for two in keys for key in two],
    }
    pq.write_table(pa.table(table), "judged.parquet")
    return ("judged.parquet",)


def in_lists(folder, queries, keys):
    lines = [{"query": row.tolist(), "key": two} for row, two in zip(queries, keys, strict=True)]
    (folder / "judged.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return ("judged.jsonl",)


def in_qrels(folder, queries, keys):
    names = ids_of(folder, queries)
    lines = [f"{q} 0 {key} 1" for q, two in zip(names, keys, strict=True) for key in two]
    (folder / "qrels.txt").write_text("\n".join(lines))
    return ("qrels.txt", "--pairs-queries", "queries.npz")


def in_beir(folder, queries, keys):
    (folder / "beir" / "qrels").mkdir(parents=True)
    names = ids_of(folder / "beir", queries)
    lines = [
        f"{q}\t{key}\t{1 + key % 2}" for q, two in zip(names, keys, strict=True) for key in two
    ]
    text = "query-id\tcorpus-id\tscore\n" + "\n".join(lines)
    (folder / "beir" / "qrels" / "test.tsv").write_text(text)
    return ("beir",)


@pytest.mark.parametrize("form", [in_rows, in_lists, in_qrels, in_beir])
def test_of_two_right_rows_either_is_right(files, run, judged, form):
    """Rows of their own would give 53 of 120, 44.2%; the first of two, 22 of 60, 36.7%."""
    done = run(*CHECK, *form(files, *judged))
    assert done.returncode in (0, 3), done.stderr
    assert done.stderr == ""
    diagnosis = json.loads(done.stdout)["check"]["diagnosis"]
    assert diagnosis["n_queries"] == COUNT
    assert round(diagnosis["retrieval_before"]["R@1"], 3) == 0.883


def test_tune_counts_a_query_with_two_right_rows_once(files, run, judged):
    done = run(
        "tune", "products", "--bank", "bank.npy", "--json", "--pairs", *in_rows(files, *judged)
    )
    assert done.returncode == 0, done.stderr
    tuning = json.loads(done.stdout)["tune"]
    assert round(tuning["rows"][0]["value"], 3) == 0.883
    assert tuning["queries"] == COUNT


def test_a_refresh_is_judged_by_qrels(files, run, judged):
    client = connect("shop.db")
    store = MilvusStore(client)
    rng = np.random.default_rng(8)
    rows = [
        {"id": 1000 + number, "vector": row, "group": 0}
        for number, row in enumerate(vectors(rng, 200, DIM))
    ]
    client.insert("products", rows)
    bank = vectors(rng, 900, DIM)
    target = migrate(store, plan_correction(store, "products", Recipe(bank, verdict="skip"))).target
    np.save("new.npy", vectors(rng, 900, DIM))
    pairs = in_qrels(files, *judged)
    done = run("refresh", target, "--rename", "--bank", "new.npy", "--force", "--pairs", *pairs)
    assert done.returncode == 0, done.stderr
    assert "raw 88.3%" in done.stdout


def of_ir_measures(name, scores, keys, grades):
    """Return a measure of a raw search by ir-measures, from the scores (m, n) of rows 0 … n − 1."""
    run = {
        str(query): {str(row): score for row, score in enumerate(of_query)}
        for query, of_query in enumerate(scores.tolist())
    }
    qrels = {
        str(query): {str(key): grade for key, grade in zip(two, of_query, strict=True)}
        for query, (two, of_query) in enumerate(zip(keys, grades, strict=True))
    }
    measure = ir_measures.parse_measure(name)
    return ir_measures.calc_aggregate([measure], qrels, run)[measure]


def graded(folder, queries, keys):
    """Write judgements with the grades 1 and 3, and return these."""
    grades = [[1, 3] if query % 3 else [3, 1] for query in range(len(keys))]
    lines = [
        {"query": row.tolist(), "key": two, "grade": of_query}
        for row, two, of_query in zip(queries, keys, grades, strict=True)
    ]
    (folder / "judged.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return grades


def test_a_diagnosis_measures_what_users_send(files, run, judged):
    """Query 5, which fails, is sent 60 times more: R@1 falls to 53/120, and its interval with it."""
    queries, keys = judged
    fails = ANSWERED + 1
    often = np.r_[np.arange(COUNT), np.full(60, fails)]
    np.savez("log.npz", query=queries[often], key=[keys[query] for query in often])
    weights = np.where(np.arange(COUNT) == fails, 61, 1)
    np.savez("weighed.npz", query=queries, key=keys, weight=weights)
    np.savez("ignored.npz", query=queries, key=keys, weight=1.0 * (np.arange(COUNT) < ANSWERED))
    found = {}
    for name, share in (("log", 53 / 120), ("weighed", 53 / 120), ("ignored", 1)):
        done = run(*CHECK, f"{name}.npz", "--save-run", "raw.trec", "corrected.trec")
        assert done.returncode in (0, 3), done.stderr
        found[name] = json.loads(done.stdout)["check"]["diagnosis"]
        assert found[name]["value_before"] == pytest.approx(share)
        assert found[name]["retrieval_before"]["R@1"] == pytest.approx(share)
        assert "evaluators count each query of the runs once" in done.stderr
    assert found["log"]["retrieval_before"] == pytest.approx(found["weighed"]["retrieval_before"])
    assert found["log"]["n_queries"] == found["weighed"]["n_queries"] == COUNT
    assert found["ignored"]["n_queries"] == ANSWERED, "nobody sends the others"

    # Sent 61 times, it is 61 observations; with a weight alone, it is one.
    raw, weighed = (found[name]["strengths"][0]["value"] for name in ("log", "weighed"))
    assert raw["high"] - raw["low"] < 0.2 < weighed["high"] - weighed["low"]


@pytest.mark.parametrize(
    ("measure", "theirs"),
    [("R@5", "Success@5"), ("MRR", "RR"), ("AP", "AP"), ("nDCG@10", "nDCG@10")],
)
def test_a_measure_is_that_of_ir_measures(files, run, judged, measure, theirs):
    queries, keys = judged
    grades = graded(files, queries, keys)
    unit = queries / np.linalg.norm(queries, axis=1, keepdims=True)
    expected = of_ir_measures(theirs, unit @ unit.T, keys, grades)

    done = run(*CHECK, "judged.jsonl", "--measure", measure)
    assert done.returncode in (0, 3), done.stderr
    diagnosis = json.loads(done.stdout)["check"]["diagnosis"]
    assert diagnosis["measure"] == {"AP": "MAP"}.get(measure, measure)
    assert diagnosis["value_before"] == pytest.approx(expected, abs=1e-6)
    gain = diagnosis["value_after"] - diagnosis["value_before"]
    assert diagnosis["gain"]["estimate"] == pytest.approx(gain)
    page = unescape((files / "hubness.html").read_text())
    assert f">{diagnosis['measure']}</" in page
    assert f"{100 * expected:.1f}%" in page

    pairs = ("--pairs", "judged.jsonl", "--measure", measure)
    done = run("tune", "products", "--bank", "bank.npy", "--json", *pairs)
    assert done.returncode == 0, done.stderr
    tuning = json.loads(done.stdout)["tune"]
    assert tuning["measure"] == diagnosis["measure"]
    assert tuning["rows"][0]["value"] == pytest.approx(expected, abs=1e-6)
    shown = run("tune", "products", "--bank", "bank.npy", *pairs).stdout
    assert f"{tuning['measure']} changes by" in " ".join(shown.split())


def test_wrong_measures_are_one_line(files, run, judged):
    graded(files, *judged)
    for command in (
        (*CHECK, "judged.jsonl"),
        ("tune", "products", "--bank", "bank.npy", "--pairs", "judged.jsonl"),
        ("refresh", "products", "--bank", "bank.npy", "--pairs", "judged.jsonl"),
    ):
        done = run(*command, "--measure", "precision")
        assert_fails(done, 1, "the measure must be R@k, MRR, MAP or nDCG@k, not 'precision'")
    done = run("tune", "products", "--bank", "bank.npy", "--measure", "MRR")
    assert done.returncode == 2
    assert "--measure needs right answers: pass --pairs" in " ".join(done.stderr.split())


def test_what_is_left_out_is_a_warning_with_its_count(files, run, judged):
    queries, keys = judged
    names = ids_of(files, queries)
    lines = [f"{q} 0 {key} 1" for q, (key, _) in zip(names, keys, strict=True)]
    lines[0] = "q0 0 d17 1"
    lines[1] = "q1 0 4711 1"
    (files / "qrels.txt").write_text("\n".join([*lines[:-1], "q99 0 1 1"]))
    done = run(*CHECK, "qrels.txt", "--pairs-queries", "queries.npz")
    assert done.returncode in (0, 3), done.stderr
    diagnosis = json.loads(done.stdout)["check"]["diagnosis"]
    assert diagnosis["n_queries"] == 57
    assert done.stderr.splitlines() == [f"milvus-hubness: {line}" for line in diagnosis["left_out"]]
    page = unescape((files / "hubness.html").read_text())
    assert all(f"<p>{line}</p>" in page for line in diagnosis["left_out"])
    assert diagnosis["left_out"] == [
        "1 of 60 query ids of qrels.txt have no vector in queries.npz: q99",
        "1 of 60 queries of queries.npz have no judgement in qrels.txt: q59",
        "2 of 59 judged keys are those of no usable row of 'products': d17, 4711 "
        "('d17' is no whole number, as the keys of the collection are, such as 0)",
        "2 of 59 queries have no right row in 'products': q0, q1",
    ]
    pairs = ("--pairs", "qrels.txt", "--pairs-queries", "queries.npz")
    tuned = run("tune", "products", "--bank", "bank.npy", "--json", *pairs)
    assert json.loads(tuned.stdout)["tune"]["left_out"] == diagnosis["left_out"]


def test_bad_judgements_are_one_line(files, run, judged):
    pairs = in_qrels(files, *judged)
    assert_fails(run(*CHECK, "qrels.txt"), 1, "name a file that has both with --pairs-queries")
    alone = ("--queries", "bank.npy", "--pairs-queries", "queries.npz")
    done = run("check", "products", *BANK, *alone)
    assert done.returncode == 2
    assert "--pairs-queries needs --pairs, which names its queries" in done.stderr
    names = [f"q{number}" for number in range(COUNT)]
    (files / "qrels.txt").write_text("".join(f"{name} 0 d17 1\n" for name in names))
    assert_fails(run(*CHECK, *pairs), 1, "none of the 60 judged keys", "'products'", "d17")
