"""`match` gives the scores and ranks of a plain float64 Sinkhorn between the queries and the rows."""

import asyncio

import numpy as np
import pytest
from pymilvus import MilvusClient
from scipy.optimize import linear_sum_assignment

from milvus_hubness import (
    NNN,
    AsyncHubnessClient,
    InvalidInput,
    InvalidParameter,
    QueryBank,
    Recipe,
    migrate,
    plan_correction,
)
from milvus_hubness.errors import UnreadableFile
from tests.support.galleries import METRICS, as_distance, plain_collection, similarity, vectors

ON_SERVERS = {"metric": ["COSINE"]}
DIM, ITEMS, QUERIES = 8, 70, 40


def sinkhorn(scores, tau, iterations=30, tol=1e-3):
    """b(r) of every item in float64: potentials under which exp((s + f − b)/tau) has uniform marginals."""

    def logsumexp(values, axis):
        largest = values.max(axis, keepdims=True)
        return largest.squeeze(axis) + tau * np.log(np.exp((values - largest) / tau).sum(axis))

    f, error, done = -logsumexp(scores, 1), np.inf, 0
    while error > tol and done < iterations:
        biases = logsumexp(scores + f[:, None], 0)
        following = -logsumexp(scores - biases, 1)
        error, done = (
            np.abs(np.exp((f - following) / tau) / scores.shape[1] - 1 / len(f)).sum(),
            done + 1,
        )
        f = following
    return biases


def ranks(scores):
    return 1 + np.argsort(np.argsort(-scores, axis=1), axis=1)


def assert_matched(matches, queries, items, metric, limit, bank=None):
    """Every hit has the scores and ranks of the float64 computation; bank: queries that join the balance."""
    raw = similarity(queries if bank is None else np.concatenate([queries, bank]), items, metric)
    biases = sinkhorn(raw, 0.2 * np.sqrt(raw.var(1).mean()))
    raw = raw[: len(queries)]
    matched = raw - (biases - biases.mean())
    before, after = ranks(raw), ranks(matched)
    assert len(matches) == len(queries)
    for number, hits in enumerate(matches):
        keys = [hit["id"] for hit in hits]
        assert keys == np.argsort(-matched[number])[:limit].tolist()
        assert [hit["rank"] for hit in hits] == list(range(1, limit + 1))
        assert [hit["raw_rank"] for hit in hits] == before[number, keys].tolist()
        assert [hit["score"] for hit in hits] == pytest.approx(
            as_distance(raw[number, keys], metric), abs=1e-5
        )
        shown = [hit["matched_score"] for hit in hits]
        assert shown == pytest.approx(
            as_distance(matched[number, keys], metric), abs=2e-5 if metric == "L2" else 1e-5
        )
    assert (after != before).any(), "the case distinguishes raw and matched ranks"


@pytest.mark.parametrize("metric", METRICS)
def test_plain(backend, metric):
    rng = np.random.default_rng(3)
    items, queries, name = vectors(rng, ITEMS, DIM), vectors(rng, QUERIES, DIM), backend.name()
    plain_collection(backend.client(), name, items, metric)
    client = backend.hubness_client()
    matches = client.match(name, queries, 5)
    assert_matched(matches, queries, items, metric, 5)


@pytest.mark.parametrize("metric", ["COSINE", "L2"])
def test_migrated(backend, metric):
    rng = np.random.default_rng(4)
    items, queries, bank = (
        vectors(rng, ITEMS, DIM),
        vectors(rng, QUERIES, DIM),
        vectors(rng, 20, DIM),
    )
    source, store = backend.name(), backend.store()
    plain_collection(backend.client(), source, items, metric)
    name = migrate(
        store, plan_correction(store, source, Recipe(QueryBank(bank), estimator=NNN(4)))
    ).target
    client = backend.hubness_client()
    assert_matched(client.match(name, queries, limit=3), queries, items, metric, 3)
    assert_matched(
        client.match(name, queries, limit=3, with_bank=True), queries, items, metric, 3, bank
    )


@pytest.fixture(scope="module")
def gallery(shared_backend):
    rng = np.random.default_rng(5)
    items, queries, name = (
        vectors(rng, ITEMS, DIM),
        vectors(rng, QUERIES, DIM),
        shared_backend.name(),
    )
    plain_collection(shared_backend.client(), name, items, "COSINE")
    return shared_backend, name, items, queries


def test_a_filter_and_few_candidates(gallery):
    backend, name, items, queries = gallery
    of_group = np.arange(ITEMS) % 5 == 2
    matches = backend.hubness_client().match(name, queries, 4, "group == 2", candidates=4)
    raw, keys = similarity(queries, items[of_group], "COSINE"), np.flatnonzero(of_group)
    near = np.argsort(-raw, axis=1)[:, :4]
    assert {hit["id"] for hits in matches for hit in hits} <= set(keys.tolist())
    for number, hits in enumerate(matches):
        by_raw_rank = {hit["raw_rank"]: hit["id"] for hit in hits if hit["raw_rank"] <= 4}
        assert all(keys[near[number, rank - 1]] == key for rank, key in by_raw_rank.items())
    assert matches.facts["pairs"] == QUERIES * len(keys), (
        "each of these few rows has all queries as candidates"
    )
    assert len(backend.hubness_client().match(name, queries, filter="group == 9")) == QUERIES


