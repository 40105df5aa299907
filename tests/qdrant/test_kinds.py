"""Kinds of points: queries of every form, writes of every form, what cannot have them, the command.

Of jobs and of the stored numbers: tests/congruence/test_kinds_everywhere.
"""

import asyncio
import json

import numpy as np
import pytest
from qdrant_client import AsyncQdrantClient, QdrantClient, models

from milvus_hubness import (
    NNN,
    CannotMigrate,
    InvalidInput,
    InvalidParameter,
    QueryBank,
    Recipe,
    migrate,
    plan_correction,
    refresh,
    status,
)
from qdrant_hubness import AsyncHubnessQdrantClient
from qdrant_hubness.store import schema
from tests.qdrant.worlds import METRICS, key
from tests.support.aliases import aliased
from tests.support.galleries import vectors
from tests.support.recipes import as_plan, as_recipe

DIM, ITEMS, LIMIT, K, ALPHA = 10, 180, 15, 8, 0.75
KINDS = ("image", "text")
FILTER = models.Filter(must=[models.FieldCondition(key="group", match=models.MatchValue(value=2))])
INT8 = models.ScalarQuantization(scalar=models.ScalarQuantizationConfig(type="int8"))
CLOSE = {"abs": 3e-5}


def payload_of(number, kind):
    payload = {"n": number, "group": number % 3, "rank": (number % 20) / 20}
    return payload if kind < 0 else {**payload, "kind": KINDS[kind]}


class Mixture:
    """A corrected collection of images and texts, and a plain one whose inner products are its scores."""

    def __init__(self, backend, distance="Dot"):
        rng = np.random.default_rng(8)
        self.backend, self.metric = backend, METRICS[distance]
        self.kinds = (rng.random(ITEMS) < 0.5).astype(int)
        self.items = vectors(rng, ITEMS, DIM) + np.outer(self.kinds, np.eye(DIM)[0]) * 1.5
        self.items = self.items.astype(np.float32)
        self.kinds[::20] = -1
        self.bank = vectors(rng, 60, DIM) + np.float32(0.8) * np.eye(DIM, dtype=np.float32)[0]
        self.source = backend.fill(
            self.items, distance, payload=lambda i: payload_of(i, self.kinds[i])
        )
        self.store, self.client = backend.store(), backend.hubness()
        plan = plan_correction(
            self.store,
            self.source,
            Recipe(QueryBank(self.bank), estimator=NNN(K, ALPHA), kind="kind", verdict="skip"),
        )
        self.name = migrate(self.store, plan, no_writers=True).target
        self.oracle = self.filled_oracle()

    @property
    def state(self):
        return self.store.info(self.name).state

    @property
    def means(self):
        return self.state.kinds_of(self.state.profile)

    def reduced(self, rows):
        rows = np.atleast_2d(rows).astype(float)
        if self.metric == "COSINE":
            rows /= np.linalg.norm(rows, axis=1, keepdims=True)
        return rows

    def stored(self):
        """<r − (μk − μ), 1, b> of each item, in float64."""
        means = self.means
        # −1 is the last row.
        offsets = np.vstack([means.of_kinds - means.overall, np.zeros(DIM)])[self.kinds]
        items = self.reduced(self.items) - offsets
        similarities = (self.reduced(self.bank) - means.mean_query) @ (items - means.overall).T
        bias = ALPHA * np.sort(similarities, axis=0)[-K:].mean(axis=0)
        bias -= self.state.profile.mean_bias
        return np.column_stack([items, np.ones(ITEMS), bias])

    def sent(self, query):
        """<q − μq, ⟨μq, μ⟩, −1>: its product with what is stored is the score."""
        means = self.means
        [reduced] = self.reduced(query)
        added = means.mean_query.astype(float) @ means.overall
        return [*(reduced - means.mean_query), added, -1.0]

    def filled_oracle(self):
        name = self.backend.name()
        params = models.VectorParams(size=DIM + 2, distance="Dot")
        self.backend.client.create_collection(name, vectors_config=params)
        points = [
            models.PointStruct(id=key(i), vector=row.tolist(), payload=payload_of(i, self.kinds[i]))
            for i, row in enumerate(self.stored())
        ]
        self.backend.client.upsert(name, points, wait=True)
        return name

    def scores(self, **options):
        [query] = self.bank[:1]
        points = self.client.query_points(self.name, query.tolist(), limit=ITEMS, **options).points
        found = {point.id: point.score for point in points}
        return np.array([found[key(i)] for i in range(ITEMS)])

    def assert_scores(self):
        np.testing.assert_allclose(
            self.scores(), self.stored() @ self.sent(self.bank[0]), atol=3e-5
        )


