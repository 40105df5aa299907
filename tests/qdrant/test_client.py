"""HubnessQdrantClient against a plain client on the uncorrected source, and against the definition."""

import uuid

import numpy as np
import pytest
from qdrant_client import QdrantClient, models
from qdrant_client.common.client_exceptions import ResourceExhaustedResponse

from milvus_hubness import (
    NNN,
    DimensionMismatch,
    InvalidInput,
    NonFiniteVectors,
    QueryBank,
    Recipe,
    UnsupportedOperation,
    ZeroVectors,
    migrate,
    plan_correction,
)
from qdrant_hubness import HubnessQdrantClient
from tests.qdrant.worlds import Corrected, key
from tests.support.galleries import nnn, vectors

FILTER = models.Filter(must=[models.FieldCondition(key="group", match=models.MatchValue(value=2))])
CLOSE = {"abs": 3e-5}


def told(answer):
    return [(point.id, pytest.approx(point.score, **CLOSE)) for point in answer.points]


def assert_alike(mine, theirs):
    """The same points, with the same in them."""
    assert [each.id for each in mine] == [each.id for each in theirs]
    assert [each.payload for each in mine] == [each.payload for each in theirs]
    for a, b in zip(mine, theirs, strict=True):
        assert (a.vector is None) == (b.vector is None)
        if a.vector is not None:
            np.testing.assert_allclose(a.vector, b.vector, rtol=3e-7, atol=1e-9)
        if hasattr(a, "score"):
            assert a.score == pytest.approx(b.score, **CLOSE)


def assert_alike_up_to_ties(mine, theirs):
    """As assert_alike for fused ranks, among which there are ties, in another order in each collection."""
    assert [each.score for each in mine] == pytest.approx([each.score for each in theirs], **CLOSE)
    last = mine[-1].score
    whole = [
        {each.id: each.payload for each in answer if each.score > last + CLOSE["abs"]}
        for answer in (mine, theirs)
    ]
    assert whole[0] == whole[1]


def examples(corrected):
    """Queries of every kind, as the user asks them."""
    vector, other = corrected.query.tolist(), corrected.bank[0].tolist()
    some = {"positive": [key(3), vector], "negative": [key(8)]}
    pair = models.ContextPair(positive=key(9), negative=other)
    kinds = {
        "vector": vector,
        "array": corrected.query,
        "number": 7,
        "uuid": uuid.UUID(key(4)),
        "nearest": models.NearestQuery(nearest=vector),
        "average": models.RecommendQuery(recommend=models.RecommendInput(**some)),
        "positive": models.RecommendQuery(
            recommend=models.RecommendInput(positive=[key(3), key(4)])
        ),
        "none": None,
    }
    if corrected.metric != "L2":
        for strategy in ("best_score", "sum_scores"):
            recommend = models.RecommendInput(**some, strategy=strategy)
            kinds[strategy] = models.RecommendQuery(recommend=recommend)
        discover = models.DiscoverInput(target=key(3), context=pair)
        kinds["discover"] = models.DiscoverQuery(discover=discover)
        kinds["context"] = models.ContextQuery(context=[pair])
    return kinds


def test_without_strength_every_query_is_answered_as_by_qdrant(of_each_distance):
    corrected = of_each_distance
    plain, client = corrected.backend.client, corrected.client
    for name, query in examples(corrected).items():
        for options in (
            {"limit": 9, "with_vectors": True},
            {"limit": 6, "offset": 4, "query_filter": FILTER, "with_payload": ["n"]},
        ):
            theirs = plain.query_points(corrected.source, query, **options).points
            mine = client.query_points(corrected.name, query, strength=0, **options).points
            assert len(mine) == options["limit"], name
            if name == "context":  # most points are equally good
                assert [p.score for p in mine] == pytest.approx([p.score for p in theirs], **CLOSE)
            else:
                assert_alike(mine, theirs)


def test_scores_are_those_of_the_definition(of_each_distance):
    corrected = of_each_distance
    for strength in (1.0, 0.5):
        found, wanted = corrected.scores(strength=strength), corrected.wanted(strength=strength)
        np.testing.assert_allclose([found[i] for i in range(corrected.ITEMS)], wanted, atol=3e-5)
        best = corrected.client.query_points(
            corrected.name, corrected.query, limit=10, strength=strength
        )
        assert [point.id for point in best.points] == corrected.order(wanted)[:10]
    among = [i for i in range(corrected.ITEMS) if i % 5 == 2]
    options = {"limit": 5, "offset": 3, "query_filter": FILTER}
    found = corrected.client.query_points(
        corrected.name, corrected.query.tolist(), **options
    ).points
    assert [point.id for point in found] == corrected.order(corrected.wanted(), among)[3:8]


