"""The strict server does what a real one was measured to do."""

import grpc
import numpy as np
import pytest
from qdrant_client import AsyncQdrantClient, QdrantClient, models
from qdrant_client.common.client_exceptions import ResourceExhaustedResponse
from qdrant_client.http.exceptions import UnexpectedResponse

from tests.qdrant.strict import StrictServer, listening

COUNT = 100
MISSING = 555


def filled(client, name="c", dim=4, count=COUNT, **params):
    config = models.VectorParams(
        size=dim, distance=params.pop("distance", "Dot"), **params.pop("vector", {})
    )
    client.create_collection(name, vectors_config=config, **params)
    rows = np.random.default_rng(0).normal(size=(count, dim)).astype(np.float32)
    points = [
        models.PointStruct(id=i, vector=row.tolist(), payload={"n": i})
        for i, row in enumerate(rows)
    ]
    client.upsert(name, points)
    return rows


def with_key(client, key, name="c"):
    lacking = models.IsEmptyCondition(is_empty=models.PayloadField(key=key))
    return client.count(name, models.Filter(must_not=[lacking])).count


@pytest.fixture
def server():
    return StrictServer()


PAYLOAD_REQUESTS = {
    "set": lambda client, ids: client.set_payload("c", {"k": 1}, ids),
    "overwrite": lambda client, ids: client.overwrite_payload("c", {"k": 1}, ids),
    "batch": lambda client, ids: client.batch_update_points(
        "c",
        [models.SetPayloadOperation(set_payload=models.SetPayload(payload={"k": 1}, points=ids))],
    ),
}


@pytest.mark.parametrize("request_of", PAYLOAD_REQUESTS.values(), ids=PAYLOAD_REQUESTS)
@pytest.mark.parametrize("place", [0, 31, 32, 70, 99])
def test_payloads_are_changed_in_parts_up_to_that_with_the_missing_point(server, request_of, place):
    client = server.client()
    filled(client)
    ids = [*range(place), MISSING, *range(place, COUNT)]
    with pytest.raises(
        UnexpectedResponse, match=f"Not found: No point with id {MISSING} found"
    ) as raised:
        request_of(client, ids)
    assert raised.value.status_code == 404
    assert with_key(client, "k") == place // 32 * 32


def test_vectors_are_changed_in_parts_in_an_order_of_their_own(server):
    client = server.client()
    filled(client)
    left = set()
    for run in range(12):
        points = [
            models.PointVectors(id=i, vector=[run, 0.5, 0.5, 0.5])
            for i in [*range(50), MISSING, *range(50, 99)]
        ]
        with pytest.raises(UnexpectedResponse, match="No point with id"):
            client.update_vectors("c", points)
        changed = [
            r.id
            for r in client.scroll("c", limit=COUNT, with_vectors=True)[0]
            if r.vector[0] == run
        ]
        left.add(99 - len(changed))
    assert left <= {3, 35, 67, 99}
    assert len(left) > 1, "another order in each run"


def test_one_shard_stops_and_the_others_go_on():
    client = StrictServer().client()
    filled(client, shard_number=3)
    match = f"1 out of 3 shards failed .*First error captured: No point with id {MISSING} found"
    with pytest.raises(UnexpectedResponse, match=match):
        client.delete_payload("c", ["n"], [MISSING, *range(COUNT)])
    left = with_key(client, "n")
    assert 20 < left < 50, "those of one shard"


def test_a_batch_stops_at_the_operation_that_fails(server):
    client = server.client()
    filled(client)
    operations = [
        models.SetPayloadOperation(set_payload=models.SetPayload(payload={"k": 1}, points=[id]))
        for id in (1, MISSING, 2)
    ]
    with pytest.raises(UnexpectedResponse):
        client.batch_update_points("c", operations)
    assert with_key(client, "k") == 1