def assert_same(mine, theirs):
    assert [point.score for point in mine] == pytest.approx(
        [point.score for point in theirs], **CLOSE
    )
    # Equal scores, as of points in one context, have no order.
    scores = [point.score for point in theirs]
    if len(set(np.round(scores, 3))) == len(scores):
        assert [point.id for point in mine] == [point.id for point in theirs]


@pytest.fixture(params=["Dot", "Cosine"])
def mixture(request, backend):
    return Mixture(backend, request.param)


def queries_of(form):
    """Queries of every form, with the vectors in the form in which they are sent."""
    rng = np.random.default_rng(1)
    first, second, third, fourth = vectors(rng, 4, DIM)
    q, p, n, other = map(form, (first, second, third, fourth))
    examples = {"positive": [q, p], "negative": [n]}
    pair = models.ContextPair(positive=p, negative=n)

    def recommend(strategy):
        inputs = models.RecommendInput(**examples, strategy=strategy)
        return models.RecommendQuery(recommend=inputs)

    average = form(first + second - third)
    inner = [models.Prefetch(query=q, limit=40), models.Prefetch(query=p, limit=40)]
    score = models.MultExpression(mult=["$score[0]", "rank"])
    return {
        "vector": ({"query": q}, {"query": q}),
        "nearest": ({"query": models.NearestQuery(nearest=q)},) * 2,
        "filtered": ({"query": q, "query_filter": FILTER, "offset": 3},) * 2,
        "average": ({"query": recommend("average_vector")}, {"query": average}),
        "best": ({"query": recommend("best_score")},) * 2,
        "sum": ({"query": recommend("sum_scores")},) * 2,
        "discover": (
            {"query": models.DiscoverQuery(discover={"target": other, "context": [pair]})},
        )
        * 2,
        "context": ({"query": models.ContextQuery(context=[pair])},) * 2,
        "fused": ({"query": models.FusionQuery(fusion="dbsf"), "prefetch": inner},) * 2,
        "formula": ({"query": models.FormulaQuery(formula=score), "prefetch": inner[:1]},) * 2,
        "rescored": ({"query": p, "prefetch": inner[:1]},) * 2,
    }


FORMS = sorted(queries_of(np.ndarray.tolist))


@pytest.mark.parametrize("form", FORMS)
def test_queries_of_every_form_are_compared_by_kind(mixture, form):
    """The oracle is a plain collection: Qdrant computes with the same scores, whatever it does to them."""
    mine, _ = queries_of(np.ndarray.tolist)[form]
    _, theirs = queries_of(mixture.sent)[form]
    if form == "average" and mixture.metric == "COSINE":
        # Qdrant averages the user's vectors: they are not unit here.
        pytest.skip("shown for Dot")
    found = mixture.client.query_points(mixture.name, limit=LIMIT, **mine).points
    wanted = mixture.backend.client.query_points(mixture.oracle, limit=LIMIT, **theirs).points
    assert len(found) == LIMIT
    assert_same(found, wanted)