def test_a_gallery_far_from_zero_is_searched_and_read_as_before(backend):
    far = Corrected(backend, "Euclid", away=1_000.0)
    assert far.state.layout.half_squares.mean
    far.assert_scores()
    query = far.query.tolist()
    plain = backend.client.query_points(far.source, query, limit=9).points
    found = far.client.query_points(far.name, query, limit=9, strength=0, with_vectors=True).points
    assert [point.id for point in found] == [point.id for point in plain]
    for point, raw in zip(found, plain, strict=True):
        assert point.score == pytest.approx(raw.score, rel=1e-5)
        np.testing.assert_array_equal(np.float32(point.vector), far.items[far.keys.index(point.id)])
    odd = models.PointStruct(id=9_999, vector=[0.3, *far.items[0, 1:].tolist()])
    with pytest.raises(InvalidInput, match="in dimension 0"):
        far.client.upsert(far.name, [odd])


def test_thresholds_are_in_corrected_scores(of_each_distance):
    corrected = of_each_distance
    wanted = np.sort(corrected.wanted())
    is_distance = corrected.metric == "L2"
    ordered = wanted if is_distance else wanted[::-1]
    threshold = float((ordered[20] + ordered[21]) / 2)
    options = {"limit": 100, "score_threshold": threshold}
    found = corrected.client.query_points(
        corrected.name, corrected.query.tolist(), **options
    ).points
    assert [point.score for point in found] == pytest.approx(ordered[:21].tolist(), **CLOSE)
    request = models.QueryRequest(query=corrected.query.tolist(), **options)
    [batched] = corrected.client.query_batch_points(corrected.name, [request])
    assert told(batched) == [(point.id, point.score) for point in found]


def test_a_point_is_asked_for_by_what_the_user_gave_it(of_each_distance):
    """Its stored vector would ask for its own bias."""
    corrected = of_each_distance
    for query in (key(3), models.NearestQuery(nearest=key(3))):
        found = corrected.client.query_points(corrected.name, query, limit=12).points
        wanted = corrected.wanted(query=corrected.items[3])
        assert [point.id for point in found] == [k for k in corrected.order(wanted) if k != key(3)][
            :12
        ]
        score = wanted[corrected.keys.index(found[0].id)]
        assert found[0].score == pytest.approx(score, **CLOSE)
    with pytest.raises(InvalidInput, match="123456"):
        corrected.client.query_points(corrected.name, 123_456)


def test_a_uuid_may_be_written_as_a_server_reads_it(corrected, monkeypatch):
    """The local mode compares ids letter by letter, a server does not."""
    retrieve = QdrantClient.retrieve

    def as_a_server(self, collection_name, ids, *args, **options):
        read = [str(uuid.UUID(id)) if isinstance(id, str) else id for id in ids]
        return retrieve(self, collection_name, read, *args, **options)

    monkeypatch.setattr(QdrantClient, "retrieve", as_a_server)
    ask = corrected.client.query_points
    expected = ask(corrected.name, key(4), limit=8).points
    for written in (key(4).replace("-", ""), key(4).upper(), f"urn:uuid:{key(4)}"):
        assert_alike(ask(corrected.name, written, limit=8).points, expected)


def test_recommendations_by_the_average_are_corrected(of_each_distance):
    corrected = of_each_distance
    a, b, c = (
        np.array(each.vector)
        for each in corrected.backend.client.retrieve(
            corrected.source, [key(3), key(4), key(8)], with_vectors=True
        )
    )
    recommend = models.RecommendInput(positive=[key(3), key(4)], negative=[key(8)])
    found = corrected.client.query_points(
        corrected.name, models.RecommendQuery(recommend=recommend), limit=9
    ).points
    wanted = corrected.wanted(query=(a + b - c).astype(np.float32))
    among = set(range(corrected.ITEMS)) - {3, 4, 8}
    assert [point.id for point in found] == corrected.order(wanted, among)[:9]


