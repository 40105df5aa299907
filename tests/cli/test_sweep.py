"""`sweep` removes what a correction has left on Milvus, once it is told so, and nothing else."""

import json

import numpy as np

from milvus_hubness import MilvusStore, connect
from tests.support.samples import put_queries

FAST = ("--no-writers", "--json")


def removed(done, name="removed"):
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["sweep"][name]


def test_what_a_rollback_leaves_is_listed_and_then_removed(run, files):
    client = connect("shop.db")
    client.create_alias("products", "live")
    made = ("migrate", "run", "products", "--bank", "bank.npy", "--param", "k=4", "--alias", "live")
    assert run(*made, "--force", *FAST).returncode == 0
    assert run("bank", "sample", "live").returncode == 0
    put_queries(MilvusStore(client), "products_hubness", np.load("bank.npy")[:9])
    assert run("migrate", "rollback", "live", *FAST).returncode == 0

    left = removed(run("sweep", "products", "--json"), "would_remove")
    assert (left["copies"], left["banks"]) == (["products_hubness"], ["products__bank"])
    samples = "products_hubness__query_samples_vector"
    assert left["samples"] == {samples: 9}
    assert client.has_collection("products_hubness"), "without --yes it only shows"
    shown = run("sweep", "products").stdout
    assert "Nothing was removed" in shown
    assert f"{samples}, 9 queries" in shown
    assert "bank export COPY FILE" in shown

    removed(run("sweep", "products", "--yes", "--json"))
    assert not client.has_collection("products_hubness")
    assert not client.has_collection("products__bank")
    assert not client.has_collection(samples)
    assert client.query("live", "", ["count(*)"]) == [{"count(*)": 60}]
    assert removed(run("sweep", "products", "--json"))["copies"] == []
    assert "products has no leftovers" in run("sweep", "products").stdout


def test_a_collection_that_serves_stays(run, files):
    client = connect("shop.db")
    client.create_alias("products", "live")
    made = ("migrate", "run", "products", "--bank", "bank.npy", "--param", "k=4", "--alias", "live")
    assert run(*made, "--force", *FAST).returncode == 0
    kept = removed(run("sweep", "live", "--yes", "--json"))
    assert (kept["copies"], kept["banks"]) == ([], [])
    assert client.has_collection("products_hubness")
    assert client.has_collection("products__bank")