def test_groups_batches_thresholds_and_points_by_id(mixture):
    query, client, name = mixture.bank[3].tolist(), mixture.client, mixture.name
    plain, oracle, sent = mixture.backend.client, mixture.oracle, mixture.sent(mixture.bank[3])

    options = {"group_by": "group", "limit": 3, "group_size": 4}
    mine = client.query_points_groups(name, query=query, **options).groups
    theirs = plain.query_points_groups(oracle, query=sent, **options).groups
    for one, other in zip(mine, theirs, strict=True):
        assert one.id == other.id
        assert_same(one.hits, other.hits)

    wanted = plain.query_points(oracle, sent, limit=LIMIT).points
    # Between two neighbours, so that rounding moves no point across it.
    threshold = (wanted[7].score + wanted[8].score) / 2
    inner = models.Prefetch(query=query, limit=LIMIT, score_threshold=threshold)
    for asked in (
        {"query": query, "score_threshold": threshold},
        {"query": query, "prefetch": inner},
    ):
        assert_same(client.query_points(name, limit=LIMIT, **asked).points, wanted[:8])

    requests = [models.QueryRequest(query=row.tolist(), limit=LIMIT) for row in mixture.bank[:9]]
    requests.append(models.QueryRequest(query=key(7), limit=LIMIT))
    answers = client.query_batch_points(name, requests)
    shown = client.retrieve(name, [key(7)], with_vectors=True)[0].vector
    # Qdrant leaves out the point that a query names.
    wheres = [None] * 9
    wheres.append(models.Filter(must_not=[models.HasIdCondition(has_id=[key(7)])]))
    rows = [*mixture.bank[:9], np.array(shown)]
    for row, where, answer in zip(rows, wheres, answers, strict=True):
        theirs = plain.query_points(
            oracle, mixture.sent(row), limit=LIMIT, query_filter=where
        ).points
        assert_same(answer.points, theirs)


def test_kinds_and_strength_are_apart(mixture):
    [query] = mixture.reduced(mixture.bank[0])
    raw = mixture.reduced(mixture.items) @ query
    bias = mixture.stored()[:, -1]
    by_kind = mixture.stored() @ mixture.sent(mixture.bank[0])
    for options, wanted in [
        ({}, by_kind),
        ({"strength": 0}, by_kind + bias),
        ({"kinds": 0}, raw - bias),
        ({"strength": 0, "kinds": 0}, raw),
        ({"kinds": 0, "strength": 0.5}, raw - bias / 2),
    ]:
        np.testing.assert_allclose(mixture.scores(**options), wanted, atol=3e-5)

    # A client may leave kinds out of all of its queries.
    without = mixture.backend.hubness(strength=0, kinds=0)
    points = without.query_points(mixture.name, mixture.bank[0].tolist(), limit=LIMIT).points
    theirs = mixture.backend.client.query_points(
        mixture.source, mixture.bank[0].tolist(), limit=LIMIT
    ).points
    assert_same(points, theirs)
    best = mixture.scores()
    mixture.client = without
    np.testing.assert_allclose(mixture.scores(strength=1, kinds=1), best, atol=1e-6)


def test_a_factor_that_is_none_is_refused(backend):
    mixture = Mixture(backend)
    query = mixture.bank[0].tolist()
    for factor in (-1, float("nan"), "much", True):
        with pytest.raises(InvalidParameter, match=r"^kinds is a number from 0 up"):
            mixture.client.query_points(mixture.name, query, kinds=factor)
    with pytest.raises(InvalidParameter, match="unknown argument 'kind': did you mean 'kinds'"):
        mixture.client.query_points(mixture.name, query, kind=0)


def test_points_get_their_kind_however_they_are_written(backend):
    mixture = Mixture(backend)
    client, name = mixture.client, mixture.name
    rng = np.random.default_rng(4)
    mixture.items[:60] = vectors(rng, 60, DIM)
    mixture.kinds[:60] = rng.permutation(np.arange(60) % 3 - 1)
    payloads = [payload_of(i, mixture.kinds[i]) for i in range(60)]
    rows = mixture.items[:60].tolist()

    structs = [
        models.PointStruct(id=key(i), vector=rows[i], payload=payloads[i]) for i in range(60)
    ]
    client.upsert(name, structs[:10])
    batch = models.Batch(ids=[key(i) for i in range(10, 20)], vectors=rows[10:20])
    client.upsert(name, batch.model_copy(update={"payloads": payloads[10:20]}))
    client.upload_points(name, structs[20:30])
    client.upload_collection(
        name, np.array(rows[30:40]), payloads[30:40], ids=[key(i) for i in range(30, 40)]
    )
    operation = models.UpsertOperation(upsert=models.PointsList(points=structs[40:50]))
    client.batch_update_points(name, [operation])

    # Without their payloads: first the kind, then the vector.
    for i in range(50, 60):
        client.overwrite_payload(name, payloads[i], points=[key(i)])
    client.update_vectors(
        name, [models.PointVectors(id=key(i), vector=rows[i]) for i in range(50, 60)]
    )
    mixture.assert_scores()


