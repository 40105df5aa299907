"""Collections with several vector fields, each corrected or not, and searches over more than one of them."""

import numpy as np
import pytest
from pymilvus import AnnSearchRequest, DataType, Function, FunctionType, RRFRanker, WeightedRanker
from pymilvus.exceptions import MilvusException

from milvus_hubness import (
    NNN,
    AlreadyCorrected,
    Beside,
    InvalidInput,
    QueryBank,
    Recipe,
    UnsupportedOperation,
    cutover,
    diagnose,
    disable,
    enable,
    migrate,
    plan_correction,
    refresh,
    rollback,
    status,
    tune,
)
from tests.support.aliases import aliased
from tests.support.galleries import as_distance, nnn, similarity, vectors

ITEMS, QUERIES, BANK, K = 120, 6, 50, 5
DIMS = {"text": 12, "image": 20, "other": 8}


class Shop:
    """text and image corrected, one copy after the other; "other" is not, "sparse" cannot be."""

    def __init__(self, lite, text, image):
        rng = np.random.default_rng(21)
        self.lite, self.metrics = lite, {"text": text, "image": image, "other": "COSINE"}
        self.items = {name: vectors(rng, ITEMS, dim) for name, dim in DIMS.items()}
        self.queries = {name: vectors(rng, QUERIES, dim) for name, dim in DIMS.items()}
        self.banks = {name: vectors(rng, BANK, dim) for name, dim in DIMS.items()}
        self.plain, self.name = lite.client(), lite.name("shop")
        self.rows = self.make()
        self.store = lite.store()
        first = self.correct(self.name, "text")
        self.corrected = self.correct(first, "image")
        self.client = lite.hubness_client()

    def make(self):
        schema = self.plain.create_schema(enable_dynamic_field=True)
        schema.add_field("id", DataType.INT64, is_primary=True)
        index = self.plain.prepare_index_params()
        for name, dim in DIMS.items():
            schema.add_field(name, DataType.FLOAT_VECTOR, dim=dim)
            index.add_index(name, index_type="FLAT", metric_type=self.metrics[name])
        schema.add_field("sparse", DataType.SPARSE_FLOAT_VECTOR)
        index.add_index("sparse", index_type="SPARSE_INVERTED_INDEX", metric_type="IP")
        self.plain.create_collection(
            self.name, schema=schema, index_params=index, consistency_level="Strong"
        )
        rows = [
            {
                "id": i,
                "note": f"n{i}",
                "sparse": {i % 7: 1.0 + i / ITEMS, 50: 0.1},
                **{name: self.items[name][i] for name in DIMS},
            }
            for i in range(ITEMS)
        ]
        self.plain.insert(self.name, rows)
        return rows

    def correct(self, source, field):
        plan = plan_correction(
            self.store, source, Recipe(QueryBank(self.banks[field]), estimator=NNN(K)), field=field
        )
        self.lite.made += [plan.body.target, plan.bank_collection]
        return migrate(self.store, plan).target

    def raw(self, field):
        return similarity(self.queries[field], self.items[field], self.metrics[field])

    def scores(self, field, strength=1.0):
        state = self.store.info(self.corrected).states.get(field)
        if state is None:
            return self.raw(field)
        biases = nnn(self.banks[field], self.items[field], self.metrics[field], K, 0.75)
        return self.raw(field) - strength * (biases - state.profile.mean_bias)

    def requests(self, fields=tuple(DIMS), limit=30, **options):
        return [
            AnnSearchRequest(list(self.queries[name]), name, {}, limit, **options)
            for name in fields
        ]


@pytest.fixture(
    scope="module", params=[("COSINE", "L2"), ("L2", "COSINE"), ("IP", "IP")], ids=" ".join
)
def shop(shared_lite, request):
    return Shop(shared_lite, *request.param)


def plainly(results):
    return [[(hit["id"], hit["entity"]) for hit in hits] for hits in results]


def assert_alike(found, plain, atol=2e-5):
    assert plainly(found) == plainly(plain)
    for ours, theirs in zip(found, plain, strict=True):
        np.testing.assert_allclose(ours.distances, theirs.distances, atol=atol)