def test_points_are_looked_up_elsewhere_by_what_the_user_gave_them(corrected):
    other = Corrected(corrected.backend, "Dot")
    lookup = models.LookupLocation(collection=other.name)
    found = corrected.client.query_points(
        corrected.name, key(5), lookup_from=lookup, limit=8
    ).points
    assert [p.id for p in found] == corrected.order(corrected.wanted(query=other.items[5]))[:8]
    raw = corrected.client.query_points(
        corrected.source, key(5), lookup_from=lookup, limit=8
    ).points
    lookup = models.LookupLocation(collection=other.source)
    theirs = corrected.backend.client.query_points(
        corrected.source, key(5), lookup_from=lookup, limit=8
    )
    assert_alike(raw, theirs.points)


def test_a_point_looked_up_in_the_searched_collection_is_left_out_there(corrected):
    """As without a lookup: it is named by its id in the collection that is searched."""
    alias = corrected.backend.name("alias")
    plain, client = corrected.backend.client, corrected.client
    for name in (corrected.source, corrected.name):
        change = models.CreateAlias(collection_name=name, alias_name=f"{alias}_{name}")
        plain.update_collection_aliases([models.CreateAliasOperation(create_alias=change)])
    lookup = models.LookupLocation(collection=corrected.source)
    theirs = plain.query_points(corrected.source, key(5), lookup_from=lookup, limit=8).points
    assert key(5) not in {point.id for point in theirs}
    assert_alike(
        client.query_points(corrected.source, key(5), lookup_from=lookup, limit=8).points, theirs
    )
    expected = client.query_points(corrected.name, key(5), limit=8).points
    for name, of in (
        (corrected.name, corrected.name),
        (f"{alias}_{corrected.name}", corrected.name),
        (f"{alias}_{corrected.name}", f"{alias}_{corrected.name}"),
    ):
        lookup = models.LookupLocation(collection=of)
        found = client.query_points(name, key(5), lookup_from=lookup, limit=8).points
        assert_alike(found, expected)


def two_vectors(backend):
    """A source of a dense and a sparse vector, and its copy, whose dense one is corrected."""
    rng = np.random.default_rng(3)
    client, name, items = backend.client, backend.name(), vectors(rng, 120, 8)
    client.create_collection(
        name,
        vectors_config={"dense": models.VectorParams(size=8, distance="Cosine")},
        sparse_vectors_config={"words": models.SparseVectorParams()},
    )
    client.upsert(
        name,
        [
            models.PointStruct(
                id=i,
                vector={
                    "dense": items[i].tolist(),
                    "words": models.SparseVector(
                        indices=[i % 7, 20 + i % 11], values=[1.0 + i / 1_000, 0.5 + i / 100]
                    ),
                },
                payload={"group": i % 5, "rank": i / 120},
            )
            for i in range(120)
        ],
    )
    store, bank = backend.store(), vectors(rng, 40, 8)
    plan = plan_correction(store, name, Recipe(QueryBank(bank), estimator=NNN(8)), field="dense")
    return name, migrate(store, plan).target, items, bank


@pytest.mark.parametrize("method", ["search_matrix_pairs", "search_matrix_offsets"])
def test_a_vector_named_by_position_is_compared_with_no_other_in_augmented_form(backend, method):
    source, target, _, _ = two_vectors(backend)
    with pytest.raises(UnsupportedOperation, match="augmented"):
        getattr(backend.hubness(), method)(target, None, 2, 9, "dense")
    for client, name in ((backend.client, source), (backend.hubness(), source)):
        assert getattr(client, method)(name, FILTER, 2, 9, "dense")


