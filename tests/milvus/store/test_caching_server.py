"""A server whose proxy answers from a cache: what it answers, and what the product makes of it."""

import ast
from pathlib import Path

import numpy as np
import pytest
from pymilvus.client import utils
from pymilvus.exceptions import DescribeCollectionException, MilvusException, ParamError
from pymilvus.grpc_gen import common_pb2

import milvus_hubness
from milvus_hubness import (
    NNN,
    Beside,
    MilvusStore,
    QueryBank,
    Recipe,
    disable,
    enable,
    plan_correction,
    refresh,
    status,
)
from milvus_hubness.errors import CollectionNotFound
from milvus_hubness.jobs.common.lease import Lease
from milvus_hubness.jobs.store.ownership import LEDGER
from milvus_hubness.milvus.store.server import is_missing
from tests.conftest import Backend
from tests.milvus.caching import CachingServer
from tests.support.galleries import plain_collection, vectors

DIM = 4
PACKAGE = Path(milvus_hubness.__file__).parent / "milvus"
CODES = {"code", "_code", "compatible_code", "error_code"}
PERMISSION_DENIED = 7
MISSING = {"as every server before 2.6": (100, 1), "from a cache": (0, 4), "since 2.6": (100, 4)}
OTHERS = {"not loaded": (101, 1), "parameter": (1100, 6), "unexpected": (65535, 1), "field": (0, 1)}


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def aging(clock):
    """A server of this test, whose cache is as old as `clock` says."""
    with CachingServer(clock=clock) as server:
        yield Backend("caching", server.uri)


def made(backend, stem="items"):
    name = backend.name(stem)
    plain_collection(backend.client(), name, vectors(np.random.default_rng(4), 5, DIM), "IP")
    return name


def reads_a_code(comparison):
    """Whether a side of it is an attribute that is a code, or getattr of one."""
    for side in (comparison.left, *comparison.comparators):
        if isinstance(side, ast.Attribute) and side.attr in CODES:
            return True
        if isinstance(side, ast.Call) and ast.unparse(side.func) == "getattr":
            return ast.literal_eval(side.args[1]) in CODES
    return False


def error_of(code, error_code):
    with pytest.raises(MilvusException) as caught:
        utils.check_status(common_pb2.Status(code=code, error_code=error_code, reason="why"))
    return caught.value


def without_flushes(store, monkeypatch):
    """Refuse flushes of the ledger, for whose rows a store would wait; return what it has tried to flush."""
    flush, flushed = store.client.flush, []

    def refuse(name, **options):
        flushed.append(name)
        if name == LEDGER:
            raise MilvusException(PERMISSION_DENIED, "PrivilegeFlush: permission deny")
        flush(name, **options)

    monkeypatch.setattr(store.client, "flush", refuse)
    return flushed


# -- the server ------------------------------------------------------------------------------------


def test_a_missing_collection_is_refused_in_two_ways(caching):
    client = caching.client()
    assert not client.has_collection("nowhere")
    with pytest.raises(DescribeCollectionException) as described:
        client.describe_collection("nowhere")
    assert (described.value.code, described.value.compatible_code) == (0, 4)
    reason = "can't find collection[database=default][collection=nowhere]"
    assert described.value.message == reason
    for call in (client.list_aliases, client.flush, client.load_collection, client.list_indexes):
        with pytest.raises(MilvusException) as refused:
            call("nowhere")
        assert (refused.value.code, refused.value.compatible_code) == (100, 4)


def test_a_description_has_the_aliases_of_a_while_ago(aging, clock):
    client, name = aging.client(), made(aging)

    def both():
        return client.describe_collection(name)["aliases"], client.list_aliases(name)["aliases"]

    client.create_alias(name, "live")
    assert both() == ([], ["live"])
    clock.now = 31.0
    assert both() == (["live"], ["live"])
    client.drop_alias("live")
    assert both() == (["live"], [])
    client.rename_collection(name, f"{name}_renamed")
    assert client.describe_collection(f"{name}_renamed")["aliases"] == ["live"]