def test_a_kind_that_is_set_alone_waits_for_a_refresh_of_all_points(backend):
    mixture = Mixture(backend)
    mixture.name = aliased(mixture.store, mixture.name)
    client, name = mixture.client, mixture.name
    before = mixture.scores()
    client.set_payload(name, {"kind": "image"}, points=[key(1)])
    client.delete_payload(name, ["kind"], points=[key(2)])
    client.clear_payload(name, [key(3)])
    np.testing.assert_allclose(mixture.scores(), before, atol=1e-6)
    payload = client.retrieve(name, [key(1)])[0].payload
    assert payload["kind"] == "image"

    refresh(mixture.store, name, force=True, client_ttl=0)
    mixture.kinds[1:4] = 0, -1, -1
    mixture.assert_scores()
    assert client.retrieve(name, [key(1)])[0].payload == payload


def test_vectors_by_name_have_kinds_of_their_own(backend):
    """The other vector of a point is searched as Qdrant does it."""
    rng, name = np.random.default_rng(3), backend.name()
    items, others = vectors(rng, 150, DIM), vectors(rng, 150, 6)
    params = {
        "photo": models.VectorParams(size=DIM, distance="Cosine"),
        "title": models.VectorParams(size=6, distance="Dot"),
    }
    backend.client.create_collection(name, vectors_config=params)
    points = [
        models.PointStruct(
            id=key(i),
            vector={"photo": items[i].tolist(), "title": others[i].tolist()},
            payload={"language": i % 3},
        )
        for i in range(150)
    ]
    backend.client.upsert(name, points, wait=True)
    store, bank = backend.store(), QueryBank(vectors(rng, 50, DIM))
    plan = plan_correction(
        store, name, Recipe(bank, estimator=NNN(K), kind="language", verdict="skip"), field="photo"
    )
    assert plan.to_dict()["kinds"]["names"] == ["0", "1", "2"]
    target = migrate(store, plan, no_writers=True).target
    assert status(store, target).to_dict()["kinds"]["names"] == ["0", "1", "2"]
    client, query = backend.hubness(), vectors(rng, 1, 6)[0].tolist()
    for using, asked in (("title", query), ("photo", items[9].tolist())):
        options = {"using": using, "limit": LIMIT, "strength": 0, "kinds": 0}
        mine = client.query_points(target, asked, **options).points
        theirs = backend.client.query_points(name, asked, using=using, limit=LIMIT).points
        assert_same(mine, theirs)
    mine = client.query_points(target, query, using="title", limit=LIMIT).points
    assert_same(mine, backend.client.query_points(name, query, using="title", limit=LIMIT).points)


def test_diverse_answers_are_picked_among_the_best_by_kind(backend):
    mixture = Mixture(backend)
    query = mixture.bank[5].tolist()
    nearest = models.NearestQuery(nearest=query, mmr=models.Mmr(diversity=0.0, candidates_limit=30))
    mine = mixture.client.query_points(mixture.name, nearest, limit=8).points
    assert_same(mine, mixture.client.query_points(mixture.name, query, limit=8).points)


def test_what_cannot_have_kinds_is_refused_in_one_line(backend, monkeypatch):
    rng = np.random.default_rng(0)
    items, bank = vectors(rng, 90, DIM), QueryBank(vectors(rng, 40, DIM))
    store, options = backend.store(), {"kind": "group", "verdict": "skip"}
    far = backend.fill(items, "Euclid")
    plain = backend.fill(items, "Cosine", payload=lambda i: {"group": i % 2})
    before = {each.name for each in backend.client.get_collections().collections}

    def refused(error, call):
        with pytest.raises(error) as caught:
            call()
        assert "\n" not in str(caught.value)
        return str(caught.value)

    message = refused(
        CannotMigrate, lambda: plan_correction(store, far, **as_plan(bank, **options))
    )
    assert message.startswith("the vector is compared by L2")

    monkeypatch.setattr(schema, "quantization", lambda source, field: INT8)
    message = refused(
        CannotMigrate, lambda: plan_correction(store, plain, **as_plan(bank, **options))
    )
    assert message.startswith("the quantizer of the vector rounds all columns alike")
    assert message.endswith("leave the kinds out, or turn the quantization off")
    assert {each.name for each in backend.client.get_collections().collections} == before