@pytest.mark.parametrize("merge", ["rrf", "dbsf", "rescored", "formula", "nested"])
def test_prefetches_are_merged_from_corrected_scores(backend, merge):
    source, target, _, bank = two_vectors(backend)
    query, client = bank[1].tolist(), backend.hubness()
    words = models.SparseVector(indices=[3, 25], values=[1.0, 1.0])
    dense = models.Prefetch(query=query, using="dense", limit=30)
    sparse = models.Prefetch(query=words, using="words", limit=30)
    formula = models.FormulaQuery(
        formula=models.SumExpression(sum=["$score[0]", models.MultExpression(mult=[0.1, "rank"])])
    )
    options = {
        "rrf": {"prefetch": [dense, sparse], "query": models.FusionQuery(fusion=models.Fusion.RRF)},
        "dbsf": {
            "prefetch": [dense, sparse],
            "query": models.FusionQuery(fusion=models.Fusion.DBSF),
        },
        "rescored": {"prefetch": sparse, "query": query, "using": "dense"},
        "formula": {"prefetch": [dense], "query": formula},
        "nested": {
            "prefetch": models.Prefetch(prefetch=[dense], query=words, using="words", limit=20),
            "query": query,
            "using": "dense",
        },
    }[merge]
    theirs = backend.client.query_points(source, limit=12, query_filter=FILTER, **options).points
    mine = client.query_points(target, limit=12, query_filter=FILTER, strength=0, **options).points
    alike = assert_alike_up_to_ties if merge == "rrf" else assert_alike
    alike(mine, theirs)

    corrected = client.query_points(
        target, query, using="dense", limit=30, query_filter=FILTER
    ).points
    if merge == "formula":
        found = client.query_points(target, limit=12, query_filter=FILTER, **options).points
        scores = {p.id: p.score + 0.1 * p.id / 120 for p in corrected}
        assert [p.score for p in found] == pytest.approx(
            sorted(scores.values())[::-1][:12], **CLOSE
        )
    elif merge in ("rescored", "nested"):
        found = client.query_points(target, limit=12, query_filter=FILTER, **options).points
        scores = {p.id: p.score for p in corrected}
        assert {p.id: p.score for p in found} == pytest.approx(
            {p.id: scores[p.id] for p in found}, **CLOSE
        )
        assert [p.score for p in found] == sorted((p.score for p in found), reverse=True)
    else:
        alone = {**options, "prefetch": [dense]}
        found = client.query_points(target, limit=12, query_filter=FILTER, **alone).points
        assert [p.id for p in found] == [p.id for p in corrected][:12]


def test_groups_and_batches(of_each_distance):
    corrected = of_each_distance
    options = {"query": corrected.query.tolist(), "group_by": "group", "limit": 3, "group_size": 4}
    theirs = corrected.backend.client.query_points_groups(corrected.source, **options).groups
    mine = corrected.client.query_points_groups(corrected.name, strength=0, **options).groups
    for a, b in zip(mine, theirs, strict=True):
        assert a.id == b.id
        assert_alike(a.hits, b.hits)
    wanted = corrected.wanted()
    for group in corrected.client.query_points_groups(corrected.name, **options).groups:
        among = [i for i in range(corrected.ITEMS) if i % 5 == group.id]
        assert [hit.id for hit in group.hits] == corrected.order(wanted, among)[:4]
        scores = [wanted[corrected.keys.index(hit.id)] for hit in group.hits]
        assert [hit.score for hit in group.hits] == pytest.approx(scores, **CLOSE)
    requests = [
        models.QueryRequest(query=query, limit=5, with_payload=True)
        for query in (key(2), corrected.query.tolist(), corrected.bank[0].tolist())
    ]
    for request, answer in zip(
        requests, corrected.client.query_batch_points(corrected.name, requests), strict=True
    ):
        alone = corrected.client.query_points(corrected.name, request.query, limit=5).points
        assert_alike(answer.points, alone)


def test_diverse_answers_are_picked_from_corrected_candidates(corrected):
    plain, query = corrected.backend.client, corrected.query.tolist()
    for diversity in (0.0, 0.5, 0.9):
        mmr = models.Mmr(diversity=diversity, candidates_limit=40)
        asked = models.NearestQuery(nearest=query, mmr=mmr)
        theirs = plain.query_points(corrected.source, asked, limit=10).points
        mine = corrected.client.query_points(corrected.name, asked, limit=10, strength=0).points
        assert_alike(mine, theirs)
    nearest = corrected.client.query_points(corrected.name, query, limit=40).points
    mine = corrected.client.query_points(corrected.name, asked, limit=10).points
    assert {p.id for p in mine} < {p.id for p in nearest}
    assert mine[0].id == nearest[0].id