@pytest.mark.parametrize("field", DIMS)
def test_every_field_is_searched_in_its_own_metric(shop, field):
    question = {"data": list(shop.queries[field]), "anns_field": field, "output_fields": ["note"]}
    assert_alike(
        shop.client.search(shop.corrected, strength=0, **question),
        shop.plain.search(shop.name, **question),
    )
    found = shop.client.search(shop.corrected, **question)
    for hits, scores in zip(found, shop.scores(field), strict=True):
        order = np.argsort(-scores)[:10]
        assert [hit["id"] for hit in hits] == order.tolist()
        np.testing.assert_allclose(
            hits.distances, as_distance(scores[order], shop.metrics[field]), atol=3e-5
        )


def test_a_sparse_field_passes_through(shop):
    question = {
        "data": [{3: 1.0, 50: 0.5}],
        "anns_field": "sparse",
        "output_fields": ["*"],
        "limit": 5,
    }
    found = shop.client.search(shop.corrected, **question)
    plain = shop.plain.search(shop.name, **question)
    assert [hit["id"] for hit in found[0]] == [hit["id"] for hit in plain[0]]
    assert found[0][0]["entity"].keys() == plain[0][0]["entity"].keys()
    for name in DIMS:
        np.testing.assert_allclose(
            found[0][0]["entity"][name], plain[0][0]["entity"][name], rtol=2.0**-22
        )


def test_rows_are_read_as_they_were_written(shop):
    [row] = shop.client.get(shop.corrected, 7)
    assert set(row) == {"id", "note", "sparse", *DIMS}
    for name in DIMS:
        np.testing.assert_allclose(row[name], shop.items[name][7], rtol=2.0**-22)
    described = shop.client.describe_collection(shop.corrected)
    plain = shop.plain.describe_collection(shop.name)
    assert [(each["name"], each["params"]) for each in described["fields"]] == [
        (each["name"], each["params"]) for each in plain["fields"]
    ]
    assert not [name for name in described["properties"] if name.startswith("hubness")]
    for name in DIMS:
        assert shop.client.describe_index(shop.corrected, name)["metric_type"] == shop.metrics[name]


@pytest.mark.parametrize(
    "ranker",
    [
        RRFRanker(),
        RRFRanker(7),
        WeightedRanker(0.5, 0.2, 0.9),
        WeightedRanker(1, 2, 3, norm_score=False),
    ],
    ids=["rrf", "rrf 7", "weighted", "weighted as it is"],
)
@pytest.mark.parametrize("offset", [0, 4])
def test_a_hybrid_search_at_strength_zero_is_the_plain_one(shop, ranker, offset):
    question = {"ranker": ranker, "limit": 9, "output_fields": ["note"], "offset": offset}
    found = shop.client.hybrid_search(shop.corrected, shop.requests(), strength=0, **question)
    plain = shop.plain.hybrid_search(shop.name, shop.requests(), **question)
    assert_alike(found, plain)


@pytest.mark.parametrize("name", ["rrf", "weighted"])
def test_a_ranker_may_be_a_function(shop, name):
    params = {
        "reranker": name,
        **({"weights": [0.3, 0.3, 0.4], "norm_score": True} if name != "rrf" else {}),
    }
    function = Function(name, FunctionType.RERANK, input_field_names=[], params=params)
    question = {"ranker": function, "output_fields": ["note"]}
    found = shop.client.hybrid_search(shop.corrected, shop.requests(), strength=0, **question)
    assert_alike(found, shop.plain.hybrid_search(shop.name, shop.requests(), **question))


def test_a_hybrid_search_ranks_by_corrected_scores(shop):
    found = shop.client.hybrid_search(
        shop.corrected, shop.requests(limit=20), RRFRanker(60), limit=8
    )
    for i, hits in enumerate(found):
        totals = np.zeros(ITEMS)
        for field in DIMS:
            order = np.argsort(-shop.scores(field)[i])[:20]
            totals[order] += 1 / (60 + 1 + np.arange(20))
        np.testing.assert_allclose(hits.distances, np.sort(totals)[::-1][:8], atol=1e-6)
        np.testing.assert_allclose([totals[hit["id"]] for hit in hits], hits.distances, atol=1e-6)


