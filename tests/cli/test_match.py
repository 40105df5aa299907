"""`match` writes what the client matches, continues where it stopped, and says where it may hurt."""

import json
import time

import numpy as np
import pyarrow.parquet as pq
import pytest

from milvus_hubness import HubnessClient
from tests.cli.conftest import assert_fails
from tests.support.galleries import vectors

OPTIONS = ("--queries", "bank.npy", "--limit", "3")


@pytest.mark.parametrize("out", ["matches.parquet", "matches.npz"])
def test_a_file_has_the_matches_of_the_client(files, run, out):
    done = run("match", "products", *OPTIONS, "--out", out, "--json")
    assert done.returncode == 0, done.stderr
    columns = pq.read_table(out).to_pydict() if out.endswith("parquet") else dict(np.load(out))
    matches = HubnessClient("shop.db").match("products", np.load("bank.npy"), limit=3)
    names = ("id", "score", "matched_score", "raw_rank", "rank")
    expected = [
        (query, *(hit[name] for name in names))
        for query, hits in enumerate(matches)
        for hit in hits
    ]
    rows = list(zip(*(columns[name] for name in ("query", *names)), strict=True))
    assert len(rows) == 3 * 40
    np.testing.assert_allclose(np.array(rows), np.array(expected), rtol=0, atol=1e-6)
    report = json.loads(done.stdout)["match"]
    assert (report["queries"], report["items"], report["matches"], report["unmatched"]) == (
        40,
        60,
        120,
        [],
    )
    assert not list(files.glob("*.parts"))


def test_the_matches_never_take_the_place_of_the_queries(files, run):
    """They are the log of an application, and may be the only copy."""
    before = (files / "bank.npz").read_bytes()
    done = run("match", "products", "--queries", "bank.npz", "--out", "./bank.npz")
    assert_fails(done, 2, "--queries and --out would be the same file")
    assert (files / "bank.npz").read_bytes() == before


def test_it_prints_the_numbers_and_warns(files, run):
    np.save("few.npy", np.load("bank.npy")[:3])
    done = run(
        "match",
        "products",
        "--queries",
        "few.npy",
        "--out",
        "few.npz",
        "--one-to-one",
        "--filter",
        "id < 50",
    )
    assert done.returncode == 0, done.stderr
    assert "3 against 50 rows" in done.stdout
    assert "3 matches to few.npz" in done.stdout
    assert "milvus-hubness: warning: there are 3 queries for 50 items" in done.stderr


@pytest.mark.long
def test_a_killed_run_continues_to_the_same_file(files, started, run):
    """The first run is killed between two parts; the second one keeps what the first has searched."""
    queries = vectors(np.random.default_rng(6), 1_500, 8)
    np.save("many.npy", queries)
    command = ("match", "many", "--queries", "many.npy", "--limit", "2", "--out")
    process = started(*command, "killed.npz")
    parts = files / "killed.npz.parts"
    while not (parts / "00000000.npz").exists():
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.005)
    process.kill()
    process.wait()
    kept = list(parts.glob("[0-9]*.npz"))
    assert len(kept) < 3, "it was killed too late"
    assert not (files / "killed.npz").exists()
    seen = {}

    def stop(step, done, total):
        seen.setdefault(step, done)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        HubnessClient("shop.db").match("many", queries, 2, folder=parts, progress=stop)
    assert seen == {"searching the queries": 500 * len(kept)}
    for out in ("killed.npz", "whole.npz"):
        assert run(*command, out).returncode == 0
    assert (files / "killed.npz").read_bytes() == (files / "whole.npz").read_bytes()
    assert not list(files.glob("*.parts"))


def test_bad_options_are_one_line(files, run):
    matching = ("match", "products", "--queries", "bank.npy")
    done = run(*matching, "--out", "matches.csv")
    assert done.returncode == 2
    assert ".parquet or .npz" in done.stderr
    assert_fails(run(*matching, "--out", "matches.npz", "--with-bank"), 1, "no bank")
    assert_fails(run(*matching, "--out", "matches.npz", "--filter", "bogus >"), 1, "bogus")
    assert not (files / "matches.npz.parts").exists(), "nothing was searched"
    (files / "matches.npz.parts").mkdir()
    (files / "matches.npz.parts" / "inputs.json").write_text("{}")
    assert_fails(run(*matching, "--out", "matches.npz"), 1, "matches.npz.parts", "another match")
