"""Arguments as qdrant-client takes them: by position, as iterators, as batches; and settings."""

import pytest
from qdrant_client import QdrantClient

from milvus_hubness import InvalidInput, InvalidParameter
from qdrant_hubness import AsyncHubnessQdrantClient, HubnessQdrantClient
from tests.qdrant.worlds import Backend, Corrected


@pytest.fixture(scope="module")
def corrected():
    return Corrected(Backend("local", QdrantClient(":memory:")), "Dot")


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
