"""Our clients take what pymilvus's take, in the same order, with the same defaults."""

import inspect

import pytest
from pymilvus import AsyncMilvusClient, MilvusClient

from milvus_hubness import AsyncHubnessClient, HubnessClient
from milvus_hubness.milvus.client.collection_methods import CollectionMethods
from milvus_hubness.milvus.client.methods import Methods

PAIRS = [(HubnessClient, MilvusClient), (AsyncHubnessClient, AsyncMilvusClient)]
NAMED = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def public(cls):
    return {name for name, _ in inspect.getmembers(cls, callable) if not name.startswith("_")}


def overridden():
    return [
        pytest.param(ours, theirs, name, id=f"{ours.__name__}.{name}")
        for ours, theirs in PAIRS
        for name in sorted({*public(theirs), "__init__"})
        if getattr(ours, name) is not getattr(theirs, name)
    ]


@pytest.mark.parametrize(("ours", "theirs", "name"), overridden())
def test_a_call_of_theirs_is_a_call_of_ours(ours, theirs, name):
    mine = inspect.signature(getattr(ours, name)).parameters
    other = inspect.signature(getattr(theirs, name)).parameters
    if set(mine) == {"self", "args", "kwargs"}:
        return
    for kind in (NAMED, (inspect.Parameter.KEYWORD_ONLY,)):
        wanted = [(each.name, each.default) for each in other.values() if each.kind in kind]
        given = [(each.name, each.default) for each in mine.values() if each.kind in kind]
        assert given[: len(wanted)] == wanted
        if kind == NAMED:
            assert len(given) == len(wanted), "what is ours alone is given by name only"
    further = inspect.Parameter.VAR_KEYWORD
    assert any(each.kind == further for each in mine.values()) or not any(
        each.kind == further for each in other.values()
    )
    assert inspect.iscoroutinefunction(getattr(ours, name)) == inspect.iscoroutinefunction(
        getattr(theirs, name)
    )


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_nothing_of_theirs_is_missing(ours, theirs):
    assert public(theirs) <= public(ours)
    assert issubclass(ours, theirs)


def test_both_clients_offer_the_same_beyond_pymilvus():
    for name in (
        "search",
        "insert",
        "upsert",
        "hybrid_search",
        "create_collection",
        "query_iterator",
    ):
        beyond = []
        for ours, _ in PAIRS:
            known = inspect.signature(getattr(MilvusClient, name)).parameters
            mine = inspect.signature(getattr(ours, name)).parameters
            beyond.append({each for each in mine if each not in known and each != "highlighter"})
        assert beyond[0] == beyond[1], name


@pytest.mark.parametrize("ours", [HubnessClient, AsyncHubnessClient])
def test_a_search_names_its_re_ranker_and_how_many_candidates_it_takes(ours):
    given = inspect.signature(ours.search).parameters
    for name in ("rerank", "candidates"):
        assert (given[name].kind, given[name].default) == (inspect.Parameter.KEYWORD_ONLY, None)


def test_methods_that_pymilvus_adds_later_pass_through(monkeypatch):
    monkeypatch.setattr(MilvusClient, "brand_new", lambda self, what: ("new", what), raising=False)
    assert HubnessClient.brand_new is MilvusClient.brand_new


def test_each_method_that_both_clients_share_is_a_coroutine_function_in_the_async_client():
    for shared in (Methods, CollectionMethods):
        for name, method in vars(shared).items():
            if inspect.isfunction(method) and not name.startswith("_"):
                mine = getattr(AsyncHubnessClient, name)
                assert inspect.iscoroutinefunction(mine), name
                assert mine.__doc__, name
