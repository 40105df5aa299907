"""A HubnessClient over a corrected collection against a MilvusClient over the plain one."""

import re

import numpy as np
import pytest
from pymilvus import AnnSearchRequest, MilvusClient, RRFRanker
from pymilvus.exceptions import MilvusException, ParamError

from milvus_hubness import (
    NNN,
    AsyncHubnessClient,
    Beside,
    CannotMigrate,
    Copy,
    DimensionMismatch,
    GloballyCorrected,
    HubnessClient,
    InvalidInput,
    InvalidParameter,
    NonFiniteVectors,
    QueryBank,
    Recipe,
    migrate,
    plan_correction,
    refresh,
)
from milvus_hubness.jobs.migration.survey import SAMPLE_ROWS
from tests.support import client_suite
from tests.support.aliases import aliased
from tests.support.galleries import METRICS, as_distance, nnn, plain_collection, similarity, vectors
from tests.support.pairs import (
    ALPHA,
    DIM,
    ITEMS,
    K,
    Pair,
    bad_rows,
    hits_of,
    ids,
    restored,
)


@pytest.fixture(scope="module", params=METRICS)
def shared_pair(shared_backend, request):
    return Pair(shared_backend, request.param)


@pytest.fixture
def pair(shared_pair):
    yield from restored(shared_pair)


class TestCorrectedCollection(client_suite.CorrectedCollection):
    """Through a HubnessClient."""


@pytest.mark.parametrize("strict", [False, True])
def test_vectors_stay_in_the_columns_of_an_answer_until_a_row_is_read(pair, strict):
    """As pymilvus keeps them: whoever reads one row does not wait for all. They are decoded there, all at once."""
    further = {"output_fields": ["vector", "note"], "strict_float32": strict}
    asked = [
        lambda client, name: client.query(name, filter="group in [1, 3]", **further),
        lambda client, name: client.get(name, list(range(9)), **further),
    ]
    for ask in asked:
        expected, got = ask(pair.plain, pair.name), ask(pair.client, pair.corrected)
        assert type(got) is type(expected)
        assert [row["vector"] for row in list.__iter__(got)] == [
            row["vector"] for row in list.__iter__(expected)
        ]
        assert {row["id"]: set(row) for row in got} == {row["id"]: set(row) for row in expected}
        by_key = {row["id"]: row for row in got}
        for row in [*expected, expected[-1], *expected[:2]]:
            found = by_key[row["id"]]
            assert (type(found["vector"]), found["note"]) == (type(row["vector"]), row["note"])
            assert {type(number) for number in found["vector"]} == {
                type(number) for number in row["vector"]
            }
            np.testing.assert_allclose(found["vector"], row["vector"], rtol=2.4e-7)
    found = pair.client.search(
        pair.corrected, data=list(pair.queries), limit=5, output_fields=["vector"]
    )
    assert not any("vector" in hit["entity"] for hits in found for hit in list.__iter__(hits))
    for hit in (hit for hits in found for hit in hits):
        np.testing.assert_allclose(hit["entity"]["vector"], pair.items[hit["id"]], rtol=2.4e-7)


def test_bad_rows_are_refused_by_row_and_nothing_is_written(pair):
    for rows, error, said in bad_rows(pair.metric):
        for write in (pair.client.insert, pair.client.upsert):
            with pytest.raises(error) as caught:
                write(pair.corrected, rows)
            assert said in str(caught.value)
    [counted] = pair.client.query(pair.corrected, output_fields=["count(*)"])
    assert counted["count(*)"] == ITEMS


