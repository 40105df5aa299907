"""Jobs that end halfway for lack of a right: the same command finishes them, and `status` names what is left."""

import numpy as np
import pytest
from pymilvus import MilvusClient
from pymilvus.exceptions import MilvusException

from milvus_hubness import (
    NNN,
    Beside,
    MilvusStore,
    NotCorrected,
    QueryBank,
    Recipe,
    StoreError,
    clean,
    disable,
    enable,
    migrate,
    plan_correction,
    refresh,
    status,
)
from milvus_hubness.jobs.refresh.sampling import start_sampling, stop_sampling
from tests.support.galleries import plain_collection, vectors
from tests.support.recipes import as_recipe

DIM, ITEMS, BANK = 8, 40, 24
RIGHTS = ["rename_collection", "drop_collection"]


class Denying(MilvusClient):
    """A client whose user lacks a right."""

    denied = ""

    def rename_collection(self, *args, **options):
        self._expect_right("rename_collection")
        return super().rename_collection(*args, **options)

    def drop_collection(self, *args, **options):
        self._expect_right("drop_collection")
        return super().drop_collection(*args, **options)

    def _expect_right(self, right):
        if self.denied == right:
            raise MilvusException(message=f"{right}: permission deny to job")


@pytest.fixture
def client(lite):
    return lite.client(Denying)


@pytest.fixture
def source(lite, client):
    name = lite.name("left")
    plain_collection(client, name, vectors(np.random.default_rng(5), ITEMS, DIM), "IP")
    return name


@pytest.fixture
def bank():
    return QueryBank(vectors(np.random.default_rng(6), BANK, DIM))


def helpers_of(client, name):
    return [each for each in client.list_collections() if each.startswith(f"{name}_")]


def enabled(client, name, bank):
    store = MilvusStore(client)
    plan = plan_correction(store, name, Recipe(bank, estimator=NNN(4)), Beside())
    return enable(store, plan, client_ttl=0)


def test_a_copy_without_the_rights_for_it_is_refused_before_anything_is_written(
    client, source, bank, monkeypatch
):
    """By a migration and by a refresh, each in one line with the command that prints the grants."""
    lacking = {"CreateIndex", "Load"}
    monkeypatch.setattr(
        MilvusStore, "denied", lambda store, name, rights: [r for r in rights if r in lacking]
    )
    store = MilvusStore(client)
    plan = plan_correction(store, source, Recipe(bank, estimator=NNN(4)))
    before = client.list_collections()
    with pytest.raises(StoreError) as error:
        migrate(store, plan, no_writers=True)
    assert str(error.value) == (
        f"this user lacks rights to make the copy '{source}_hubness' of '{source}', so nothing was "
        f"written: grant CreateIndex, Load, as `milvus-hubness grants {source} --for job` prints it"
    )
    assert client.list_collections() == before

    lacking.clear()
    target = migrate(store, plan, no_writers=True).target
    before = client.list_collections()
    lacking.add("Query")
    changes = {"estimator": NNN(2), "force": True, "rename": True, "client_ttl": 0}
    assert refresh(store, target, plan=True, **as_recipe(**changes)).action == "full"
    with pytest.raises(StoreError, match=f"of '{target}', so nothing was written: grant Query, as"):
        refresh(store, target, **as_recipe(**changes))
    assert client.list_collections() == before


@pytest.mark.parametrize("right", RIGHTS)
def test_disable_is_finished_by_disable(client, source, bank, right):
    enabled(client, source, bank)
    store = MilvusStore(client)
    client.denied = right
    with pytest.raises(StoreError, match=right):
        disable(store, source)

    left = status(store, source).leftovers
    assert [name.split("__dropped")[0] for name in left] == [
        f"{source}__bias_a",
        f"{source}__bias_b",
    ]
    client.denied = ""
    assert disable(store, source) == left[0]
    assert helpers_of(client, source) == [f"{source}__bank"]
    assert status(store, source).leftovers == ()
    with pytest.raises(NotCorrected):
        disable(store, source)


def test_what_an_interrupted_disable_left_is_no_obstacle_to_enable(client, source, bank):
    enabled(client, source, bank)
    client.denied = "drop_collection"
    with pytest.raises(StoreError):
        disable(MilvusStore(client), source)
    client.denied = ""
    enabled(client, source, bank)
    assert disable(MilvusStore(client), source)
    assert helpers_of(client, source) == [f"{source}__bank"]


def test_bank_off_is_finished_by_bank_off(client, source, bank):
    store = MilvusStore(client)
    start_sampling(store, source)
    client.denied = "drop_collection"
    with pytest.raises(StoreError):
        stop_sampling(store, source)

    # Renamed already, so that nothing else is dropped in its place.
    [left] = status(store, source).leftovers
    assert left.startswith(f"{source}__query_samples_vector__dropped_")
    client.denied = ""
    assert stop_sampling(store, source) is None
    assert helpers_of(client, source) == []


@pytest.mark.parametrize("right", RIGHTS)
def test_clean_is_finished_by_clean(client, source, bank, right):
    """With the samples of the copy, which nothing names once it is gone."""
    store = MilvusStore(client)
    start_sampling(store, source)
    target = migrate(store, plan_correction(store, source, Recipe(bank, estimator=NNN(4)))).target
    client.denied = right
    with pytest.raises(StoreError):
        clean(store, source, drop=target)

    client.denied = ""
    clean(store, source, drop=target)
    assert helpers_of(client, source) == [f"{source}__query_samples_vector"]
    assert status(store, source).leftovers == ()


def test_a_collection_of_somebody_else_is_never_left_over(client, source, bank):
    """Whatever its name is, and whoever it points back to."""
    start_sampling(MilvusStore(client), source)
    other = f"{source}__bias_a"
    plain_collection(client, other, vectors(np.random.default_rng(7), 3, DIM), "IP")
    assert status(MilvusStore(client), source).leftovers == ()
    with pytest.raises(NotCorrected):
        disable(MilvusStore(client), source)
    assert client.has_collection(other)
