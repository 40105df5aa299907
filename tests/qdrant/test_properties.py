"""Properties in metadata, which no alias fences: the write of a former holder is read by nobody."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from qdrant_client import models

from milvus_hubness import LeaseLost
from milvus_hubness.jobs.common.lease import Lease
from milvus_hubness.jobs.store.records import Identity
from qdrant_hubness.store.properties import KEYS, PREFIX, Properties, of_metadata

NAMES = st.sampled_from(["hubness", "hubness_tuning", "hubness.image@3", "hubness@8"])
TEXTS = st.sampled_from(["", "{}", '{"a": "3.1 {}"}', "a\nb"])


class Held:
    """A client of one collection whose changes of metadata arrive when they are let go."""

    _client = None

    def __init__(self):
        self.metadata = {"owner": "me", "hubness": "{}"}
        self.waiting = []

    def info(self):
        return SimpleNamespace(version="1.18.3")

    def get_collection(self, _name):
        return SimpleNamespace(config=SimpleNamespace(metadata=dict(self.metadata)))

    def update_collection(self, _name, metadata):
        self.waiting.append(metadata)

    def let_go(self, number=0):
        self.metadata |= self.waiting.pop(number)

    @property
    def read(self):
        return of_metadata(self.get_collection(""))


@pytest.fixture
def held():
    return Held()


def test_a_write_that_arrives_after_those_of_the_next_holder_is_not_read(held):
    properties = Properties(held)
    properties.alter("c", {"hubness": "first"}, 2)
    held.let_go()
    properties.alter("c", {"hubness": "late"}, 2)
    for text in ("second", "third"):
        properties.alter("c", {"hubness": text}, 3)
        held.let_go(1)
    assert held.read == {"hubness": "third"}
    held.let_go()
    assert held.read == {"hubness": "third"}, "it arrived now"

    properties.alter("c", {"hubness": "fourth"}, 4)
    held.let_go()
    assert held.read == {"hubness": "fourth"}
    assert [text for text in held.metadata.values() if "late" in text] == [], "it was emptied"


def test_a_removal_stays_one_too(held):
    properties = Properties(held)
    properties.alter("c", {"hubness_dual_write": "to a copy"}, 5)
    properties.alter("c", {"hubness_dual_write": "to a copy"}, 6)
    held.let_go(1)
    properties.alter("c", {"hubness_dual_write": ""}, 6)
    held.let_go(1)
    held.let_go()
    assert held.read == {"hubness": "{}"}


def test_writes_without_a_lease_and_with_a_ledger_that_begins_again_are_read(held):
    properties = Properties(held)
    for token, text in [(0, "made"), (40, "by a job"), (0, "by hand"), (1, "after a new ledger")]:
        properties.alter("c", {"hubness": text}, token)
        held.let_go()
        assert held.read == {"hubness": text}
    assert held.metadata["owner"] == "me"


@given(st.lists(st.tuples(NAMES, TEXTS, st.integers(0, 2)), max_size=40), st.integers(0, 3 * KEYS))
def test_properties_are_those_that_were_written_last(writes, token):
    held, wanted = Held(), {"hubness": "{}"}
    properties = Properties(held)
    for name, text, later in writes:
        token += later
        properties.alter("c", {name: text}, token)
        held.let_go()
        wanted[name] = text
        assert held.read == {key: value for key, value in wanted.items() if value}
    assert len([key for key in held.metadata if key.startswith(PREFIX)]) <= 4 * (KEYS + 1)


def test_who_has_lost_the_lease_writes_no_property(backend):
    name = backend.name()
    params = models.VectorParams(size=4, distance="Dot")
    backend.client.create_collection(name, vectors_config=params)
    store = backend.store()
    lease = Lease(store, name)
    with lease:
        lease.store.write_property(name, "hubness_identity", Identity(id="a" * 32))
        assert store.properties_of(name)["hubness_identity"]
        store.unfence(lease.alias_of(name))
        with pytest.raises(LeaseLost, match="another job has taken over"):
            lease.store.write_property(name, "hubness_identity", None)
    assert store.properties_of(name)["hubness_identity"]