def fill_templates(monkeypatch):
    """As Milvus does from 2.5 on, and neither Milvus Lite nor 2.3.5."""

    def filling(method):
        plain = getattr(MilvusClient, method)

        def call(client, *args, filter_params=None, **options):
            values = filter_params or {}
            args = [arg.format(**values) if isinstance(arg, str) else arg for arg in args]
            if "filter" in options:
                options["filter"] = options["filter"].format(**values)
            return plain(client, *args, **options)

        monkeypatch.setattr(MilvusClient, method, call)

    filling("search")
    filling("query")


def test_a_filter_may_be_a_template(gallery, monkeypatch, tmp_path):
    backend, name, _, queries = gallery
    client = backend.hubness_client()
    expected = client.match(name, queries, filter="group == 2")
    fill_templates(monkeypatch)
    template = {"filter": "group == {group}", "folder": tmp_path / "parts"}
    matches = client.match(name, queries, filter_params={"group": 2}, **template)
    assert list(matches) == list(expected)
    with pytest.raises(InvalidInput, match="parts of another match"):
        client.match(name, queries, filter_params={"group": 3}, **template)


def test_one_to_one_has_no_limit_to_have_candidates_for(gallery):
    backend, name, _, queries = gallery
    client = backend.hubness_client()
    few = client.match(name, queries, candidates=5, one_to_one=True)
    assert list(few) == list(client.match(name, queries, 5, candidates=5, one_to_one=True))
    assert 0 < sum(map(len, few)) <= QUERIES


def test_the_asynchronous_client_matches_alike(gallery):
    backend, name, _, queries = gallery
    client = backend.hubness_client()

    async def match():
        async with AsyncHubnessClient(backend.uri) as other:
            return await other.match(name, queries, limit=3)

    assert list(asyncio.run(match())) == list(client.match(name, queries, limit=3))


@pytest.mark.parametrize("rows", [ITEMS, QUERIES // 2], ids=["enough rows", "too few rows"])
def test_one_to_one_is_the_best_assignment(gallery, rows):
    backend, name, items, queries = gallery
    client = backend.hubness_client()
    matches = client.match(name, queries, filter=f"id < {rows}", one_to_one=True)
    raw = similarity(queries, items[:rows], "COSINE")
    matched = raw - sinkhorn(raw, 0.2 * np.sqrt(raw.var(1).mean()))
    best = matched[linear_sum_assignment(-matched)].sum()
    taken = [(number, hit["id"]) for number, hits in enumerate(matches) for hit in hits]
    assert (
        len({query for query, _ in taken})
        == len({key for _, key in taken})
        == len(taken)
        == min(rows, QUERIES)
    )
    assert sum(matched[pair] for pair in taken) == pytest.approx(best, abs=1e-4)
    assert sorted([*matches.unmatched, *(query for query, _ in taken)]) == list(range(QUERIES))


def test_an_interrupted_match_continues(gallery, tmp_path):
    backend, name, _, queries = gallery
    client, steps = backend.hubness_client(), []

    def interrupt(step, done, total):
        steps.append(step)
        if step == "searching the rows":
            raise KeyboardInterrupt

    options = {"limit": 3, "candidates": 20, "folder": tmp_path / "parts"}
    with pytest.raises(KeyboardInterrupt):
        client.match(name, queries, progress=interrupt, **options)
    assert "searching the queries" in steps
    steps.clear()
    resumed = client.match(name, queries, progress=lambda step, *_: steps.append(step), **options)
    assert "searching the rows" in steps
    assert "searching the queries" not in steps, "their answers were kept"
    assert list(resumed) == list(client.match(name, queries, limit=3, candidates=20))
    with pytest.raises(InvalidInput, match=r"^\S+ has parts of another match: repeat its options"):
        client.match(name, queries[:-1], **options)
    (tmp_path / "parts" / "00000000.npz").write_bytes(b"")
    with pytest.raises(UnreadableFile, match="remove the folder"):
        client.match(name, queries, **options)


def test_invalid_options(gallery):
    backend, name, _, queries = gallery
    client = backend.hubness_client()
    with pytest.raises(InvalidInput, match="no bank"):
        client.match(name, queries, with_bank=True)
    with pytest.raises(InvalidParameter, match="candidates"):
        client.match(name, queries, candidates=0)
    with pytest.raises(InvalidParameter, match="limit"):
        client.match(name, queries, limit=201)


def test_queries_for_some_of_the_rows_are_warned_of(shared_backend):
    """Eight topics; the queries ask for all of them, for one, or are very few."""
    rng = np.random.default_rng(7)
    items = np.repeat(rng.normal(size=(8, 16)), 10, axis=0) + 0.4 * rng.normal(size=(80, 16))
    queries = (items + 0.3 * rng.normal(size=items.shape)).astype(np.float32)
    name, client = shared_backend.name(), shared_backend.hubness_client()
    plain_collection(shared_backend.client(), name, items.astype(np.float32), "COSINE")
    assert not client.match(name, queries, candidates=30).warnings
    [one_topic] = client.match(name, queries[:10], candidates=30).warnings
    assert "some of the items only" in one_topic
    few, *_ = client.match(name, queries[::13], candidates=30).warnings
    assert "7 queries for 80 items" in few
