"""qdrant-hubness asks for a verdict as milvus-hubness does."""

import json

import numpy as np
import pytest
from qdrant_client import QdrantClient, models
from typer.testing import CliRunner

from qdrant_hubness import cli
from tests.support.galleries import hubby_gallery

ITEMS, QUERIES, _ = hubby_gallery()


@pytest.fixture
def run(quick_folder, monkeypatch):
    monkeypatch.delenv("MILVUS_HUBNESS_VERDICT")
    monkeypatch.chdir(quick_folder)
    client = QdrantClient(path="data")
    config = models.VectorParams(size=ITEMS.shape[1], distance="Dot")
    client.create_collection("items", vectors_config=config)
    client.upload_collection("items", ITEMS, ids=range(len(ITEMS)))
    client.close()
    np.save("fitting.npy", QUERIES[:400])
    np.save("photos.npy", ITEMS[:300])
    np.save("real.npy", QUERIES[400:500])

    opened = []
    connect = cli.connect
    monkeypatch.setattr(cli, "connect", lambda *args: opened.append(connect(*args)) or opened[-1])

    def call(*words):
        done = CliRunner().invoke(cli.app, [*words, "--uri", "data", "--json"])
        # The folder of the local mode has one reader at a time.
        for each in opened:
            each.close()
        opened.clear()
        return done

    return call


@pytest.mark.parametrize("command", ["migrate", "enable"])
def test_a_bank_of_items_stops_the_command(run, command):
    done = run(command, "items", "--bank", "photos.npy", "--queries", "real.npy")
    assert type(done.exception).__name__ == "CorrectionNotRecommended"
    client = QdrantClient(path="data")
    assert [each.name for each in client.get_collections().collections] == ["items"]
    client.close()


def test_a_plan_shows_it(run):
    done = run("migrate", "items", "--bank", "fitting.npy", "--queries", "real.npy", "--plan")
    verdict = json.loads(done.stdout)["plan"]["verdict"]
    assert (verdict["verdict"], verdict["real_queries"]) == ("apply", 100)