def test_a_limit_that_qdrant_refuses_is_refused(backend):
    if not backend.is_local:
        pytest.skip("a server answers with its own error")
    corrected = Corrected(backend)
    query = corrected.query.tolist()
    mmr = models.NearestQuery(nearest=query, mmr=models.Mmr(candidates_limit=20))
    for client, name in ((backend.client, corrected.source), (corrected.client, corrected.name)):
        for limit in (0, -1):
            with pytest.raises(ValueError, match="limit"):
                client.query_points(name, query, limit=limit)
            with pytest.raises(ValueError, match="limit"):
                client.query_points(name, mmr, limit=limit)
            with pytest.raises(ValueError, match="limit"):
                client.query_points_groups(name, "group", query, limit=limit)


def test_reading_shows_what_qdrant_would(of_each_distance):
    corrected = of_each_distance
    plain, client = corrected.backend.client, corrected.client
    ids = [key(5), key(8), 123_456]
    assert_alike(
        client.retrieve(corrected.name, ids, with_vectors=True),
        plain.retrieve(corrected.source, ids, with_vectors=True),
    )
    for options in ({"limit": 30, "with_vectors": True}, {"limit": 7, "scroll_filter": FILTER}):
        mine, theirs = (
            client.scroll(corrected.name, **options),
            plain.scroll(corrected.source, **options),
        )
        assert_alike(mine[0], theirs[0])
        assert mine[1] == theirs[1]
    assert client.count(corrected.name, count_filter=FILTER) == plain.count(
        corrected.source, FILTER
    )
    mine, theirs = client.get_collection(corrected.name), plain.get_collection(corrected.source)
    assert mine.config.params == theirs.config.params
    assert mine.config.metadata is None


def test_new_points_get_the_bias_that_they_would_have_got(of_each_distance):
    corrected = of_each_distance
    client, name = corrected.client, corrected.name
    fresh = vectors(np.random.default_rng(8), 6, corrected.DIM)
    struct = [
        models.PointStruct(id=900 + i, vector=fresh[i].tolist(), payload={"n": i}) for i in range(2)
    ]
    client.upsert(name, struct)
    client.upsert(
        name, models.Batch(ids=[902, 903], vectors=fresh[2:4].tolist(), payloads=[{}, {}])
    )
    client.upload_collection(name, vectors=fresh[4:5], ids=[904])
    client.upload_points(
        name, [models.PointStruct(id=905, vector=fresh[5].tolist(), payload={"n": 5})]
    )
    corrected.items = np.vstack([corrected.items, fresh])
    found = corrected.scores()
    got = [found[i] for i in range(corrected.ITEMS)] + [found[900 + i] for i in range(6)]
    np.testing.assert_allclose(got, corrected.wanted(), atol=3e-5)
    assert client.retrieve(name, [901])[0].payload == {"n": 1}
    assert client.count(name).count == corrected.ITEMS + 6


def test_points_are_changed_one_way_or_another(corrected):
    plain, client, name = corrected.backend.client, corrected.client, corrected.name
    fresh = vectors(np.random.default_rng(8), 2, corrected.DIM).tolist()

    def change(client, name):
        client.update_vectors(name, [models.PointVectors(id=key(1), vector=fresh[0])])
        client.set_payload(name, {"more": [1]}, [key(2)])
        client.set_payload(name, {"deeper": 2}, FILTER, key="deep")
        client.delete_payload(name, ["n"], [key(3)])
        client.overwrite_payload(name, {"only": True}, [key(4)])
        client.clear_payload(name, models.PointIdsList(points=[key(5)]))
        client.delete(name, [key(6)])
        client.delete(
            name,
            models.FilterSelector(
                filter=models.Filter(must=[models.HasIdCondition(has_id=[key(7)])])
            ),
        )
        client.batch_update_points(
            name,
            [
                models.UpsertOperation(
                    upsert=models.PointsList(points=[models.PointStruct(id=700, vector=fresh[1])])
                ),
                models.SetPayloadOperation(
                    set_payload=models.SetPayload(payload={"b": 1}, points=[700])
                ),
                models.UpdateVectorsOperation(
                    update_vectors=models.UpdateVectors(
                        points=[models.PointVectors(id=key(8), vector=fresh[1])]
                    )
                ),
                models.DeleteOperation(delete=models.PointIdsList(points=[key(9)])),
                models.DeletePayloadOperation(
                    delete_payload=models.DeletePayload(keys=["group"], points=[key(10)])
                ),
            ],
        )
        client.upsert(
            name,
            [models.PointStruct(id=key(11), vector=fresh[0], payload={"no": 1})],
            update_mode=models.UpdateMode.INSERT_ONLY,
        )

    change(client, name)
    change(plain, corrected.source)
    mine, _ = client.scroll(name, limit=1_000, with_vectors=True)
    theirs, _ = plain.scroll(corrected.source, limit=1_000, with_vectors=True)
    assert_alike(mine, theirs)
    query = corrected.query.tolist()
    raw = {p.id: p.score for p in client.query_points(name, query, limit=500, strength=0).points}
    found = {p.id: p.score for p in client.query_points(name, query, limit=500).points}
    for changed, vector in ((key(1), fresh[0]), (key(8), fresh[1]), (700, fresh[1])):
        bias = (
            nnn(corrected.bank, np.array([vector]), "COSINE", 8, 0.75)[0]
            - corrected.state.profile.mean_bias
        )
        assert raw[changed] - found[changed] == pytest.approx(bias, abs=1e-5)


