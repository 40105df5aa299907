"""`diagnose --save-run` writes what evaluators read: their figures are those of the diagnosis."""

import json
import os
import stat
from pathlib import Path

import ir_measures
import numpy as np
import pytest
from pymilvus import DataType

from milvus_hubness import connect
from tests.cli.conftest import DIM, assert_fails
from tests.support.galleries import vectors

NNN = ("--bank", "bank.npy", "--method", "nnn", "--k", "4", "--json")
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
    done = run("diagnose", *arguments)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["diagnosis"], done.stderr


@pytest.mark.parametrize("name", ["numbers", "texts"])
def test_the_figures_of_a_run_are_those_of_the_diagnosis(judged, run, name):
    pairs = ("--pairs", f"{name}.qrels", "--pairs-queries", "vectors.npz", *SAVE)
    diagnosis, _ = diagnosed(run, name, *NNN, *pairs, "--measure", "MAP")
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
