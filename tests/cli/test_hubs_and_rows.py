"""`hubs` lists and explains what a plain float64 computation gives, at every bias location."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from milvus_hubness import DualInvertedSoftmax, MilvusStore, QueryBank, connect
from milvus_hubness.correction.estimators import to_dict
from milvus_hubness.jobs.store.records import TuningRecord
from milvus_hubness.reports.tuned import store_tuned
from tests.cli.conftest import DIM, assert_fails
from tests.support.galleries import as_distance, plain_collection, similarity, vectors

ROWS, K, DEPTH = 50, 4, 10
NNN = ("--bank", "bank.npy", "--method", "nnn", "--param", f"k={K}")
QUERIES = ("--bank-column", "queries")
ENABLE = ("enable", "photos", *NNN, "--force")
LOCATIONS = {
    "vector": ("COSINE", ("migrate", "run", "photos", *NNN, "--no-writers", "--force")),
    "beside": ("L2", (*ENABLE, "--max-miss-rate", "0.5")),
    "not corrected": ("COSINE", ()),
}


def ranks(scores):
    """From 1, the highest score first, in each row."""
    return 1 + np.argsort(np.argsort(-scores, axis=-1), axis=-1)


def read(run, *arguments):
    done = run(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("location", LOCATIONS)
def test_they_agree_with_a_plain_computation(files, run, location):
    metric, command = LOCATIONS[location]
    items, bank = vectors(np.random.default_rng(6), ROWS, DIM), np.load("bank.npy")
    plain_collection(connect("shop.db"), "photos", items, metric)
    if command:
        done = run(*command)
        assert done.returncode == 0, done.stderr
    name, needed = (
        ("photos_hubness", ()) if location == "vector" else ("photos", () if command else NNN)
    )
    raw = similarity(bank, items, metric)
    biases = 0.75 * np.sort(raw, axis=0)[-K:].mean(axis=0)
    biases -= biases.mean()
    before, after = ranks(raw), ranks(raw - biases)
    counts = [(table <= DEPTH).sum(axis=0) for table in (before, after)]

    listed = read(run, "hubs", name, *needed)["hubs"]
    hubs = [row for row in listed["rows"] if row["kind"] == "hub"]
    assert {row["key"]: (row["before"], row["after"]) for row in hubs} == {
        key: (counts[0][key], counts[1][key]) for key in range(ROWS) if counts[0][key]
    }
    assert [row["before"] for row in hubs] == sorted((row["before"] for row in hubs), reverse=True)
    assert {row["key"] for row in listed["rows"]} == set(range(ROWS)), (
        "every row is a hub or an anti-hub here"
    )
    assert [row["bias"] for row in hubs] == pytest.approx(
        [biases[row["key"]] for row in hubs], abs=1e-5
    )
    assert sum(row["share_before"] for row in hubs) == pytest.approx(1)
    assert (listed["antihubs_before"], listed["antihubs_after"]) == tuple(
        int((own == 0).sum()) for own in counts
    )

    key = hubs[0]["key"]
    row = read(run, "hubs", name, "--row", str(key), *needed)["hubs"]["row"]
    assert (row["key"], row["before"], row["after"]) == (key, counts[0][key], counts[1][key])
    assert row["bias"] == pytest.approx(biases[key], abs=1e-5)
    assert row["rows_with_less_bias"] == pytest.approx((biases < biases[key]).mean())
    answered = np.flatnonzero(np.minimum(before, after)[:, key] <= DEPTH)
    assert {
        rank["query"]: (rank["raw_rank"], rank["corrected_rank"]) for rank in row["queries"]
    } == {query: (before[query, key], after[query, key]) for query in answered.tolist()}
    for rank in row["queries"]:
        own = raw[rank["query"], key]
        shown = (rank["raw_score"], rank["corrected_score"])
        assert shown == pytest.approx(
            (as_distance(own, metric), as_distance(own - biases[key], metric)), abs=1e-4
        )

    np.save("new.npy", bank[[7, 3]])
    found = read(
        run, "hubs", name, *needed, "--query", "new.npy", "--query-number", "1", "--top", "5"
    )
    assert (
        found["hubs"]["query"]
        == read(run, "hubs", name, *needed, "--query-number", "3", "--top", "5")["hubs"]["query"]
    ), "a query of the bank has its number there"
    answers = found["hubs"]["query"]["answers"]
    assert [answer["key"] for answer in answers] == np.argsort(-(raw - biases)[3])[:5].tolist()
    for answer in answers:
        key = answer["key"]
        assert (answer["raw_rank"], answer["corrected_rank"]) == (before[3, key], after[3, key])
        own = (answer["raw_score"], answer["bias"], answer["corrected_score"])
        expected = (
            as_distance(raw[3, key], metric),
            biases[key],
            as_distance((raw - biases)[3, key], metric),
        )
        assert own == pytest.approx(expected, abs=1e-4)
    last = int(np.argmax(after[3]))
    answers = read(
        run, "hubs", name, "--row", str(last), *needed, "--query-number", "3", "--top", "5"
    )["hubs"]["query"]
    assert [(answer["key"], answer["corrected_rank"]) for answer in answers["answers"][5:]] == [
        (last, ROWS)
    ]


def test_they_print_tables_with_the_texts_of_queries(files, run):
    bank = np.load("bank.npy")
    texts = [f"red shoes {n} [/b]" for n in range(len(bank))]
    pq.write_table(pa.table({"text": texts, "embedding": list(bank)}), "texts.parquet")
    bank_with_texts = (
        "--bank",
        "texts.parquet",
        "--query-text",
        "text",
        "--method",
        "nnn",
        "--param",
        "k=4",
    )
    hub = read(run, "hubs", "products", *NNN, "--top", "1")["hubs"]["rows"][0]
    shown = run("hubs", "products", "--row", str(hub["key"]), *bank_with_texts, "--top", "3").stdout
    assert f"of {hub['before']} of 40 bank queries -> {hub['after']}" in shown
    assert shown.count("red shoes") == 3
    shown = run(
        "hubs",
        "products",
        "--row",
        str(hub["key"]),
        *bank_with_texts,
        "--query-number",
        "8",
        "--top",
        "3",
    ).stdout
    assert "red shoes 8 [/b]" in shown
    assert "COSINE: raw score - 1 x bias = corrected score" in shown
    assert "raw rank" in shown
    of_rows = ("--query", "collection:products", "--query-text", "note", "--query-number", "9")
    assert read(run, "hubs", "products", *NNN, *of_rows)["hubs"]["query"]["text"] == "n9"
    shown = run("hubs", "products", *NNN, "--top", "2").stdout
    assert f"{hub['before']} -> {hub['after']}" in shown


def test_a_gate_that_leaves_a_query_uncorrected_is_shown(files, run):
    done = run("enable", "products", *NNN, "--gate", "1", "--force", "--max-miss-rate", "0.5")
    assert done.returncode == 0, done.stderr
    far = vectors(np.random.default_rng(99), 200, DIM)
    np.save("far.npy", far)
    shown = [
        read(run, "hubs", "products", "--query", "far.npy", "--query-number", str(n))["hubs"][
            "query"
        ]
        for n in range(6)
    ]
    gated = [answers for answers in shown if answers["gated"]]
    assert gated
    for answers in gated:
        assert answers["strength"] == 0
        assert all(answer["raw_rank"] == answer["corrected_rank"] for answer in answers["answers"])
    for answers in shown:
        assert answers["gated"] or answers["strength"] == 1


def test_what_is_wrong_is_said_in_one_line(files, run):
    np.savez("few.npz", queries=np.load("bank.npy"), text=np.array(["a", "b", "c"]))
    for arguments, code, *words in (
        (["hubs", "products", "--row", "7"], 1, "'products' is not corrected", "--bank FILE"),
        (["hubs", "products"], 1, "'products' is not corrected", "--bank FILE"),
        (["hubs", "products", "--row", "700", *NNN], 1, "'products' has no row with the key '700'", "check the key"),
        (["hubs", "products", *NNN, "--query-number", "40"], 1, "no query 40: choose one from 0 to 39"),
        (["hubs", "products", "--row", "7", "--query-text", "text"], 1, "the stored bank has no texts", "--bank FILE"),
        (["hubs", "products", "--row", "7", "--bank", "bank.parquet", "--query-text", "no"], 1, "bank.parquet", "'no'"),
        (["hubs", "products", "--row", "7", "--bank", "bank.npz", *QUERIES, "--query-text", "other"], 1,
         "'other' of bank.npz must be 1-D, one value a query, but has shape (3, 8)"),
        (["hubs", "products", "--row", "7", "--bank", "few.npz", *QUERIES, "--query-text", "text"], 1,
         "'text' of few.npz has 3 texts for 40 queries"),
        (["hubs", "nowhere", "--row", "7"], 1, "no collection or alias 'nowhere'"),
    ):  # fmt: skip
        assert_fails(run(*arguments), code, *words)
    assert run("migrate", "run", "products", *NNN, "--no-writers", "--force").returncode == 0
    client = connect("shop.db")
    client.delete("products__bank", filter="id != ''")
    assert_fails(
        run("hubs", "products_hubness", "--row", "7"),
        1,
        "bank 'products__bank' has no queries",
        "run refresh",
    )


def test_a_method_is_not_that_of_a_corrected_collection(files, run):
    """Its figures were shown as those of the method that was named."""
    assert run("migrate", "run", "products", *NNN, "--no-writers", "--force").returncode == 0
    for words in ((), ("--row", "3"), ("--query", "bank.npy")):
        done = run("hubs", "products_hubness", *words, "--method", "csls")
        assert_fails(done, 1, "'products_hubness' is corrected", "NNN(k=4", "--method")


@pytest.mark.parametrize("words", [(), ("--row", "3")], ids=" ".join)
def test_hubs_are_shown_after_a_choice_that_needs_reference_items(files, run, words):
    """The collection does not have these, and the command takes none."""
    store = MilvusStore(connect("shop.db"))
    record = TuningRecord(
        field="vector",
        verdict="apply",
        choice=to_dict(DualInvertedSoftmax()),
        strength=1.0,
        reason="labelled queries gain",
        labelled=True,
        bank_fingerprint=QueryBank.load("bank.npy").fingerprint,
        tuned_at="2026-11-30T00:00:00Z",
    )
    assert store_tuned(store, "products", record) == ""
    done = run("hubs", "products", "--bank", "bank.npy", *words)
    assert done.returncode == 0, done.stderr
    assert "needs reference items" in done.stderr
    assert "those of the default method" in done.stderr
    done = run("hubs", "products", "--bank", "bank.npy", "--method", "dualis")
    assert done.returncode == 2
    assert "--target-bank" not in done.stderr
