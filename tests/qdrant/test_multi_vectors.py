"""Collections with several vectors a point, scored by MaxSim: corrected exactly, written and refreshed as others."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from qdrant_client import models

from milvus_hubness import (
    NNN,
    Beside,
    Copy,
    Correction,
    MultiVectors,
    QueryBank,
    Recipe,
    check,
    migrate,
    plan_correction,
    refresh,
    status,
)
from milvus_hubness.correction.codec.multi_vectors import MultiVectorLayout
from milvus_hubness.correction.codec.parts import BiasSlots
from milvus_hubness.correction.codec.quantisation import with_bias_scale
from milvus_hubness.errors import (
    CannotMigrate,
    CorrectionNotRecommended,
    DimensionMismatch,
    InvalidInput,
    NonFiniteVectors,
    UnsupportedOperation,
)
from qdrant_hubness import QdrantStore
from tests.qdrant.worlds import key
from tests.support.aliases import aliased
from tests.support.recipes import as_plan

DIM, POINTS, K, ALPHA = 20, 90, 6, 0.75
FIELD = "tokens"


def texts(count, longest, seed):
    """Rows of unlike lengths, the first of one token."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, longest + 1, count)
    lengths[0] = 1
    hub = rng.standard_normal(DIM)
    return [
        (rng.standard_normal((length, DIM)) + rng.uniform(0, 0.6) * hub).astype(np.float32)
        for length in lengths
    ]


def max_sim(queries, documents, distance):
    """(m, n) means over the tokens of a query of the largest products, in float64."""

    def of(row):
        wide = np.asarray(row, np.float64)
        return wide / np.linalg.norm(wide, axis=1, keepdims=True) if distance == "Cosine" else wide

    return np.array(
        [[(of(q) @ of(d).T).max(axis=1).mean() for d in documents] for q in queries], np.float64
    )


def nnn_of(bank, documents, distance):
    scores = max_sim(bank, documents, distance)
    return ALPHA * -np.sort(-scores, axis=0)[:K].mean(axis=0)


class Corrected:
    """A corrected collection of documents beside a stranger's vectors, and what its scores must be."""

    def __init__(self, backend, distance="Cosine", **params):
        self.backend, self.distance = backend, distance
        self.documents, self.bank, self.queries = (
            texts(POINTS, 9, 1),
            texts(40, 6, 2),
            texts(5, 7, 3),
        )
        if "datatype" in params:
            # The local mode stores halves as they come.
            rows = self.documents
            self.documents = [row.astype(np.float16).astype(np.float32) for row in rows]
        self.source = self.filled(**params)
        self.store = backend.store()
        plan = plan_correction(
            self.store,
            self.source,
            Recipe(self.of_bank(self.bank), estimator=NNN(K, ALPHA)),
            field=FIELD,
        )
        self.plan = plan
        self.name = aliased(self.store, migrate(self.store, plan).target)
        self.client = backend.hubness()

    @staticmethod
    def of_bank(rows):
        return QueryBank.of(MultiVectors.from_list(rows))

    def filled(self, **params):
        name = self.backend.name()
        self.backend.client.create_collection(
            name,
            vectors_config={
                FIELD: models.VectorParams(
                    size=DIM,
                    distance=self.distance,
                    multivector_config=models.MultiVectorConfig(comparator="max_sim"),
                    **params,
                ),
                "theirs": models.VectorParams(size=3, distance="Dot"),
                "their pages": models.VectorParams(
                    size=2,
                    distance="Dot",
                    multivector_config=models.MultiVectorConfig(comparator="max_sim"),
                ),
            },
        )
        points = [
            models.PointStruct(
                id=key(i),
                vector={FIELD: row.tolist(), "theirs": [i, 1, 2], "their pages": [[i, 1]] * 3},
                payload={"n": i, "hubness": "theirs"},
            )
            for i, row in enumerate(self.documents)
        ]
        # A point may lack the vector.
        points.append(
            models.PointStruct(id=key(POINTS), vector={"theirs": [0, 0, 1]}, payload={"n": -1})
        )
        self.backend.client.upsert(name, points, wait=True)
        return name

    @property
    def state(self):
        return self.store.info(self.name).states[FIELD]

    def wanted(self, bank=None, strength=1.0, queries=None):
        """(m, n) by the definition: sums over the tokens of a query, less as many biases."""
        queries = self.queries if queries is None else queries
        biases = nnn_of(self.bank if bank is None else bank, self.documents, self.distance)
        lengths = np.array([len(query) for query in queries])[:, None]
        scores = max_sim(queries, self.documents, self.distance)
        return lengths * (scores - strength * (biases - self.state.profile.mean_bias))

    def scores(self, **options):
        numbers = {key(i): i for i in range(len(self.documents))}
        found = np.full((len(self.queries), len(self.documents)), np.nan)
        for row, query in enumerate(self.queries):
            points = self.client.query_points(
                self.name, query.tolist(), using=FIELD, limit=2 * POINTS, **options
            ).points
            for point in points:
                found[row, numbers[point.id]] = point.score
        return found

    def assert_scores(self, bank=None):
        for strength in (1.0, 0.0, 0.5):
            found = self.scores(strength=strength)
            np.testing.assert_allclose(found, self.wanted(bank, strength), atol=1e-4)


