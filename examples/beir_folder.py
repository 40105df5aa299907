"""A BEIR folder with graded judgements, from start to verdict: tune, diagnose, migrate, and runs for evaluators.

pip install ".[jobs,lite]" ir-measures  # in a clone: nothing is on PyPI yet
python beir_folder.py [FILE.db or http://HOST:PORT]
"""

import json
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

import ir_measures
import numpy as np
from pymilvus import DataType

from milvus_hubness import (
    Copy,
    Detail,
    HubnessClient,
    Judgements,
    RunFiles,
    connect,
    diagnose,
    migrate,
    plan_correction,
    to_run,
    tune,
)
from milvus_hubness.demo.run import build, collect

MEASURE = ir_measures.nDCG @ 10
QUERIES = 300
"""Docstrings that are queries; the functions are the corpus."""


def write_folder(folder, data):
    """Write functions of Python's standard library as a corpus, and docstrings as queries.

    The function that a docstring is of has the grade 2. Functions of the same name have the grade 1: `acquire` of
    another lock is not what was asked for, and no wrong answer either.
    """
    namesakes = defaultdict(list)
    for name in data.names:
        namesakes[name.rpartition(".")[2]].append(name)

    (folder / "qrels").mkdir(parents=True)
    with (
        open(folder / "corpus.jsonl", "w") as corpus,
        open(folder / "queries.jsonl", "w") as queries,
        open(folder / "qrels" / "test.tsv", "w") as qrels,
    ):
        qrels.write("query-id\tcorpus-id\tscore\n")
        for number, (name, docstring) in enumerate(zip(data.names, data.docstrings, strict=True)):
            corpus.write(json.dumps({"_id": name, "title": name, "text": ""}) + "\n")
            if number >= QUERIES:
                continue
            queries.write(json.dumps({"_id": f"q{number}", "text": docstring}) + "\n")
            for right in namesakes[name.rpartition(".")[2]]:
                qrels.write(f"q{number}\t{right}\t{2 if right == name else 1}\n")

    # One vector for each line of queries.jsonl, as your encoder would make them.
    np.save(folder / "queries.npy", data.queries[:QUERIES])


def load_corpus(uri, folder, vectors):
    """Create a plain collection of the corpus, whose keys are the ids of the folder."""
    client = connect(uri, create=True)
    schema = client.create_schema(auto_id=False)
    schema.add_field("id", DataType.VARCHAR, is_primary=True, max_length=512)
    schema.add_field("vector", DataType.FLOAT_VECTOR, dim=vectors.shape[1])
    index = client.prepare_index_params("vector", index_type="FLAT", metric_type="COSINE")
    client.create_collection(
        "functions", schema=schema, index_params=index, consistency_level="Strong"
    )
    with open(folder / "corpus.jsonl") as corpus:
        ids = [json.loads(line)["_id"] for line in corpus]
    rows = zip(ids, vectors, strict=True)
    client.insert("functions", [{"id": key, "vector": vector} for key, vector in rows])
    return client


def figure(run, qrels):
    """Return nDCG@10 of a run, a file or a dictionary, as ir-measures has it."""
    ranking = run if isinstance(run, dict) else ir_measures.read_trec_run(str(run))
    relevant = ir_measures.read_trec_qrels(str(qrels))
    return ir_measures.calc_aggregate([MEASURE], relevant, ranking)[MEASURE]


def run(uri, folder):
    data = build(collect())
    write_folder(folder, data)
    client = load_corpus(uri, folder, data.gallery)
    judgements = Judgements.load(folder)
    rights = sum(map(len, judgements.keys))
    print(f"{len(judgements):,} queries with {rights:,} right rows, {len(data.gallery):,} rows")

    # Which method, if any? The verdict is stored, and migrate follows it.
    tuning = tune(client, "functions", data.bank, judgements=judgements, measure="nDCG@10")
    print(f"verdict: {tuning.verdict}")

    # What would it do? Evaluators read the runs, and have the same figures.
    files = RunFiles(folder / "raw.trec", folder / "corrected.trec", folder / "used.qrels")
    diagnosis = diagnose(
        client,
        "functions",
        recipe=data.bank,
        judgements=judgements,
        measure="nDCG@10",
        detail=Detail(runs=files),
    )
    print(f"diagnosis     {diagnosis.value_before:.4f} raw, {diagnosis.value_after:.4f} corrected")
    raw, corrected = (figure(path, files.qrels) for path in (files.raw, files.corrected))
    print(f"ir-measures   {raw:.4f} raw, {corrected:.4f} corrected")

    # Do it, and measure what users of the application get.
    plan = plan_correction(client, "functions", data.bank, Copy(alias="live"))
    migrate(client, plan, no_writers=True)
    results = HubnessClient(uri).search("live", data=list(judgements.queries.vectors), limit=10)
    print(f"after migrate {figure(to_run(results, judgements.names), files.qrels):.4f}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        run(
            sys.argv[1] if len(sys.argv) > 1 else f"{temporary}/beir.db",
            Path(temporary, "functions"),
        )
