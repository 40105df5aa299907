"""The database is not asked for the collections that the service's tests name."""

import pytest

from milvus_hubness.serve import service


@pytest.fixture
def any_collection(monkeypatch):
    """As if the database had whatever the configuration names."""
    monkeypatch.setattr(service, "database_faults", lambda file, store, **options: [])
