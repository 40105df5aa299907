"""`match` writes what the client matches, continues where it stopped, and says where it may hurt."""

import json

import numpy as np
import pyarrow.parquet as pq
import pytest

from milvus_hubness import HubnessClient
from tests.cli.conftest import assert_fails

OPTIONS = ("--queries", "bank.npy", "--limit", "3")


@pytest.mark.parametrize("out", ["matches.parquet", "matches.npz"])
def test_a_file_has_the_matches_of_the_client(files, run, out):
    done = run("match", "products", *OPTIONS, "--out", out, "--json")
    assert done.returncode == 0, done.stderr
    columns = pq.read_table(out).to_pydict() if out.endswith("parquet") else dict(np.load(out))
    matches = HubnessClient("shop.db").match("products", np.load("bank.npy"), limit=3)
    names = ("id", "score", "matched_score", "raw_rank", "rank")
    expected = [(query, *(hit[name] for name in names)) for query, hits in enumerate(matches) for hit in hits]
    rows = list(zip(*(columns[name] for name in ("query", *names)), strict=True))
    assert len(rows) == 3 * 40
    np.testing.assert_allclose(np.array(rows), np.array(expected), rtol=0, atol=1e-6)
    report = json.loads(done.stdout)["match"]
    assert (report["queries"], report["items"], report["matches"], report["unmatched"]) == (40, 60, 120, [])
    assert report["changed"] == np.mean([hits[0]["raw_rank"] > 1 for hits in matches]) > 0
    assert not list(files.glob("*.parts"))


def test_it_prints_what_changed_and_warns(files, run):
    np.save("few.npy", np.load("bank.npy")[:3])
    done = run("match", "products", "--queries", "few.npy", "--out", "few.npz", "--one-to-one", "--filter", "id < 50")
    assert done.returncode == 0, done.stderr
    assert "3 against 50 rows" in done.stdout
    assert "3 matches to few.npz" in done.stdout
    assert "milvus-hubness: warning: there are 3 queries for 50 items" in done.stderr


def test_bad_options_are_one_line(files, run):
    matching = ("match", "products", "--queries", "bank.npy")
    done = run(*matching, "--out", "matches.csv")
    assert done.returncode == 2
    assert ".parquet or .npz" in done.stderr
    assert_fails(run(*matching, "--out", "matches.npz", "--with-bank"), 1, "no bank")
    (files / "matches.npz.parts").mkdir(exist_ok=True)
    (files / "matches.npz.parts" / "inputs.json").write_text("{}")
    assert_fails(run(*matching, "--out", "matches.npz"), 1, "matches.npz.parts", "another match")
