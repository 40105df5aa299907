"""`to_run` takes the results of every client, of every metric, with keys of any type and name."""

import asyncio

import ir_measures
import numpy as np
import pytest
from milvus_lite.server_manager import server_manager_instance
from pymilvus import DataType, MilvusClient

from milvus_hubness import (
    NNN,
    AsyncHubnessClient,
    CorrectionConfig,
    HubnessClient,
    Recipe,
    errors,
    to_run,
    write_run,
)

DIM = 8
QUERIES = np.random.default_rng(3).normal(size=(30, DIM))


@pytest.fixture
def uri(tmp_path):
    uri = str(tmp_path / "runs.db")
    yield uri
    server_manager_instance.release_server(uri)


def filled(uri, metric, key_type):
    """A corrected collection and a plain one, whose key has a name of its own, and another field the name id."""
    client = HubnessClient(uri)
    schema = client.create_schema(auto_id=False)
    schema.add_field("sku", key_type, is_primary=True, max_length=32)
    schema.add_field("id", DataType.INT64)
    schema.add_field("vector", DataType.FLOAT_VECTOR, dim=DIM)
    index = client.prepare_index_params()
    index.add_index("vector", index_type="FLAT", metric_type=metric)
    settings = {"schema": schema, "index_params": index, "consistency_level": "Strong"}
    bank = np.random.default_rng(4).normal(size=(40, DIM))
    client.create_collection("plain", **settings)
    client.create_collection(
        "products", **settings, hubness=CorrectionConfig(Recipe(bank, estimator=NNN(k=4)))
    )
    keys = [n if key_type == DataType.INT64 else f"p{n}" for n in range(60)]
    rows = np.random.default_rng(5).normal(size=(60, DIM)).tolist()
    data = [{"sku": key, "id": 7, "vector": row} for key, row in zip(keys, rows, strict=True)]
    for name in ("plain", "products"):
        client.insert(name, data)
    return client


@pytest.mark.parametrize("metric", ["L2", "COSINE", "IP"])
@pytest.mark.parametrize("key_type", [DataType.INT64, DataType.VARCHAR])
def test_the_results_of_every_client_are_a_run_in_their_order(uri, tmp_path, metric, key_type):
    client = filled(uri, metric, key_type)
    ids = [f"q{number}" for number in range(len(QUERIES))]
    asked = {"data": QUERIES.tolist(), "limit": 12, "output_fields": ["id"]}

    async def search_later():
        later = AsyncHubnessClient(uri)
        try:
            return await later.search("products", **asked)
        finally:
            await later.close()

    for results in (
        client.search("products", **asked),
        asyncio.run(search_later()),
        MilvusClient(uri).search("plain", **asked),
    ):
        run = to_run(results, ids)
        assert list(run) == ids
        for of_query, hits in zip(run.values(), results, strict=True):
            assert list(of_query) == list(map(str, hits.ids))
            assert list(of_query.values()) == list(range(12, 0, -1))
    firsts = {query: {next(iter(scores)): 1} for query, scores in run.items()}
    measure = ir_measures.parse_measure("Success@1")
    assert ir_measures.calc_aggregate([measure], firsts, run)[measure] == 1

    path = tmp_path / "run.trec"
    write_run(path, run, tag="mine")
    assert path.read_text().splitlines()[1].split()[:4] == ["q0", "Q0", list(run["q0"])[1], "2"]
    ranking = list(ir_measures.read_trec_run(str(path)))
    assert ir_measures.calc_aggregate([measure], firsts, ranking)[measure] == 1
    assert len(ranking) == 30 * 12


def test_queries_have_numbers_without_ids_and_a_key_that_is_a_hit_twice_counts_once():
    hits = [{"id": 3, "distance": 0.1}, {"id": 5, "distance": 0.2}, {"id": 3, "distance": 0.3}]
    assert to_run([hits, []]) == {"0": {"3": 2.0, "5": 1.0}, "1": {}}


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(errors.InvalidInput, match="2 lists of hits have 1 query ids"):
        to_run([[], []], ["a"])
    with pytest.raises(errors.InvalidInput, match="the query id a is there twice"):
        to_run([[], []], ["a", "a"])
    with pytest.raises(errors.InvalidInput, match="has no key as 'id'"):
        to_run([[{"sku": 3, "distance": 0.1}]])
    path = tmp_path / "run.trec"
    for run, what in (
        ({"a b": {"1": 1.0}}, "query id a b"),
        ({"a": {"1\u00a02": 1.0}}, "key 1"),
        ({"a": {"": 1.0}}, "key "),
        ({"a": {"\ud800": 1.0}}, "key "),
    ):
        with pytest.raises(errors.InvalidInput, match=f"the {what}.* cannot be in .*json file"):
            write_run(path, run)
        assert not path.exists()
        write_run(tmp_path / "run.json", run)