def test_an_update_in_part_changes_no_hidden_field_either(pair):
    """By these, vectors are decoded: the user's own would change."""
    hidden = pair.client.hubness_state(pair.corrected).codec.hidden_fields
    assert hidden
    [before] = pair.client.get(pair.corrected, 6, output_fields=["vector", *hidden])
    for name in hidden:
        with pytest.raises(InvalidInput, match=f"row 0 sets '{name}'"):
            pair.client.upsert(pair.corrected, {"id": 6, name: 7}, partial_update=True)
    [after] = pair.client.get(pair.corrected, 6, output_fields=["vector", *hidden])
    assert dict(after) == dict(before)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        ({"data": [[0.1] * (DIM + 1)]}, DimensionMismatch),
        ({"data": ["words"]}, InvalidInput),
        ({"data": [[float("inf")] * DIM]}, NonFiniteVectors),
        ({"data": [[0.1] * DIM], "strength": float("nan")}, InvalidParameter),
        ({"data": [[0.1] * DIM], "strength": "x"}, InvalidParameter),
        ({"data": np.full((1, DIM), 1 + 1j)}, InvalidInput),
        ({"data": [np.full(DIM, 1 + 1j)]}, InvalidInput),
        ({"data": [np.full(DIM, 1 + 1j)] * 2}, InvalidInput),
        ({"data": [[0.1] * DIM], "search_params": {"metric_type": "HAMMING"}}, InvalidParameter),
        ({"data": [[0.1] * DIM], "strength": 10**400}, InvalidParameter),
        ({"data": [[0.1] * DIM], "profile": ["default"]}, InvalidInput),
        ({"data": [[0.1] * DIM], "profile": {}}, InvalidInput),
        ({"data": [[0.1] * DIM], "anns_field": ["vector"]}, ParamError),
        ({"data": [[0.1] * DIM], "rerank": "globally"}, InvalidParameter),
        ({"data": [[0.1] * DIM], "rerank": GloballyCorrected}, InvalidParameter),
        ({"ids": np.array([1, 2])}, MilvusException),
    ],
)
def test_bad_questions_are_refused(pair, call, error):
    with pytest.raises(error) as refused:
        pair.client.search(pair.corrected, **call)
    assert isinstance(refused.value, MilvusException)


@pytest.mark.parametrize("requests", [None, 3, "x", [None], [{"data": []}], "parameters"])
def test_what_is_no_hybrid_search_is_refused_as_by_pymilvus(pair, requests):
    if requests == "parameters":
        requests = [AnnSearchRequest([[0.1] * DIM], "vector", "nprobe", 3)]
    for client, name in ((pair.plain, pair.name), (pair.client, pair.corrected)):
        with pytest.raises(MilvusException):
            client.hybrid_search(name, requests, RRFRanker())


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("rerank", lambda client, n, q, **o: client.hybrid_search(n, [], RRFRanker(), **o)),
        ("with_raw_score", lambda client, n, q, **o: client.hybrid_search(n, [], RRFRanker(), **o)),
        ("rerank", lambda client, n, q, **o: client.search_iterator(n, q, **o)),
        ("candidates", lambda client, n, q, **o: client.search_iterator(n, q, **o)),
    ],
)
def test_an_argument_that_only_another_method_has_is_refused(pair, name, call):
    """pymilvus ignores what it does not know: such a search was not re-ranked, without a word."""
    with pytest.raises(InvalidParameter, match=f"'{name}' is no argument of this method"):
        call(pair.client, pair.corrected, [[0.1] * DIM], **{name: GloballyCorrected()})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"strength": float("nan")}, "strength must be a finite number, not nan"),
        ({"strength": float("inf")}, "strength must be"),
        ({"strength": "x"}, "strength must be a finite number, not 'x'"),
        ({"strength": True}, "strength must be"),
        ({"state_ttl": -1}, "state_ttl must be a number of seconds of at least 0, not -1"),
        ({"state_ttl": float("nan")}, "state_ttl must be"),
        ({"state_ttl": "1"}, "state_ttl must be"),
        (
            {"bank_budget": "1 GiB"},
            "bank_budget must be a number of bytes of at least 0, not '1 GiB'",
        ),
        ({"bank_budget": -1}, "bank_budget must be"),
        ({"bank_budget": None}, "bank_budget must be"),
    ],
)
@pytest.mark.parametrize("kind", [HubnessClient, AsyncHubnessClient])
def test_a_client_of_options_that_cannot_be_meant_is_refused(lite, kind, options, said):
    with pytest.raises(InvalidParameter) as caught:
        kind(lite.uri, **options)
    assert said in str(caught.value)


def test_a_hubness_client_is_a_milvus_client_and_leaves_ordinary_collections_alone(backend):
    rng = np.random.default_rng(3)
    items, name = vectors(rng, 50, 8), backend.name()
    plain, client = backend.client(), backend.hubness_client()
    assert isinstance(client, MilvusClient)
    plain_collection(client, name, items, "COSINE")
    assert client.describe_collection(name) == plain.describe_collection(name)
    assert client.describe_index(name, "vector") == plain.describe_index(name, "vector")
    for call in (
        lambda c: hits_of(c.search(name, data=list(items[:3]), limit=4, output_fields=["*"])),
        lambda c: list(c.query(name, filter="id == 3")),
        lambda c: list(c.get(name, [1, 2])),
        lambda c: [row["id"] for row in c.query_iterator(name, batch_size=50).next()],
    ):
        assert call(client) == call(plain)
    with pytest.raises(Exception, match="nowhere") as expected:
        plain.search("nowhere", data=[[0.0] * 8])
    with pytest.raises(type(expected.value), match="nowhere"):
        client.search("nowhere", data=[[0.0] * 8])


