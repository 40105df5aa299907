"""Commands on Qdrant ask for a verdict as on Milvus."""

import json

import numpy as np
import pytest
from qdrant_client import QdrantClient, models

from tests.support.galleries import hubby_gallery

ITEMS, QUERIES, _ = hubby_gallery()


@pytest.fixture
def run(quick_folder, monkeypatch, command):
    monkeypatch.delenv("MILVUS_HUBNESS_VERDICT")
    monkeypatch.chdir(quick_folder)
    client = QdrantClient(path="data")
    config = models.VectorParams(size=ITEMS.shape[1], distance="Dot")
    client.create_collection("items", vectors_config=config)
    client.upload_collection("items", ITEMS, ids=range(len(ITEMS)))
    client.close()
    np.save("fitting.npy", QUERIES[:400])
    np.save("foreign.npy", np.ascontiguousarray(QUERIES[:400, ::-1]))
    np.save("real.npy", QUERIES[400:500])

    return lambda *words: command(*words, "--uri", "qdrant+file://data", "--json")


@pytest.mark.parametrize("words", ["migrate run", "enable"])
def test_a_foreign_bank_stops_the_command(run, words):
    done = run(*words.split(), "items", "--bank", "foreign.npy", "--queries", "real.npy")
    assert type(done.exception).__name__ == "CorrectionNotRecommended"
    client = QdrantClient(path="data")
    assert [each.name for each in client.get_collections().collections] == ["items"]
    client.close()


def test_a_plan_shows_it(run):
    done = run(
        "migrate", "run", "--plan", "items", "--bank", "fitting.npy", "--queries", "real.npy"
    )
    verdict = json.loads(done.stdout)["plan"]["verdict"]
    assert (verdict["verdict"], verdict["real_queries"]) == ("apply", 100)