def test_ordinary_collections_are_passed_through(backend):
    items = vectors(np.random.default_rng(0), 50, 8)
    name, client = backend.fill(items, "Manhattan"), backend.hubness()
    mine = client.query_points(name, items[3], limit=5, with_vectors=True).points
    assert_alike(
        mine, backend.client.query_points(name, items[3], limit=5, with_vectors=True).points
    )
    client.upsert(name, [models.PointStruct(id=1, vector=items[0].tolist(), payload={"a": 1})])
    client.upload_collection(name, vectors=items[:2], ids=[500, 501])
    assert backend.client.count(name).count == 52
    assert client.get_collection(name) == backend.client.get_collection(name)
    assert len(client.search_matrix_pairs(name, limit=2, sample=9).pairs) > 0
    with pytest.raises(Exception, match="nowhere"):
        client.query_points("nowhere", [1.0])


def test_an_upload_has_the_options_of_qdrants(backend, monkeypatch):
    items = vectors(np.random.default_rng(0), 9, 8)
    source, target = backend.fill(items), backend.fill(items[:2])
    client = backend.hubness(state_ttl=60.0)
    records, _ = backend.client.scroll(source, with_vectors=True)
    requests, failures = [], []
    upsert = QdrantClient.upsert

    def counting(self, name, points, **options):
        requests.append((len(points), options))
        if failures:
            raise failures.pop()
        return upsert(self, name, points, **options)

    monkeypatch.setattr(QdrantClient, "upsert", counting)
    monkeypatch.setattr("qdrant_hubness.client.sync.time.sleep", lambda _: None)
    options = {"parallel": 2, "method": "spawn", "max_retries": 1}
    client.upload_points(target, iter(records), batch_size=4, **options)
    assert requests == [(4, {"wait": False}), (4, {"wait": False}), (1, {"wait": False})]

    # A batch is sent again once, and as often as a rate of strict mode demands.
    requests.clear()
    failures += [ResourceExhaustedResponse("too many", 1), ValueError("lost")]
    failures += [ResourceExhaustedResponse("too many", 1)]
    client.upload_points(target, records, wait=True, **options)
    assert requests == [(9, {"wait": True})] * 4
    assert_alike(backend.client.scroll(target, with_vectors=True)[0], records)

    requests.clear()
    failures += [ValueError("lost"), ValueError("lost")]
    with pytest.raises(ValueError, match="lost"):
        client.upload_points(target, records, **options)
    assert len(requests) == 2

    client.upload_points(target, [])
    assert len(requests) == 2


def test_an_upload_leaves_no_vector_out_without_a_word(backend):
    items = vectors(np.random.default_rng(0), 4, 8)
    name, plain, client = backend.fill(items[:1]), backend.client, backend.hubness()
    for further in ({"ids": [7]}, {"payload": [{"a": 1}]}, {"payload": []}, {"ids": iter([7, 8])}):
        further = {**further, "wait": True}
        for uploading in (plain, client):
            with pytest.raises(ValueError, match="iterable is shorter than vectors iterable"):
                uploading.upload_collection(name, items, **further)
    for batch_size in (0, -1):
        with pytest.raises(InvalidInput, match="batch_size must be at least 1"):
            client.upload_collection(name, items, batch_size=batch_size)
    assert plain.count(name).count == 1

    payloads = np.array([{"n": i} for i in range(4)], dtype=object)
    client.upload_collection(name, items, payload=payloads, ids=[7, 8, 9, 10, 11], wait=True)
    assert [point.payload for point in plain.retrieve(name, [7, 8, 9, 10])] == list(payloads)