def test_a_partial_upsert_writes_the_row_that_it_has_read(caching, caching_server, monkeypatch):
    client, name = caching.client(), made(caching)
    change = {"id": 1, "group": 5, "note": "later"}

    def write_between():
        client.upsert(name, [{"id": 1, "vector": [9.0] * DIM, "group": 8}])

    [before] = client.query(name, ids=[1], output_fields=["*"])
    monkeypatch.setattr(caching_server, "before_late_write", write_between)
    client.upsert(name, [change], partial_update=True)
    [row] = client.query(name, ids=[1], output_fields=["*"])
    assert row == {**before, **change}
    client.upsert(name, [{"id": 1, "vector": [9.0] * DIM, "group": 8}])
    [row] = client.query(name, ids=[1], output_fields=["*"])
    assert row == {"id": 1, "vector": [9.0] * DIM, "group": 8}


# -- what the product makes of it ------------------------------------------------------------------


@pytest.mark.parametrize("form", MISSING)
def test_a_missing_collection_is_recognised_by_either_code(form):
    assert is_missing(error_of(*MISSING[form]))


@pytest.mark.parametrize("other", OTHERS)
def test_no_other_refusal_is_taken_for_it(other):
    assert not is_missing(error_of(*OTHERS[other]))
    assert not is_missing(ParamError(message="can't find collection"))
    assert not is_missing(ValueError("can't find collection"))


def test_nothing_else_compares_the_codes_of_errors():
    """A new comparison would miss one of the two forms, as six once did."""
    compared = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Compare):
                continue
            text = ast.unparse(node)
            # gRPC has codes of its own.
            is_of_grpc = "grpc.StatusCode" in text or "STATUS_CODES" in text
            if reads_a_code(node) and not is_of_grpc:
                compared.append(path.relative_to(PACKAGE).as_posix())
    assert set(compared) == {"store/server.py"}


def test_a_store_says_which_collection_is_missing(caching):
    with pytest.raises(CollectionNotFound, match="no collection or alias 'nowhere'"):
        caching.store().info("nowhere")
    assert caching.store().fences_of("nowhere") == []


def test_the_aliases_of_now_are_those_of_a_collection(aging, clock):
    store, name = aging.store(), made(aging)
    store.point_alias("live", name)
    assert store.info(name).aliases == ("live",)
    clock.now = 31.0
    assert aging.client().describe_collection("live")["aliases"] == ["live"]
    assert status(store, name).aliases == ("live",)
    store.drop_alias("live")
    assert status(store, name).aliases == ()


def test_a_fencing_alias_that_came_late_is_seen(caching, monkeypatch):
    """A former job made it after its record was gone: its late writes would arrive."""
    name, store = made(caching), caching.store()
    without_flushes(store, monkeypatch)
    with Lease(store, name):
        pass
    late = f"{name}__lease_1_0123abcd"
    store.fence(name, late)
    with Lease(store, name) as lease:
        assert store.fences_of(name) == [lease.alias_of(name)]
        assert not store.exists(late)


def test_jobs_one_after_another_flush_nothing_of_ours(aging, clock, monkeypatch):
    """The description has the alias of a former job, of which no record is there any more."""
    name, store = made(aging), aging.store()
    with Lease(store, name):
        clock.now = 31.0
        assert aging.client().describe_collection(name)["aliases"]
    flushed = without_flushes(store, monkeypatch)
    banks = [QueryBank(vectors(np.random.default_rng(seed), 30, DIM)) for seed in (1, 2)]
    plan = plan_correction(store, name, Recipe(banks[0], estimator=NNN(4)), Beside())
    enable(store, plan)
    refresh(store, name, banks[1], force=True)
    disable(store, name)
    assert LEDGER not in flushed
    assert store.fences_of(name) == []


@pytest.mark.parametrize("cls", ["client", "store"])
def test_a_collection_with_a_late_fencing_alias_is_dropped(caching, cls):
    """A server drops no collection that has an alias, and a description does not name this one."""
    name = made(caching)
    caching.store().fence(name, f"{name}__lease_1_0123abcd")
    if cls == "client":
        caching.hubness_client().drop_collection(name)
    else:
        MilvusStore(caching.client()).drop(name)
    assert not caching.client().has_collection(name)
