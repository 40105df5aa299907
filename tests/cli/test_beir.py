"""A BEIR folder with graded judgements goes through tune, check and migrate."""

import json
from pathlib import Path

import ir_measures
import numpy as np
import pytest

from milvus_hubness import HubnessClient, connect, to_run
from tests.cli.conftest import assert_fails
from tests.support.galleries import plain_collection

DIM, ITEMS, QUERIES = 24, 300, 120
NDCG = ir_measures.parse_measure("nDCG@10")


@pytest.fixture
def folder(files):
    """A collection with hubs, a bank, and a BEIR folder in which two rows answer a query, one of them better."""
    rng = np.random.default_rng(6)
    drift = rng.normal(size=DIM)
    items = rng.normal(size=(ITEMS, DIM)) + np.outer(rng.gamma(1, 0.7, ITEMS), drift)

    def asked(which):
        noise = rng.normal(size=(len(which), DIM))
        return (items[which] + 1.2 * noise + 0.8 * drift).astype(np.float32)

    order = rng.permutation(ITEMS)
    client = connect("shop.db")
    plain_collection(client, "gallery", items.astype(np.float32), "COSINE")
    client.close()
    np.save("past.npy", asked(order[QUERIES:]))

    Path("beir/qrels").mkdir(parents=True)
    np.save("beir/queries.npy", asked(order[:QUERIES]))
    texts = [{"_id": f"PLAIN-{number}", "text": "a query"} for number in range(QUERIES)]
    Path("beir/queries.jsonl").write_text("\n".join(map(json.dumps, texts)))
    lines = ["query-id\tcorpus-id\tscore"]
    for number, item in enumerate(order[:QUERIES]):
        near = np.argsort(-items @ items[item])[1]
        lines += [f"PLAIN-{number}\t{item}\t2", f"PLAIN-{number}\t{near}\t1"]
    # A row that is gone, a query that has no vector, and a row that was judged as wrong.
    lines += ["PLAIN-0\t4711\t2", "PLAIN-777\t1\t1", f"PLAIN-1\t{order[5]}\t0"]
    Path("beir/qrels/test.tsv").write_text("\n".join(lines))
    return files


def figure(run, qrels="used.qrels"):
    ranking = run if isinstance(run, dict) else ir_measures.read_trec_run(str(run))
    return ir_measures.calc_aggregate([NDCG], ir_measures.read_trec_qrels(qrels), ranking)[NDCG]


def test_a_folder_with_grades_goes_through_tune_check_and_migrate(folder, run):
    judged = ("--pairs", "beir", "--measure", "nDCG@10", "--json")
    done = run("tune", "gallery", "--bank", "past.npy", *judged)
    assert done.returncode == 0, done.stderr
    tuning = json.loads(done.stdout)["tune"]
    assert tuning["measure"] == "nDCG@10"
    assert tuning["queries"] == QUERIES
    assert tuning["verdict"] == "apply"

    save = ("--save-run", "raw.trec", "corrected.trec", "--save-qrels", "used.qrels")
    done = run("check", "gallery", "--bank", "past.npy", *judged, *save)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)["check"]
    assert result["runs"] == ["raw.trec", "corrected.trec", "used.qrels"]
    diagnosis = result["diagnosis"]
    assert diagnosis["value_before"] == pytest.approx(figure("raw.trec"), abs=1e-6)
    assert diagnosis["value_after"] == pytest.approx(figure("corrected.trec"), abs=1e-6)
    assert diagnosis["value_before"] == pytest.approx(tuning["rows"][0]["value"], abs=1e-6)
    assert "4711" not in Path("used.qrels").read_text()
    assert len(diagnosis["left_out"]) == 2

    done = run("migrate", "run", "gallery", "--bank", "past.npy", "--json")
    assert done.returncode == 0, done.stderr
    done = run("check", "gallery_hubness", *judged, *save)
    assert done.returncode == 0, done.stderr
    after = json.loads(done.stdout)["check"]["diagnosis"]["value_after"]
    assert after > diagnosis["value_before"] + 0.02

    # What users get is what was measured.
    queries = np.load("beir/queries.npy")
    results = HubnessClient("shop.db").search("gallery_hubness", data=list(queries), limit=10)
    ids = [f"PLAIN-{number}" for number in range(QUERIES)]
    assert figure(to_run(results, ids)) == pytest.approx(after, abs=1e-6)


def test_a_bad_folder_is_one_line(folder, run):
    def refused(said, *arguments):
        done = run("tune", "gallery", "--bank", "past.npy", "--pairs", "beir", *arguments)
        assert_fails(done, 1, *said)

    refused(["the measure must be R@k, MRR, MAP or nDCG@k, not 'nDCG'"], "--measure", "nDCG")
    qrels = Path("beir/qrels/test.tsv")
    qrels.write_text("query-id\tcorpus-id\tscore\nPLAIN-1\t3\thigh")
    refused(["test.tsv: line 2 has the grade 'high', which is no number"])
    qrels.write_text("query-id\tcorpus-id\tscore\nPLAIN-777\t3\t1")
    refused(["none of the 1 query ids", "PLAIN-777"])
    qrels.write_text("query-id\tcorpus-id\tscore\n")
    refused(["test.tsv", "no judgements"])