@pytest.fixture(params=["Cosine", "Dot"])
def corrected(request, backend):
    return Corrected(backend, request.param)


def test_sums_over_a_query_s_tokens_are_those_of_corrected_scores(corrected):
    corrected.assert_scores()
    changed = (
        np.argsort(-corrected.wanted(), 1)[:, 0]
        != np.argsort(-corrected.wanted(strength=0.0), 1)[:, 0]
    )
    assert changed.any(), "the correction matters here"


def test_the_plan_says_what_many_vectors_take(corrected):
    facts = corrected.plan.to_dict()
    tokens = sum(map(len, corrected.documents)) + 1
    # From a sample of the points.
    assert facts["vectors_per_row"] == pytest.approx(tokens / (POINTS + 1), rel=0.1)
    assert facts["vector_bytes"]["source"] == pytest.approx(4 * DIM * tokens, rel=0.1)
    assert facts["hidden_fields"] == []


def test_points_are_read_back_as_they_were(corrected):
    def shown(client, name):
        records = client.retrieve(
            name, [key(i) for i in range(POINTS + 1)], with_vectors=True, with_payload=True
        )
        return {record.id: record for record in records}

    source = shown(corrected.backend.client, corrected.source)
    copy = shown(corrected.client, corrected.name)
    assert source.keys() == copy.keys()
    for id, record in source.items():
        assert copy[id].payload == record.payload
        theirs, ours = dict(record.vector), dict(copy[id].vector)
        np.testing.assert_allclose(ours.pop(FIELD, np.nan), theirs.pop(FIELD, np.nan), atol=1e-6)
        assert ours == theirs
    described = corrected.client.get_collection(corrected.name).config.params.vectors[FIELD]
    assert (described.size, described.distance.value) == (DIM, corrected.distance)
    assert described.multivector_config is not None


def test_queries_of_every_form_are_corrected(corrected):
    client, name, wanted = corrected.client, corrected.name, corrected.wanted()
    best = [key(i) for i in np.argsort(-wanted[1])[:5].tolist()]

    # Together in a batch, as a prefetch of a fusion, and beside a stranger's vector.
    request = models.QueryRequest(query=corrected.queries[1].tolist(), using=FIELD, limit=5)
    for answer in client.query_batch_points(name, [request, request]):
        assert [point.id for point in answer.points] == best
    prefetch = [
        models.Prefetch(query=corrected.queries[1].tolist(), using=FIELD, limit=5),
        models.Prefetch(query=[0.0, 1.0, 0.0], using="theirs", limit=1),
    ]
    merged = client.query_points(name, models.FusionQuery(fusion="rrf"), prefetch=prefetch).points
    assert best[0] in [point.id for point in merged[:2]]

    # One vector is a row of one, as Qdrant has it.
    one = corrected.queries[0]
    assert len(one) == 1
    as_vector = client.query_points(name, one[0].tolist(), using=FIELD, limit=5).points
    assert [point.id for point in as_vector] == [
        key(i) for i in np.argsort(-wanted[0])[:5].tolist()
    ]

    # A point that is named by its id, as its user's vectors; it is left out.
    i = 7
    found = client.query_points(name, key(i), using=FIELD, limit=5).points
    scores = corrected.wanted(queries=[corrected.documents[i]])[0]
    assert [point.id for point in found] == [
        key(j) for j in np.argsort(-scores).tolist() if j != i
    ][:5]

    recommended = models.RecommendQuery(
        recommend=models.RecommendInput(positive=[key(i)], strategy="best_score")
    )
    found = client.query_points(name, recommended, using=FIELD, limit=5).points
    assert [point.id for point in found] == [
        key(j) for j in np.argsort(-scores).tolist() if j != i
    ][:5]