def test_weighted_answers_weigh_corrected_scores_in_the_users_metric(shop):
    weights = (0.5, 0.3, 0.2)
    squash = {
        "COSINE": lambda s: (1 + s) / 2,
        "IP": lambda s: 0.5 + np.arctan(s) / np.pi,
        "L2": lambda s: 1 - 2 * np.arctan(-2 * s) / np.pi,
    }
    found = shop.client.hybrid_search(
        shop.corrected, shop.requests(limit=25), WeightedRanker(*weights)
    )
    for i, hits in enumerate(found):
        totals = np.zeros(ITEMS)
        for weight, field in zip(weights, DIMS, strict=True):
            scores = shop.scores(field)[i]
            order = np.argsort(-scores)[:25]
            totals[order] += weight * squash[shop.metrics[field]](scores[order])
        np.testing.assert_allclose(hits.distances, np.sort(totals)[::-1][:10], atol=1e-5)


def test_requests_keep_their_filters(shop):
    requests = shop.requests(expr="id < 60")
    for ranker in (RRFRanker(), WeightedRanker(1, 1, 1)):
        question = {"ranker": ranker, "round_decimal": 4, "output_fields": ["note"]}
        found = shop.client.hybrid_search(shop.corrected, requests, strength=0, **question)
        assert_alike(found, shop.plain.hybrid_search(shop.name, requests, **question), 1.1e-4)
        assert max(hit["id"] for hits in found for hit in hits) < 60


def test_every_query_of_a_hybrid_search_has_its_own_ring(shop):
    """Compared with plain searches: the hybrid search of Milvus Lite takes no notice of a radius."""
    field = next((name for name, metric in shop.metrics.items() if metric == "L2"), None)
    if field is None:
        pytest.skip("under IP and COSINE all queries share a bound")
    queries = list(shop.queries[field])
    ring = {"params": {"radius": float(np.median(as_distance(shop.raw(field), "L2")))}}
    plain = shop.plain.search(
        shop.name, data=queries, anns_field=field, search_params=ring, limit=ITEMS
    )
    assert len({len(hits) for hits in plain}) > 1
    requests = [AnnSearchRequest(queries, field, ring, ITEMS)]
    found = shop.client.hybrid_search(
        shop.corrected, requests, RRFRanker(60), limit=ITEMS, strength=0
    )
    for ours, theirs in zip(found, plain, strict=True):
        assert [hit["id"] for hit in ours] == [hit["id"] for hit in theirs]
        np.testing.assert_allclose(ours.distances, 1 / (61 + np.arange(len(theirs))), rtol=1e-5)


def test_a_profile_that_no_field_has_is_refused(shop):
    with pytest.raises(
        InvalidInput, match=r"no profile 'sound' for field 'text' or 'image'.*default"
    ):
        shop.client.hybrid_search(shop.corrected, shop.requests(), RRFRanker(), profile="sound")


def test_filter_templates_reach_the_server(shop):
    """Neither Milvus Lite nor 2.3.5 fills them in: both refuse the braces, the plain client's and ours."""
    requests = shop.requests(expr="id < {limit}", expr_params={"limit": 60})
    for client, name in ((shop.plain, shop.name), (shop.client, shop.corrected)):
        for ranker in (RRFRanker(), WeightedRanker(1, 1, 1)):
            with pytest.raises(MilvusException, match="unexpected character"):
                client.hybrid_search(name, requests, ranker)
        with pytest.raises(MilvusException, match="unexpected character"):
            client.search(
                name,
                data=list(shop.queries["text"]),
                anns_field="text",
                filter="id < {limit}",
                filter_params={"limit": 60},
            )


def test_what_no_client_can_merge_is_refused(shop):
    decay = Function(
        "decay",
        FunctionType.RERANK,
        input_field_names=["id"],
        params={"reranker": "decay", "function": "gauss", "origin": 0, "scale": 50},
    )
    if shop.metrics["text"] == "IP":
        question = {"reqs": shop.requests(("text",)), "ranker": decay, "output_fields": ["note"]}
        found = shop.client.hybrid_search(shop.corrected, strength=0, **question)
        assert_alike(found, shop.plain.hybrid_search(shop.name, **question))
        return
    with pytest.raises(UnsupportedOperation, match=r"decay.*RRFRanker"):
        shop.client.hybrid_search(shop.corrected, shop.requests(), decay)
    with pytest.raises(InvalidInput, match="2 weights for 3 requests"):
        shop.client.hybrid_search(shop.corrected, shop.requests(), WeightedRanker(1, 1))


