"""`check --save-run` writes what evaluators read: their figures are those of the diagnosis."""

import json
import os
import stat
from pathlib import Path

import ir_measures
import numpy as np
import pytest
from pymilvus import DataType

from milvus_hubness import Detail, Judgements, MilvusStore, RunFiles, connect
from milvus_hubness.reports import collections, report
from tests.cli.conftest import DIM, assert_fails
from tests.support.galleries import vectors

BANK = ("--bank", "bank.npy", "--json")
SAVE = ("--save-run", "raw.trec", "corrected.trec", "--save-qrels", "used.qrels")
NAMES = {"R@1": "Success@1", "R@10": "Success@10", "MRR": "RR", "MAP": "AP", "nDCG@10": "nDCG@10"}
ITEMS = 150


def untidy(rng):
    """Rows of which every third one has a copy, and rows of a grid, many of which have equal scores."""
    rows = vectors(rng, ITEMS, DIM)
    rows[1::3] = rows[::3]
    rows[100:] = np.sign(rng.normal(size=(ITEMS - 100, DIM)))
    return rows


def collection(client, name, key_type, keys, rows, metric):
    schema = client.create_schema(auto_id=False)
    schema.add_field("sku", key_type, is_primary=True, max_length=64)
    schema.add_field("vector", DataType.FLOAT_VECTOR, dim=DIM)
    index = client.prepare_index_params()
    index.add_index("vector", index_type="FLAT", metric_type=metric)
    client.create_collection(name, schema=schema, index_params=index, consistency_level="Strong")
    data = [{"sku": key, "vector": row} for key, row in zip(keys, rows.tolist(), strict=True)]
    client.insert(name, data)


@pytest.fixture
def judged(files):
    """Two collections of the same rows, whose keys are numbers and texts, and graded judgements of them."""
    rng = np.random.default_rng(6)
    rows = untidy(rng)
    client = connect("shop.db")
    collection(client, "numbers", DataType.INT64, range(ITEMS), rows, "COSINE")
    texts = [f"item-{number}/é" for number in range(ITEMS)]
    collection(client, "texts", DataType.VARCHAR, texts, rows, "L2")
    client.close()
    queries = np.vstack([rows[:20] + rng.normal(size=(20, DIM)) / 2, rows[100:120], rows[30:40]])
    lines = {}
    for prefix, form in (("numbers", "{}"), ("texts", "item-{}/é")):
        lines[prefix] = []
        picks = np.random.default_rng(7)
        for query in range(len(queries)):
            right = picks.choice(ITEMS, picks.integers(1, 12), replace=False)
            own = np.union1d(right, query if query < 20 else 80 + query)
            lines[prefix] += [
                f"q{query} 0 {form.format(key)} {picks.integers(0, 4)}" for key in own
            ]
        lines[prefix].append(f"q0 0 {form.format(4711)} 1")
        (files / f"{prefix}.qrels").write_text("\n".join(lines[prefix]), encoding="utf-8")
    np.savez("vectors.npz", query_id=[f"q{number}" for number in range(50)], query=queries)
    return files


def figures_of(run, qrels, names=NAMES):
    relevant = list(ir_measures.read_trec_qrels(str(qrels)))
    ranking = list(ir_measures.read_trec_run(str(run)))
    measures = {name: ir_measures.parse_measure(theirs) for name, theirs in names.items()}
    values = ir_measures.calc_aggregate(measures.values(), relevant, ranking)
    return {name: values[theirs] for name, theirs in measures.items()}


def diagnosed(run, *arguments):
    done = run("check", *arguments)
    # The verdict may be against a correction of this gallery.
    assert done.returncode in (0, 3), done.stderr
    return json.loads(done.stdout)["check"]["diagnosis"], done.stderr


