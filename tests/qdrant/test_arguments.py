"""Arguments as qdrant-client takes them: by position, as iterators, as batches; and settings."""

import re
from inspect import Parameter, signature
from unittest.mock import MagicMock

import numpy as np
import pytest
from qdrant_client import QdrantClient, models

from milvus_hubness import InvalidInput, InvalidParameter
from qdrant_hubness import AsyncHubnessQdrantClient, HubnessQdrantClient
from qdrant_hubness.client.methods import Methods
from tests.qdrant.worlds import Backend, Corrected

OVERRIDDEN = {
    name: method
    for name, method in vars(Methods).items()
    if not name.startswith("_") and hasattr(QdrantClient, name)
}
PASSED_ON = {
    name
    for name, method in OVERRIDDEN.items()
    if any(each.kind is Parameter.VAR_POSITIONAL for each in signature(method).parameters.values())
}


def positions_of(name):
    """The names of the arguments that a method of QdrantClient takes by position."""
    parameters = list(signature(getattr(QdrantClient, name)).parameters.values())[1:]
    return [each.name for each in parameters if each.kind is Parameter.POSITIONAL_OR_KEYWORD]


@pytest.fixture(scope="module")
def corrected():
    return Corrected(Backend("local", QdrantClient(":memory:")), "Dot")


@pytest.mark.parametrize("name", sorted(OVERRIDDEN.keys() - PASSED_ON))
def test_every_argument_may_be_given_by_position_or_by_name(name):
    """As positions they were refused from `ordering` and `consistency` on."""
    fitting = {"payload": {}, "wait": True}
    values = {each: fitting.get(each, [f"value of {each}"]) for each in positions_of(name)}
    client = HubnessQdrantClient(":memory:")
    client._run = lambda operation: operation

    recorded = []
    for positions, names in ((values.values(), {}), ((), values)):
        client._operations = MagicMock()
        getattr(client, name)(*positions, **names)
        calls = str(client._operations.mock_calls)
        recorded.append(re.sub(" at 0x[0-9a-f]+", "", calls))
    assert recorded[0] == recorded[1]

    last = list(values)[-1]
    for positions, names in (((*values.values(), 1), {}), (values.values(), {last: None})):
        with pytest.raises(TypeError, match=name):
            getattr(client, name)(*positions, **names)


def test_an_iterator_of_requests_is_a_batch(corrected):
    requests = [models.QueryRequest(query=each.tolist(), limit=3) for each in corrected.bank[:2]]
    batch = corrected.client.query_batch_points
    assert batch(corrected.name, iter(requests)) == batch(corrected.name, requests)
    assert batch(corrected.source, iter(requests)) == batch(corrected.source, requests)


def test_a_batch_of_columns_reaches_the_copy_of_a_collection_without_a_correction(corrected):
    """Its points were taken for rows, so that no such write was possible during a migration."""
    vectors = corrected.items[:2].tolist()
    batch = models.Batch(ids=[1_001, 1_003], vectors=vectors, payloads=[{"n": 1}, {"n": 2}])
    corrected.client.upsert(corrected.source, batch)
    points = models.PointsBatch(batch=models.Batch(ids=[1_005], vectors=vectors[:1]))
    corrected.client.batch_update_points(corrected.source, [models.UpsertOperation(upsert=points)])

    keys = [1_001, 1_003, 1_005]
    there, on_copy = (
        corrected.client.retrieve(name, keys, with_vectors=True)
        for name in (corrected.source, corrected.name)
    )
    assert [point.id for point in there] == keys
    for one, other in zip(there, on_copy, strict=True):
        assert one.payload == other.payload
        np.testing.assert_allclose(one.vector, other.vector, atol=1e-6)
    corrected.client.delete(corrected.source, keys)


def test_a_batch_of_operations_on_an_ordinary_collection_is_one_request():
    backend = Backend("local", QdrantClient(":memory:"))
    name = backend.fill(np.eye(4, dtype=np.float32))
    client = backend.hubness()
    sent = []
    answer = client._answer
    client._answer = lambda step: (sent.append(getattr(step, "method", "")), answer(step))[1]
    payload = models.SetPayload(payload={"a": 1}, points=[1])
    operations = [models.SetPayloadOperation(set_payload=payload)] * 3
    assert len(client.batch_update_points(name, operations)) == 3
    assert [method for method in sent if method != "get_collection"] == ["batch_update_points"]


@pytest.mark.parametrize(
    "options",
    [
        {"strength": "1"},
        {"kinds": -1},
        {"strength": 10**400},
        {"state_ttl": None},
        {"state_ttl": float("nan")},
        {"bank_budget": "1 GiB"},
        {"bank_budget": -1},
        {"strenght": 0},
        {"state_tll": 1},
    ],
)
@pytest.mark.parametrize("kind", [HubnessQdrantClient, AsyncHubnessQdrantClient])
def test_a_client_of_options_that_cannot_be_meant_is_refused(kind, options, tmp_path):
    """At once, and with nothing opened: a folder of the local mode has one client at a time."""
    with pytest.raises(InvalidParameter):
        kind(path=str(tmp_path), **options)
    QdrantClient(path=str(tmp_path)).close()


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"profile": ["default"]}, InvalidInput),
        ({"profile": {}}, InvalidInput),
        ({"strength": 10**400}, InvalidParameter),
        ({"kinds": -(10**400)}, InvalidParameter),
    ],
)
def test_settings_of_no_use_are_refused_by_name(corrected, settings, error):
    with pytest.raises(error, match=next(iter(settings))):
        corrected.client.query_points(corrected.name, corrected.query.tolist(), **settings)