def test_queries_that_several_vectors_cannot_answer_are_refused(corrected):
    client, name = corrected.client, corrected.name
    average = models.RecommendQuery(recommend=models.RecommendInput(positive=[key(1), key(2)]))
    with pytest.raises(UnsupportedOperation, match="best_score or sum_scores"):
        client.query_points(name, average, using=FIELD)
    diverse = models.NearestQuery(nearest=corrected.queries[1].tolist(), mmr=models.Mmr())
    with pytest.raises(UnsupportedOperation, match="mmr"):
        client.query_points(name, diverse, using=FIELD)
    with pytest.raises(DimensionMismatch):
        client.query_points(name, [[1.0] * (DIM + 1)], using=FIELD)
    with pytest.raises(NonFiniteVectors):
        client.query_points(name, [[np.nan] * DIM], using=FIELD)
    with pytest.raises(InvalidInput):
        client.query_points(name, [[1.0] * DIM, []], using=FIELD)
    sparse = models.SparseVector(indices=[1], values=[1.0])
    with pytest.raises(UnsupportedOperation, match="SparseVector"):
        client.query_points(name, sparse, using=FIELD)


def test_new_points_get_their_biases_and_others_are_refused(corrected):
    client, name = corrected.client, corrected.name
    longer, one, moved = texts(3, 30, 9)
    corrected.documents[3] = moved
    corrected.documents += [longer, one[:1]]
    client.update_vectors(name, [models.PointVectors(id=key(3), vector={FIELD: moved.tolist()})])
    client.upsert(
        name,
        [
            models.PointStruct(id=key(POINTS), vector={FIELD: longer.tolist()}, payload={"n": 0}),
            # One vector is a row of one.
            models.PointStruct(id=key(POINTS + 1), vector={FIELD: one[0].tolist()}),
        ],
    )
    corrected.assert_scores()
    client.delete(name, [key(POINTS)])
    assert np.isnan(corrected.scores()[:, POINTS]).all()

    for vector, error in (
        ([], InvalidInput),
        ([[1.0] * DIM, [1.0] * (DIM - 1)], DimensionMismatch),
        ([[1.0] * DIM, [np.nan] * DIM], NonFiniteVectors),
    ):
        with pytest.raises(error):
            client.upsert(name, [models.PointStruct(id=key(1), vector={FIELD: vector})])
    before = client.retrieve(name, [key(1)], with_vectors=[FIELD])[0].vector[FIELD]
    assert len(before) == len(corrected.documents[1]), "nothing of a refused point is written"


def test_a_refresh_writes_the_biases_of_another_bank_into_each_vector(corrected):
    other = texts(50, 8, 21)
    done = refresh(corrected.store, corrected.name, corrected.of_bank(other))
    # The point without the vector has no bias to write.
    assert (done.action, done.scanned) == ("full", POINTS + 1)
    corrected.assert_scores(bank=other)
    assert refresh(corrected.store, corrected.name).action == "none"
    assert status(corrected.store, corrected.name).pending == 0


def test_a_log_that_repeats_weighs_as_its_queries_do(corrected):
    """The near copies of a popular query count once, also where they differ in one of its tokens."""
    rng = np.random.default_rng(4)
    popular = corrected.bank[3]
    copies = [popular + 1e-4 * rng.standard_normal(popular.shape) for _ in range(60)]
    log = [*corrected.bank, *(copy.astype(np.float32) for copy in copies)]
    done = refresh(corrected.store, corrected.name, Recipe(corrected.of_bank(log), verdict="skip"))
    assert done.action == "full"
    np.testing.assert_allclose(
        corrected.scores(), corrected.wanted(), atol=2e-3 * max(map(len, corrected.queries))
    )


