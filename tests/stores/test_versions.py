"""What servers of which version can do: older ones ignore what they do not know."""

import pytest

from milvus_hubness.stores.milvus_server import supports


@pytest.mark.parametrize(
    ("version", "adds", "chains"),
    [
        ("v2.3.5-lite", False, False),
        ("2.5.14", False, False),
        ("v2.6.2", True, False),
        ("3.0.0-rc1", True, True),
        ("v10.1", True, True),
        ("milvus_lite-3.1.4", False, False),
        ("milvus_lite-3.2.2", False, True),
    ],
)
def test_versions(version, adds, chains):
    assert supports(version, "new fields") == adds
    assert supports(version, "function chains") == chains


@pytest.mark.parametrize(
    ("version", "adds", "drops", "updates"),
    [
        ("v2.3.5-lite", False, False, False),
        ("2.5.14", False, False, False),
        ("v2.6.2", False, False, True),
        ("v2.6.17", False, False, True),
        ("v2.6.18", True, False, True),
        ("2.7.0", True, False, True),
        ("3.0.0-rc1", True, True, True),
        ("milvus_lite-3.1.4", False, False, False),
        ("milvus_lite-3.2.2", False, False, True),
    ],
)
def test_versions_for_a_second_vector_field(version, adds, drops, updates):
    assert supports(version, "new vector fields") == adds
    assert supports(version, "dropped fields") == drops
    assert supports(version, "partial updates") == updates