@pytest.mark.parametrize("name", ["numbers", "texts"])
def test_the_figures_of_a_run_are_those_of_the_diagnosis(judged, run, name):
    pairs = ("--pairs", f"{name}.qrels", "--pairs-queries", "vectors.npz", *SAVE)
    diagnosis, _ = diagnosed(run, name, *BANK, *pairs, "--measure", "MAP")
    figures = []
    for path, when in ("raw.trec", "before"), ("corrected.trec", "after"):
        figures.append(figures_of(path, "used.qrels"))
        ours = {**diagnosis[f"retrieval_{when}"], "MAP": diagnosis[f"value_{when}"]}
        assert {measure: ours[measure] for measure in NAMES} == pytest.approx(figures[-1], abs=1e-6)
        assert all(0.05 < value < 1 for value in figures[-1].values())
    assert figures[0] != figures[1]

    rows = [line.split(" ") for line in Path("raw.trec").read_text("utf-8").splitlines()]
    assert len(rows) == 50 * ITEMS, "a small gallery is there as a whole"
    assert {row[1] for row in rows} == {"Q0"}
    assert [int(row[3]) for row in rows] == [*range(1, ITEMS + 1)] * 50
    scores = np.array([np.float32(row[4]) for row in rows]).reshape(50, ITEMS)
    assert (np.diff(scores) < 0).all(), "trec_eval would put equal ones in an order of its own"
    assert "4711" not in Path("used.qrels").read_text("utf-8")


def test_a_cut_run_gives_the_measures_within_its_depth_and_says_which_it_does_not(judged, run):
    pairs = ("--pairs", "numbers.qrels", "--pairs-queries", "vectors.npz", "--run-depth", "10")
    ours, said = diagnosed(run, "numbers", *BANK, *pairs, *SAVE, "--measure", "nDCG@10")
    assert figures_of("raw.trec", "used.qrels", {"nDCG@10": "nDCG@10"}) == {
        "nDCG@10": pytest.approx(ours["value_before"], abs=1e-6)
    }
    assert "the runs have" not in said
    ours, said = diagnosed(run, "numbers", *BANK, *pairs, *SAVE, "--measure", "MAP")
    assert figures_of("raw.trec", "used.qrels", {"MAP": "AP"})["MAP"] < ours["value_before"] - 1e-3
    assert "the runs have the first 10 of 150 rows" in said
    assert "miss what MAP counts behind them: pass --run-depth 150" in said


def test_ids_with_blanks_need_files_of_json(judged, run):
    client = connect("shop.db")
    keys = [f"red shoe {number}" for number in range(ITEMS)]
    collection(client, "blanks", DataType.VARCHAR, keys, untidy(np.random.default_rng(6)), "COSINE")
    qrels = {f"a query {number}": {f"red shoe {number}": 1 + number % 2} for number in range(50)}
    Path("judged.json").write_text(json.dumps(qrels))
    ids = list(qrels)
    np.savez("vectors.npz", query_id=ids, query=np.load("vectors.npz")["query"])
    pairs = ("--pairs", "judged.json", "--pairs-queries", "vectors.npz")
    done = run("check", "blanks", *BANK[:-1], *pairs, *SAVE)
    assert_fails(done, 1, "the query id a query 0 cannot be in raw.trec", "name a .json file")

    np.savez("numbered.npz", query=np.load("vectors.npz")["query"], key=np.array(keys[:50]))
    done = run("check", "blanks", *BANK[:-1], "--pairs", "numbered.npz", *SAVE)
    assert_fails(done, 1, "the key red shoe ", "cannot be in raw.trec", "name a .json file")
    assert not {"raw.trec", "corrected.trec", "used.qrels"} & set(os.listdir())

    files = ("--save-run", "raw.json", "corrected.json", "--save-qrels", "used.json")
    ours, _ = diagnosed(run, "blanks", *BANK, *pairs, *files)
    used = json.loads(Path("used.json").read_text())
    assert used == qrels
    raw = json.loads(Path("raw.json").read_text())
    measure = ir_measures.parse_measure("Success@1")
    assert ir_measures.calc_aggregate([measure], used, raw)[measure] == pytest.approx(
        ours["value_before"]
    )


def test_queries_without_ids_or_answers_have_the_numbers_of_the_file(judged, run):
    queries = np.load("vectors.npz")["query"]
    np.save("queries.npy", queries[:30])
    diagnosed(run, "numbers", *BANK, "--queries", "queries.npy", *SAVE[:3])
    lines = Path("raw.trec").read_text().splitlines()
    assert list(dict.fromkeys(line.split()[0] for line in lines)) == list(map(str, range(30)))

    # The right row of query 1 is none of the collection, so the query is left out.
    np.savez("pairs.npz", query=queries[:24], key=[0, 4711, *range(2, 24)])
    diagnosed(run, "numbers", *BANK, "--pairs", "pairs.npz", *SAVE)
    numbers = [0, *range(2, 24)]
    assert Path("used.qrels").read_text() == "".join(f"{n} 0 {n} 1\n" for n in numbers)
    lines = Path("corrected.trec").read_text().splitlines()
    assert list(dict.fromkeys(line.split()[0] for line in lines)) == list(map(str, numbers))