def test_a_client_is_made_as_qdrants_own_is(tmp_path):
    with_data = HubnessQdrantClient(path=str(tmp_path))
    with_data.create_collection("c", vectors_config=models.VectorParams(size=2, distance="Dot"))
    assert isinstance(with_data, QdrantClient)
    with_data.close()
    again = QdrantClient(path=str(tmp_path))
    shared = HubnessQdrantClient(client=again)
    shared.close()
    assert again.collection_exists("c"), "whose it is closes it"
    again.close()


def test_bad_points_are_refused_whole(corrected):
    client, name = corrected.client, corrected.name
    valid = models.PointStruct(id=901, vector=corrected.items[0].tolist())
    for vector, error in (
        ([1.0] * (corrected.DIM + 1), DimensionMismatch),
        ([float("nan")] * corrected.DIM, NonFiniteVectors),
        ([0.0] * corrected.DIM, ZeroVectors),
        ([[1.0] * corrected.DIM], UnsupportedOperation),
    ):
        bad = models.PointStruct.model_construct(id=902, vector=vector, payload=None)
        with pytest.raises(error):
            client.upsert(name, [valid, bad])
        assert client.retrieve(name, [901, 902]) == [], "nothing half-written"


def test_questions_that_have_no_answer(of_each_distance):
    corrected = of_each_distance
    client, name, query = corrected.client, corrected.name, corrected.query.tolist()
    for bad, error in (
        ({"query": query[:-1]}, DimensionMismatch),
        ({"query": [float("nan")] * corrected.DIM}, NonFiniteVectors),
        ({"query": query, "strength": float("inf")}, InvalidInput),
        ({"query": query, "profile": "another"}, InvalidInput),
        ({"query": models.Document(text="a", model="m")}, UnsupportedOperation),
        (
            {"query": models.RecommendQuery(recommend=models.RecommendInput(negative=[key(1)]))},
            InvalidInput,
        ),
    ):
        with pytest.raises(error):
            client.query_points(name, **bad)
    with pytest.raises(UnsupportedOperation):
        client.search_matrix_pairs(name, limit=2, sample=9)
    if corrected.metric == "L2":
        inner = [models.Prefetch(query=query, limit=9)]
        recommend = models.RecommendInput(positive=[key(1)], strategy="best_score")
        mmr = models.NearestQuery(nearest=query, mmr=models.Mmr())
        for asked in (
            {"query": models.FusionQuery(fusion=models.Fusion.DBSF), "prefetch": inner},
            {"query": models.FormulaQuery(formula="$score"), "prefetch": inner},
            {"query": models.RecommendQuery(recommend=recommend)},
            {"query": mmr},
        ):
            with pytest.raises(UnsupportedOperation):
                client.query_points(name, **asked)


def test_a_client_learns_that_its_alias_leads_elsewhere(corrected):
    """It remembers for an hour, and the alias is moved by hand: it asks the collection of which it has heard, by that
    collection's name, until what it has heard ends.
    """
    store, name = corrected.store, corrected.name
    store.point_alias("live", corrected.source)
    query, new = (
        corrected.query.tolist(),
        [models.PointStruct(id=901, vector=corrected.items[3].tolist())],
    )
    for ask in (
        lambda client: client.query_points("live", query, limit=5).points,
        lambda client: client.retrieve("live", [key(3)], with_vectors=True),
        lambda client: client.scroll("live", limit=3, with_vectors=True)[0],
        lambda client: client.upsert("live", new),
    ):
        stale = corrected.backend.hubness(state_ttl=3_600)
        stale.query_points("live", query, limit=1)
        before = ask(corrected.backend.hubness())
        for leads_to in (name, corrected.source):
            store.point_alias("live", leads_to)
            found = ask(stale)
            if isinstance(found, list):
                assert_alike(found, before)
            stale._operations.forget("live")
            before = ask(corrected.backend.hubness())
            found = ask(stale)
            if isinstance(found, list):
                assert_alike(found, before)
    assert corrected.scores()[901] == pytest.approx(corrected.scores()[3], abs=1e-6)