def test_what_a_client_writes_while_a_refresh_copies_stays(corrected):
    new, other = texts(3, 12, 11), texts(50, 8, 21)
    client, name = corrected.client, corrected.name
    done = []

    class Late(QdrantStore):
        def upsert(self, collection, batch, field, *, partition=None):
            if not done and partition == "numbers":
                done.append(batch.keys)
                updated = models.PointStruct(id=key(1), vector={FIELD: new[1].tolist()})
                client.upsert(name, [updated])
                vectors = models.PointVectors(id=key(3), vector={FIELD: new[2].tolist()})
                client.update_vectors(name, [vectors])
                client.delete(name, [key(5)])
            super().upsert(collection, batch, field, partition=partition)

    refresh(corrected.backend.store(Late), name, Recipe(corrected.of_bank(other), verdict="skip"))
    assert {key(1), key(3), key(5)} <= set(done[0])
    corrected.documents[1], corrected.documents[3] = new[1], new[2]
    found, wanted = corrected.scores(), corrected.wanted(bank=other)
    assert np.isnan(found[:, 5]).all(), "it stays deleted"
    left = [i for i in range(POINTS) if i != 5]
    np.testing.assert_allclose(found[:, left], wanted[:, left], atol=1e-4)


def test_rows_without_a_bias_get_theirs(corrected):
    numbers = [1, 5]
    batch = corrected.store.get(corrected.name, numbers, FIELD, partition="numbers")
    layout = corrected.state.layout
    tokens = batch.vectors.tokens
    tokens[:, layout.slot_columns] = 0
    for row in batch.rows:
        row.update({corrected.state.codec.epoch_field: 0})
    corrected.store.upsert(corrected.name, batch, FIELD)
    assert status(corrected.store, corrected.name).pending == 2
    done = refresh(corrected.store, corrected.name, force=True)
    assert (done.action, done.pending, done.written) == ("full", 2, POINTS + 1)
    corrected.assert_scores()


def test_clients_write_to_the_copy_while_it_is_made(backend):
    """Beside a migration: a changed row, a new one and a deleted one are right in the copy."""
    source = Corrected.__new__(Corrected)
    source.backend, source.distance = backend, "Cosine"
    source.documents, source.bank, source.queries = (
        texts(POINTS, 9, 1),
        texts(40, 6, 2),
        texts(5, 7, 3),
    )
    source.source = source.filled()
    source.store, source.client = backend.store(), backend.hubness()
    new = texts(3, 12, 11)
    written = itertools.count()

    def write():
        if next(written):
            return
        point = models.PointStruct(id=key(1), vector={FIELD: new[1].tolist()})
        source.client.upsert(source.source, [point])
        source.client.delete(source.source, [key(5)])

    class Late(QdrantStore):
        def insert(self, collection, batch, field, *, partition=None):
            if collection.endswith("_hubness"):
                write()
            return super().insert(collection, batch, field, partition=partition)

        def upsert(self, collection, batch, field, *, partition=None):
            if collection.endswith("_hubness"):
                write()
            return super().upsert(collection, batch, field, partition=partition)

    store = backend.store(Late)
    plan = plan_correction(
        store,
        source.source,
        Recipe(Corrected.of_bank(source.bank), estimator=NNN(K, ALPHA)),
        field=FIELD,
    )
    source.name = migrate(store, plan).target
    assert next(written) > 1
    source.documents[1] = new[1]
    left = [i for i in range(POINTS) if i != 5]
    found, wanted = source.scores(), source.wanted()
    assert np.isnan(found[:, 5]).all()
    np.testing.assert_allclose(found[:, left], wanted[:, left], atol=1e-4)