async def test_errors_of_grpc_have_the_same_texts(server):
    filled(server.client())
    text = f"Not found: No point with id {MISSING} found"
    with pytest.raises(grpc.RpcError) as raised:
        server.client(over="grpc").set_payload("c", {"k": 1}, [MISSING])
    assert (raised.value.code(), raised.value.details()) == (grpc.StatusCode.NOT_FOUND, text)
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await server.client(AsyncQdrantClient, over="grpc").set_payload("c", {"k": 1}, [MISSING])
    assert (raised.value.code(), raised.value.details()) == (grpc.StatusCode.NOT_FOUND, text)
    with pytest.raises(grpc.RpcError, match="Collection `nowhere` doesn't exist!"):
        server.client(over="grpc").get_collection("nowhere")


@pytest.mark.parametrize("over", ["rest", "grpc"])
def test_vectors_of_nearly_unit_length_stay_and_others_are_divided(server, over):
    client = server.client(over=over)
    filled(client, distance="Cosine", dim=64, count=1)
    rows = np.random.default_rng(1).normal(size=(3, 64))
    unit = rows[0] / np.linalg.norm(rows[0])
    near = np.float32(unit * (1 + 4e-7))
    far = np.float32(unit * (1 + 4e-6))
    for id, vector in ((1, near), (2, far)):
        client.upsert("c", [models.PointStruct(id=id, vector=vector.tolist())])
    client.query_points("c", rows[1].tolist(), limit=3)
    kept, divided = (np.array(r.vector) for r in client.retrieve("c", [1, 2], with_vectors=True))
    assert np.array_equal(kept.astype(np.float32), near)
    assert np.array_equal(kept, near.astype(np.float64)) is (over == "grpc"), "REST prints decimals"
    assert not np.array_equal(divided.astype(np.float32), far)
    assert np.linalg.norm(divided) == pytest.approx(1, abs=3e-7)


@pytest.mark.parametrize(("datatype", "kept"), [("float16", 0.0999755859), ("uint8", 3.0)])
def test_storage_rounds(server, datatype, kept):
    client = server.client()
    sent = 0.1 if datatype == "float16" else 3.7
    filled(client, vector={"datatype": datatype}, count=1)
    client.update_vectors("c", [models.PointVectors(id=0, vector=[sent] * 4)])
    [record] = client.retrieve("c", [0], with_vectors=True)
    assert record.vector == pytest.approx([kept] * 4, rel=1e-7)


def test_a_request_has_its_true_size(server):
    client = server.client()
    filled(client)
    size = server.requests[-1][2]
    assert server.requests[-1][:2] == ("PUT", "/collections/c/points")
    server.request_bytes = size - 1
    text = rf"Payload error: JSON payload \({size} bytes\) is larger than allowed \(limit: {size - 1} bytes\)"
    with pytest.raises(UnexpectedResponse, match=text) as raised:
        filled(client, "d")
    assert raised.value.status_code == 400
    filled(server.client(over="grpc"), "e")


def six_points(client):
    client.upsert("c", [models.PointStruct(id=i, vector=[0.5] * 4) for i in range(6)])


def by_n(value):
    return models.Filter(
        must=[models.FieldCondition(key="n", match=models.MatchValue(value=value))]
    )


FORBIDDEN = {
    "max_query_limit": (5, lambda c: c.scroll("c", limit=6), 'Limit exceeded 6 > 5 for "limit"'),
    "upsert_max_batchsize": (5, six_points, 'Limit exceeded 6 > 5 for "upsert limit"'),
    "search_max_batchsize": (
        1,
        lambda c: c.query_batch_points("c", [models.QueryRequest(query=[1.0] * 4)] * 2),
        "Limit exceeded 2 > 1",
    ),
    "search_allow_exact": (
        False,
        lambda c: c.count("c", exact=True),
        "Exact search disabled!. Help: Set exact=false.",
    ),
    "filter_max_conditions": (
        1,
        lambda c: c.scroll("c", models.Filter(must=[models.HasIdCondition(has_id=[1])] * 2)),
        "Filter condition limit reached (2 > 1)",
    ),
    "unindexed_filtering_retrieve": (
        False,
        lambda c: c.scroll("c", by_n("text")),
        'Index required but not found for "n" of one of the following types: [keyword]. Help: Create an index',
    ),
    "unindexed_filtering_update": (
        False,
        lambda c: c.delete("c", by_n(1)),
        'Index required but not found for "n" of one of the following types: [integer]. Help: Create an index',
    ),
}