def test_every_job_works_on_the_field_it_is_told(shop):
    told = status(shop.store, shop.corrected, field="image")
    assert (told.field, told.dim, told.metric) == ("image", DIMS["image"], shop.metrics["image"])
    assert set(told.corrected_fields) == {"text", "image"}
    assert not status(shop.store, shop.corrected, field="other").corrected
    for job in (status, refresh, disable):
        with pytest.raises(
            InvalidInput,
            match=r"has no float vector field 'nope': choose one of text, image, other",
        ):
            job(shop.store, shop.corrected, field="nope")
    with pytest.raises(InvalidInput, match=r"several corrected fields.*(text|image)"):
        refresh(shop.store, shop.corrected)
    with pytest.raises(AlreadyCorrected, match="image"):
        plan_correction(shop.store, shop.corrected, QueryBank(shop.banks["image"]), field="image")
    live = aliased(shop.store, shop.corrected)
    shop.corrected = refresh(shop.store, live, field="text", refit="always").collection
    assert status(shop.store, shop.corrected, field="text").epoch == 2
    assert status(shop.store, shop.corrected, field="image").epoch == 1
    found = shop.client.search(shop.corrected, data=list(shop.queries["text"]), anns_field="text")
    for hits, scores in zip(found, shop.scores("text"), strict=True):
        assert [hit["id"] for hit in hits] == np.argsort(-scores)[:10].tolist()
    assert tune(shop.store, shop.corrected, QueryBank(shop.banks["other"]), field="other").verdict
    assert diagnose(shop.store, shop.corrected, QueryBank(shop.queries["text"]), field="text").title


def test_new_rows_get_the_bias_of_every_field(lite):
    shop = Shop(lite, "COSINE", "IP")
    row = {name: shop.queries[name][0] for name in DIMS}
    shop.client.insert(shop.corrected, [{"id": 1_000, "note": "new", "sparse": {1: 1.0}, **row}])
    for field in ("text", "image"):
        new_vector = row[field][None, :]
        state = shop.store.info(shop.corrected).states[field]
        bias = (
            nnn(shop.banks[field], new_vector, shop.metrics[field], K, 0.75)[0]
            - state.profile.mean_bias
        )
        [hits] = shop.client.search(
            shop.corrected, data=list(new_vector), anns_field=field, limit=ITEMS + 1
        )
        [found] = [hit["distance"] for hit in hits if hit["id"] == 1_000]
        assert found == pytest.approx(
            similarity(new_vector, new_vector, shop.metrics[field])[0, 0] - bias, abs=3e-5
        )
    [read] = shop.client.get(shop.corrected, 1_000)
    for name in DIMS:
        np.testing.assert_allclose(read[name], row[name], rtol=2.0**-22)


def test_the_alias_goes_back_one_field_at_a_time(lite):
    shop = Shop(lite, "IP", "IP")
    first = f"{shop.name}_hubness"
    shop.plain.create_alias(shop.name, "live")
    cutover(shop.store, first, alias="live")
    cutover(shop.store, shop.corrected, alias="live")
    assert rollback(shop.store, "live").source == first
    assert rollback(shop.store, "live").source == shop.name
    shop.plain.drop_alias("live")


def test_a_field_beside_one_that_is_corrected_in_its_vectors(lite):
    shop = Shop(lite, "IP", "COSINE")
    plan = plan_correction(
        shop.store,
        shop.corrected,
        Recipe(QueryBank(shop.banks["other"]), estimator=NNN(K)),
        Beside(),
        field="other",
    )
    lite.made += [*plan.body.sides, plan.bank_collection]
    enable(shop.store, plan)
    found = shop.client.search(shop.corrected, data=list(shop.queries["other"]), anns_field="other")
    state = shop.store.info(shop.corrected).states["other"]
    for hits, raw, scores in zip(found, shop.raw("other"), shop.scores("other"), strict=True):
        pool = np.argsort(-raw)[: state.reranking.candidates]
        assert [hit["id"] for hit in hits] == pool[np.argsort(-scores[pool])][:10].tolist()
    question = {"ranker": RRFRanker(), "output_fields": ["note"]}
    merged = shop.client.hybrid_search(shop.corrected, shop.requests(), strength=0, **question)
    assert_alike(merged, shop.plain.hybrid_search(shop.name, shop.requests(), **question))