def test_a_quantizer_that_comes_later_leaves_the_columns_as_they_are(backend, monkeypatch):
    """No copy can have both: the refresh says so, and changes nothing."""
    mixture = Mixture(backend)
    mixture.name = aliased(mixture.store, mixture.name)
    monkeypatch.setattr(schema, "quantization", lambda source, field: INT8)
    bank = QueryBank(mixture.bank + np.float32(0.3))
    options = {"bank": bank, "verdict": "skip", "client_ttl": 0}
    for force in (False, True):
        with pytest.raises(CannotMigrate, match="would clip what queries send for kinds"):
            refresh(mixture.store, mixture.name, force=force, **as_recipe(**options))
    mixture.assert_scores()


def test_tasks_compare_by_kind_too(backend):
    if not backend.is_local:
        pytest.skip("the asynchronous client has a local mode of its own")
    mixture = Mixture(backend)
    query = mixture.bank[0].tolist()

    async def answered():
        behind = AsyncQdrantClient(":memory:")
        behind._client = _Local(mixture.backend.client._client)
        client = AsyncHubnessQdrantClient(client=behind, state_ttl=0.0)
        by_kind = await client.query_points(mixture.name, query, limit=LIMIT)
        raw = await client.query_points(mixture.name, query, limit=LIMIT, strength=0, kinds=0)
        return by_kind.points, raw.points

    by_kind, raw = asyncio.run(answered())
    assert_same(by_kind, mixture.client.query_points(mixture.name, query, limit=LIMIT).points)
    assert_same(raw, mixture.backend.client.query_points(mixture.source, query, limit=LIMIT).points)


class _Local:
    """The data of a local mode behind the methods of an asynchronous one."""

    def __init__(self, local):
        self._local = local

    def __getattr__(self, name):
        method = getattr(self._local, name)

        async def call(*args, **options):
            return method(*args, **options)

        return call if callable(method) else method


def test_the_command_takes_the_key_of_the_kinds(quick_folder, monkeypatch, command):
    rng = np.random.default_rng(0)
    data = str(quick_folder / "data")
    kinds = np.arange(120) % 2
    items = vectors(rng, 120, DIM) + np.outer(kinds, np.ones(DIM)).astype(np.float32)
    client = QdrantClient(path=data)
    params = models.VectorParams(size=DIM, distance="Cosine")
    client.create_collection("items", vectors_config=params)
    payloads = [{"kind": KINDS[kind], "one": 1} for kind in kinds]
    client.upload_collection("items", items, payloads, ids=range(120))
    client.close()
    bank = str(quick_folder / "bank.npy")
    np.save(bank, vectors(rng, 40, DIM))
    monkeypatch.setenv("MILVUS_HUBNESS_URI", f"qdrant+file://{data}")

    def run(*words, code=0):
        done = command(*words)
        assert done.exit_code == code, done.output
        return done

    words = ("items", "--bank", bank, "--param", "k=4", "--force")
    plan = ("migrate", "run", "--plan", *words)
    shown = run(*plan, "--kind", "kind").stdout
    assert "image" in shown
    assert "text" in shown
    planned = json.loads(run(*plan, "--kind", "kind", "--json").stdout)["plan"]
    assert planned["kinds"]["counts"] == {"image": 60, "text": 60}
    for kind, message in {"one": "does not have two kinds", "": "kind is the name"}.items():
        done = run(*plan, "--kind", kind, code=1)
        assert isinstance(done.exception, InvalidInput)
        assert message in str(done.exception)

    run("migrate", "run", *words, "--kind", "kind")
    told = json.loads(run("status", "items_hubness", "--json").stdout)["status"]
    assert told["kinds"]["names"] == ["image", "text"]
    assert "image" in run("status", "items_hubness").stdout