@pytest.mark.parametrize("setting", FORBIDDEN)
def test_strict_mode_forbids(server, setting):
    value, request, text = FORBIDDEN[setting]
    client = server.client()
    filled(client)
    strict = models.StrictModeConfig(enabled=True, **{setting: value})
    client.update_collection("c", strict_mode_config=strict)
    with pytest.raises(UnexpectedResponse) as raised:
        request(client)
    assert raised.value.status_code == 400
    assert raised.value.structured()["status"]["error"].startswith(f"Bad request: {text}")
    client.update_collection("c", strict_mode_config=models.StrictModeConfig(enabled=False))
    request(client)


def test_an_index_makes_a_filter_and_a_formula_possible(server):
    client = server.client()
    filled(client)
    strict = models.StrictModeConfig(enabled=True, unindexed_filtering_retrieve=False)
    client.update_collection("c", strict_mode_config=strict)
    formula = models.FormulaQuery(
        formula=models.SumExpression(sum=["$score", models.MultExpression(mult=[-1.0, "n"])])
    )
    prefetch = models.Prefetch(query=[1.0] * 4, limit=5)
    with pytest.raises(UnexpectedResponse, match="Index required but not found for"):
        client.query_points("c", formula, prefetch=prefetch)
    client.create_payload_index("c", "n", "integer")
    assert client.get_collection("c").payload_schema["n"].points == COUNT
    assert client.query_points("c", formula, prefetch=prefetch).points
    assert with_key(client, "n") == COUNT
    with pytest.raises(UnexpectedResponse, match="n"):
        client.scroll("c", by_n("text"))


@pytest.mark.parametrize("over", ["rest", "grpc"])
async def test_rates_say_when_to_come_back(over):
    now = [100.0]
    server = StrictServer(clock=lambda: now[0])
    client = server.client(over=over)
    filled(client)
    client.update_collection(
        "c", strict_mode_config=models.StrictModeConfig(enabled=True, write_rate_limit=60)
    )
    client.set_payload("c", {"k": 1}, list(range(50)))
    with pytest.raises(
        ResourceExhaustedResponse, match="Write rate limit exceeded: Operation requires 20 tokens"
    ) as raised:
        await server.client(AsyncQdrantClient, over=over).set_payload(
            "c", {"k": 1}, list(range(20))
        )
    assert raised.value.retry_after_s == 10
    now[0] += 10
    client.set_payload("c", {"k": 1}, list(range(20)))
    with pytest.raises(
        (UnexpectedResponse, grpc.RpcError), match="please try to split your request"
    ):
        client.set_payload("c", {"k": 1}, list(range(61)))


def test_settings_are_kept_and_shown():
    server = StrictServer(yellow_seconds=60.0)
    client = server.client()
    filled(
        client,
        shard_number=2,
        hnsw_config=models.HnswConfigDiff(m=7),
        quantization_config=models.ScalarQuantization(
            scalar=models.ScalarQuantizationConfig(type="int8")
        ),
        metadata={"owner": "me"},
    )
    described = client.get_collection("c")
    assert described.status == models.CollectionStatus.YELLOW
    config = described.config
    assert (config.params.shard_number, config.hnsw_config.m, config.metadata) == (
        2,
        7,
        {"owner": "me"},
    )
    assert config.quantization_config.scalar.type == "int8"
    server.yellow_seconds = 0.0
    assert client.get_collection("c").status == models.CollectionStatus.GREEN


def test_clients_of_other_processes_reach_it_on_a_port(server):
    filled(server.client())
    with listening(server) as url:
        client = QdrantClient(url=url, check_compatibility=False)
        assert client.count("c").count == COUNT
        assert client.info().version == "1.18.1"
        client.close()