def test_what_cannot_be_corrected_is_refused_in_one_line(backend):
    bank = Corrected.of_bank(texts(40, 6, 2))
    name = backend.name()
    max_sim = models.MultiVectorConfig(comparator="max_sim")
    euclid = models.VectorParams(size=DIM, distance="Euclid", multivector_config=max_sim)
    backend.client.create_collection(name, vectors_config=euclid)
    rows = texts(60, 5, 1)
    backend.client.upsert(
        name, [models.PointStruct(id=i, vector=row.tolist()) for i, row in enumerate(rows)]
    )
    with pytest.raises(CannotMigrate, match="multivector with the distance Euclid"):
        plan_correction(backend.store(), name, Recipe(bank, verdict="skip"))

    # A bank of one vector a query is none for several a row, and the other way round.
    single = np.random.default_rng(0).standard_normal((40, DIM)).astype(np.float32)
    several = Corrected(backend)
    with pytest.raises(InvalidInput, match="several vectors a row"):
        plan_correction(several.store, several.source, single, Copy(target="t2"), field=FIELD)
    plain = backend.fill(single, "Cosine")
    with pytest.raises(InvalidInput, match="has one vector a row"):
        plan_correction(backend.store(), plain, bank)


def test_jobs_that_several_vectors_cannot_have_are_refused_in_one_line(backend):
    corrected = Corrected(backend)
    bank = Corrected.of_bank(corrected.bank)
    store, source = corrected.store, corrected.source
    options = {"field": FIELD, "target": backend.name("t"), "verdict": "skip"}
    with pytest.raises(CannotMigrate, match="the offset of its kind"):
        plan_correction(store, source, **as_plan(bank, kind="n", **options))
    with pytest.raises(InvalidInput, match="leave the measurement out"):
        plan_correction(store, source, **as_plan(bank, measure=True, **options))
    with pytest.raises(CannotMigrate, match="migrate the collection"):
        plan_correction(store, source, Recipe(bank, verdict="skip"), Beside(), field=FIELD)


@pytest.mark.parametrize("distance", ["Cosine", "Dot"])
def test_halves_are_corrected_as_halves(backend, distance):
    corrected = Corrected(backend, distance, datatype="float16")
    exact = corrected.wanted()
    np.testing.assert_allclose(corrected.scores(), exact, atol=0.02 * np.abs(exact).max())
    found, wanted = (np.argsort(-scores, 1)[:, :5] for scores in (corrected.scores(), exact))
    shared = [len({*few} & {*right}) for few, right in zip(found, wanted, strict=True)]
    assert np.mean(shared) > 4.5
    other = texts(50, 8, 21)
    refresh(corrected.store, corrected.name, Recipe(Corrected.of_bank(other), verdict="skip"))
    exact = corrected.wanted(bank=other)
    np.testing.assert_allclose(corrected.scores(), exact, atol=0.02 * np.abs(exact).max())


def test_a_refresh_that_finds_a_quantiser_makes_a_copy_whose_biases_it_keeps(backend, monkeypatch):
    configs = []
    config_of = "qdrant_hubness.store.schema.quantization"
    monkeypatch.setattr(config_of, lambda source, field: configs[-1] if configs else None)
    corrected = Corrected(backend)
    store = corrected.store
    assert (corrected.state.layout.slots.spread, corrected.state.layout.slots.scale) == (1, 1.0)
    store.point_alias("live", store.info(corrected.name).name)

    int8 = models.ScalarQuantizationConfig(type=models.ScalarType.INT8)
    configs.append(models.ScalarQuantization(scalar=int8))
    assert status(store, "live").needs_other_columns
    done = refresh(store, "live")
    assert done.action == "full"
    corrected.name = done.collection
    layout = corrected.state.layout
    deviation = nnn_of(corrected.bank, corrected.documents, "Cosine").std()
    assert layout.slots.spread == 2
    # The power of two that is nearest.
    assert abs(np.log2(layout.slots.scale * np.sqrt(2 * deviation))) <= 0.51
    corrected.assert_scores()
    assert refresh(store, "live").action == "none"