def test_bad_input_is_one_line_and_writes_nothing(judged, run):
    pairs = ("--pairs", "numbers.qrels", "--pairs-queries", "vectors.npz")
    known = set(os.listdir())

    def refused(code, *arguments, said=()):
        assert_fails(run("check", "numbers", *BANK[:-1], *arguments), code, *said)
        assert set(os.listdir()) == known

    refused(2, *pairs, "--save-run", "a.trec", "./a.trec", said=["--save-run", "the same file"])
    page = ("--page", "hubness.html")
    refused(2, *pairs, *page, "--save-run", "a.trec", page[1], said=["--page and --save-run"])
    same = ("--save-run", "a.trec", "b.trec", "--save-qrels", "numbers.qrels")
    refused(2, *pairs, *same, said=["--pairs and --save-qrels would be the same file"])
    missing = ("--save-run", "a.trec", "missing/b.trec")
    refused(1, *pairs, *missing, said=["cannot write missing/b.trec: No such file"])
    refused(1, *pairs, "--save-run", ".", "b.trec", said=["cannot write .: Is a directory"])
    alone = ("--queries", "bank.npy", *SAVE)
    refused(1, *alone, said=["--save-qrels needs right answers: pass --pairs"])

    text = Path("numbers.qrels").read_text()
    Path("numbers.qrels").write_text(text + "\nq1 0 7 2.5")
    refused(1, *pairs, *SAVE, said=["query q1 has the grade 2.5 for 7", "whole grades only"])
    Path("numbers.qrels").write_text("q1 0 7 good")
    refused(1, *pairs, *SAVE, said=["numbers.qrels: line 1 has the grade 'good'", "no number"])
    Path("numbers.qrels").write_text("nobody 0 7 1")
    refused(1, *pairs, *SAVE, said=["none of the 1 query ids", "has a vector in vectors.npz"])
    Path("numbers.qrels").write_text("")
    refused(1, *pairs, *SAVE, said=["numbers.qrels", "it is empty"])
    Path("numbers.qrels").write_text(text)
    refused(1, *pairs, *SAVE, "--measure", "recall", said=["the measure must be R@k, MRR, MAP"])
    done = run("check", "numbers", *BANK[:-1], *pairs, "--save-qrels", "used.qrels")
    assert done.returncode == 2
    assert "--save-qrels needs --save-run" in done.stderr
    done = run("check", "numbers", *BANK[:-1], *pairs, "--run-depth", "5")
    assert done.returncode == 2
    assert "--run-depth is of the files of --save-run" in done.stderr
    done = run("check", "numbers", *BANK[:-1], *pairs, "--save-run", "raw.trec")
    assert done.returncode == 2
    assert "'--save-run' requires 2 arguments" in done.stderr


def test_a_killed_diagnosis_leaves_the_runs_as_they_were(judged, run, monkeypatch):
    Path("corrected.trec").write_text("former")
    Path("corrected.trec").chmod(0o600)
    pairs = ("--pairs", "numbers.qrels", "--pairs-queries", "vectors.npz")

    def rankings(queries, gallery, depth, ranks, own=None):
        yield from list(wholly(queries, gallery, depth, ranks))[:20]
        raise KeyboardInterrupt

    wholly = report.rankings
    with monkeypatch.context() as patched:
        patched.setattr(report, "rankings", rankings)
        with pytest.raises(KeyboardInterrupt):
            collections.diagnose(
                MilvusStore(connect("shop.db")),
                "numbers",
                recipe=np.load("bank.npy"),
                judgements=Judgements.load("numbers.qrels", "vectors.npz"),
                detail=Detail(runs=RunFiles(Path("raw.trec"), Path("corrected.trec"))),
            )
    assert Path("corrected.trec").read_text() == "former"
    assert not Path("raw.trec").exists()
    assert not [name for name in os.listdir() if name.startswith(".")]

    diagnosed(run, "numbers", *BANK, *pairs, *SAVE)
    assert Path("corrected.trec").read_text().startswith("q0 Q0 ")
    assert stat.S_IMODE(os.stat("corrected.trec").st_mode) == 0o600