@pytest.mark.parametrize("mean", [100.0, 10_000.0])
def test_an_l2_gallery_far_from_zero_is_searched_and_read_as_before(backend, mean):
    rng = np.random.default_rng(5)
    items, queries, bank, new = (
        (mean + rng.normal(size=(count, 64))).astype(np.float32) for count in (400, 40, 60, 5)
    )
    items[7] = 0
    plain, name, store = backend.client(), backend.name("far"), backend.store()
    plain_collection(plain, name, items, "L2")
    plan = plan_correction(store, name, Recipe(QueryBank(bank), estimator=NNN(K, ALPHA)))
    target = aliased(store, migrate(store, plan).target)
    client = backend.hubness_client()

    def assert_right(rows):
        wanted = plain.search(name, list(queries), limit=10)
        found = client.search(target, list(queries), limit=10, strength=0, output_fields=["vector"])
        for raw, hits in zip(wanted, found, strict=True):
            assert ids(hits) == ids(raw)
            np.testing.assert_allclose(hits.distances, raw.distances, rtol=1e-5)
            np.testing.assert_array_equal(
                [hit["entity"]["vector"] for hit in hits], rows[ids(hits)]
            )
        biases = nnn(bank, rows, "L2", K, ALPHA)
        mean_bias = client.hubness_state(target).profile.mean_bias
        corrected = as_distance(similarity(queries, rows, "L2") - (biases - mean_bias), "L2")
        for scores, hits in zip(
            corrected, client.search(target, list(queries), limit=10), strict=True
        ):
            np.testing.assert_allclose(hits.distances, scores[ids(hits)], rtol=1e-4)
            np.testing.assert_allclose(hits.distances, np.sort(scores)[:10], rtol=1e-4)

    assert_right(items)
    before = client.hubness_state(target).layout.half_squares.mean
    for key, vector in enumerate(new, start=400):
        row = {"id": key, "vector": vector, "group": 0}
        plain.insert(name, [row])
        client.insert(target, [row], bias="pending" if key % 2 else "compute")
    refresh(store, target, Recipe(QueryBank(bank), estimator=NNN(K, ALPHA)), force=True)
    assert_right(np.concatenate([items, new]))
    assert client.hubness_state(target).layout.half_squares.mean == before
    bound = plain.search(name, [queries[0]], limit=10)[0].distances[4]
    params = {"params": {"radius": bound}}
    within = client.search(target, [queries[0]], limit=10, search_params=params, strength=0)
    assert len(within[0]) == 4
    [[best, *_]] = client.search(target, ids=[3], limit=5, strength=0)
    assert best["id"] == 3
    with pytest.raises(InvalidInput, match=r"row 0 has 0\.5 in dimension 2 of field 'vector'"):
        client.insert(target, [{"id": 999, "vector": [mean, mean, 0.5, *new[0, 3:]], "group": 0}])


def test_a_row_that_could_not_be_read_back_ends_a_migration_by_its_name(lite):
    """The sample that the plan reads has every other row."""
    rng, rows = np.random.default_rng(5), 2 * SAMPLE_ROWS
    items, bank = (
        (1_000 + rng.normal(size=(count, 20))).astype(np.float32) for count in (rows, 60)
    )
    items[7, 4] = 0.1
    name, store = lite.name("odd"), lite.store()
    plain_collection(lite.client(), name, items, "L2")
    plan = plan_correction(store, name, Recipe(QueryBank(bank), estimator=NNN(K, ALPHA)))
    with pytest.raises(CannotMigrate, match=r"row 7 has 0\.1 in dimension 4 of field 'vector'"):
        migrate(store, plan, no_writers=True)


def test_groups_that_float32_does_not_tell_apart_are_refused_with_the_figures(lite):
    rng = np.random.default_rng(5)
    items, bank = rng.normal(size=(400, 64)), rng.normal(size=(60, 64))
    for rows in (items, bank):
        rows[::2] += 1_000
        rows[1::2] -= 1_000
    name, store = lite.name("groups"), lite.store()
    plain_collection(lite.client(), name, items.astype(np.float32), "L2")
    for body in (Copy(), Beside()):
        with pytest.raises(CannotMigrate) as caught:
            plan_correction(
                store, name, Recipe(bank.astype(np.float32), estimator=NNN(K, ALPHA)), body
            )
        [gap, error] = re.search(
            r"differ by (\S+) in .* are off by (\S+), because", str(caught.value)
        ).groups()
        assert 0.5 < float(gap) < 3 < float(error) < 40