def test_the_rust_engine_serves_corrected_sums_and_keeps_them_in_int8(quick_folder):
    edge = pytest.importorskip("qdrant_edge", reason="the package qdrant-edge-py is not installed")
    rng = np.random.default_rng(0)
    dim, count = 64, 300
    topics = rng.standard_normal((20, dim))

    def rows(number, longest):
        of_rows = []
        for _ in range(number):
            length = int(rng.integers(1, longest))
            tokens = topics[rng.integers(20, size=length)] + rng.standard_normal((length, dim))
            of_rows.append(tokens)
        return MultiVectors.from_list(of_rows).normalised()

    documents, bank, queries = rows(count, 12), rows(100, 8), rows(40, 8)
    found = {}
    for spread in (1, 2):
        layout = MultiVectorLayout(dim, "COSINE", BiasSlots(spread=spread))
        biases = Correction.fit(layout, NNN(K, ALPHA), bank).centred(documents)
        biases -= biases.mean()
        layout = with_bias_scale(layout, documents, biases)
        stored, sent = layout.augment(documents, biases), layout.encode_queries(queries)
        wanted = queries.lengths[:, None] * (max_sim(queries, documents, "Cosine") - biases)
        for int8 in (False, True):
            folder = quick_folder / f"{spread}{int8}"
            folder.mkdir()
            scores = _scores_of_engine(edge, folder, stored, sent, int8=int8)
            if not int8:
                np.testing.assert_allclose(scores, wanted, atol=1e-4)
            best = np.argsort(-wanted, 1)[:, :10]
            top = np.argsort(-scores, 1)[:, :10]
            shares = [np.isin(right, few).mean() for right, few in zip(best, top, strict=True)]
            found[spread, int8] = np.mean(shares)
    assert found[2, True] > 0.93
    assert found[2, True] > found[1, True] + 0.05


def _scores_of_engine(edge, folder, stored, sent, *, int8):
    """(m, n) of all documents."""
    options = {}
    if int8:
        options["quantization_config"] = edge.ScalarQuantizationConfig(
            type=edge.ScalarType.Int8, quantile=0.99
        )
    vectors = edge.EdgeVectorParams(
        size=stored.dim,
        distance=edge.Distance.Dot,
        multivector_config=edge.MultiVectorConfig(edge.MultiVectorComparator.MaxSim),
    )
    optimizers = edge.EdgeOptimizersConfig(indexing_threshold=1, default_segment_number=1)
    config = edge.EdgeConfig(
        vectors=vectors,
        hnsw_config=edge.HnswIndexConfig(m=16, ef_construct=64, full_scan_threshold=10**9),
        optimizers=optimizers,
        **options,
    )
    shard = edge.EdgeShard.create(str(folder), config)
    try:
        points = [edge.Point(i, tokens.tolist(), {}) for i, tokens in enumerate(stored)]
        shard.update(edge.UpdateOperation.upsert_points(points))
        shard.optimize()
        as_stored = edge.QuantizationSearchParams(rescore=False, ignore=not int8)
        scores = np.full((len(sent), len(stored)), -np.inf)
        for row, tokens in enumerate(sent):
            request = edge.QueryRequest(
                query=edge.Query.Nearest(tokens.tolist()),
                limit=len(stored),
                params=edge.SearchParams(quantization=as_stored),
            )
            for point in shard.query(request):
                scores[row, point.id] = point.score
        return scores
    finally:
        shard.close()


def test_the_verdict_is_asked_for_many_vectors_too(backend):
    """Queries of pure chance know nothing of the gallery: the plan says no before a write."""
    corrected = Corrected(backend)
    rng = np.random.default_rng(5)
    chance = [rng.standard_normal((3, DIM)).astype(np.float32) for _ in range(300)]
    plan = plan_correction(
        corrected.store,
        corrected.source,
        Recipe(Corrected.of_bank(chance), verdict="require"),
        Copy(target=backend.name("t")),
        field=FIELD,
    )
    assert plan.chosen.verdict.verdict == "leave it alone"
    with pytest.raises(CorrectionNotRecommended):
        migrate(corrected.store, plan)
    assert not backend.client.collection_exists(plan.body.target)


def test_a_check_judges_many_vectors_and_shows_no_page_of_them(backend):
    corrected = Corrected(backend)
    rng = np.random.default_rng(5)
    chance = [rng.standard_normal((3, DIM)).astype(np.float32) for _ in range(300)]
    result = check(corrected.store, corrected.source, Corrected.of_bank(chance), field=FIELD)
    assert result.verdict == "leave it alone"
    with pytest.raises(InvalidInput, match="rows have several vectors each: check without a page"):
        result.diagnosed()
