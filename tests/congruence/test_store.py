"""The store against the databases themselves."""

import numpy as np

from tests.galleries import vectors


def test_keys_are_all_that_were_written_whatever_the_consistency_level(backend):
    """pymilvus's default is Bounded, under which a read may lag behind the writes before it."""
    client, store, name = backend.client(), backend.store(), backend.name("bounded")
    client.create_collection(name, dimension=8, consistency_level="Bounded")
    rows = vectors(np.random.default_rng(0), 300, 8)
    for start in range(0, len(rows), 30):
        part = rows[start : start + 30]
        client.insert(name, [{"id": start + i, "vector": row} for i, row in enumerate(part)])
        assert store.keys(name) == list(range(start + 30))
        assert store.count(name) == start + 30
        assert len(store.fetch(name, store.keys(name), "vector")) == start + 30
