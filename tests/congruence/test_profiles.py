"""Sets of biases by name, rows that wait for theirs, banks larger than memory, raw scores beside others."""

import numpy as np
import pytest
from pymilvus import AnnSearchRequest, RRFRanker

from milvus_hubness import (
    CSLS,
    NNN,
    Beside,
    InvalidInput,
    InvalidParameter,
    QueryBank,
    Recipe,
    enable,
    plan_correction,
    refresh,
    status,
)
from milvus_hubness.milvus.store.milvus_store import MilvusStore
from tests.support.aliases import aliased
from tests.support.born import born
from tests.support.galleries import (
    METRICS,
    as_distance,
    nnn,
    plain_collection,
    similarity,
    vectors,
)

ON_SERVERS = {"profiled": ["COSINE"]}

DIM, ITEMS, QUERIES, K = 10, 120, 8, 6


class Collection:
    """A corrected collection with a bank of questions, and another of pictures."""

    def __init__(self, backend, metric, **options):
        rng = np.random.default_rng(31)
        self.backend, self.metric = backend, metric
        self.items, self.queries = vectors(rng, ITEMS, DIM), vectors(rng, QUERIES, DIM)
        self.banks = {"default": vectors(rng, 60, DIM), "image": vectors(rng, 40, DIM)}
        self.plain, self.store = backend.client(), backend.store()
        bank = self.banks["default"]
        collection = born(backend, self.items, bank, metric, estimator=NNN(K), **options)
        self.name = aliased(self.store, collection)
        self.client = backend.hubness_client()

    def add_images(self):
        return refresh(
            self.store,
            self.name,
            Recipe(QueryBank(self.banks["image"]), estimator=CSLS(4)),
            profile="image",
        )

    def biases(self, profile, items):
        k, share = (K, 0.75) if profile == "default" else (4, 0.5)
        mean_bias = self.store.info(self.name).state.profiles[profile].mean_bias
        return nnn(self.banks[profile], items, self.metric, k, share) - mean_bias

    def assert_found(self, results, profile, items=None, strength=1.0):
        items = self.items if items is None else items
        raw = similarity(self.queries, items, self.metric)
        wanted = raw - strength * self.biases(profile, items)
        for hits, scores in zip(results, wanted, strict=True):
            order = np.argsort(-scores)[: len(hits)]
            assert [hit["id"] for hit in hits] == order.tolist()
            np.testing.assert_allclose(
                hits.distances, as_distance(scores[order], self.metric), atol=3e-5
            )


@pytest.fixture(scope="module", params=METRICS)
def profiled(shared_backend, request):
    made = Collection(shared_backend, request.param)
    made.added = made.add_images()
    return made


def test_a_profile_is_a_further_set_of_biases(profiled):
    assert (profiled.added.action, profiled.added.reason) == ("full", "the profile is new")
    assert profiled.added.written == ITEMS
    question = {"data": list(profiled.queries), "limit": 7}
    profiled.assert_found(profiled.client.search(profiled.name, **question), "default")
    profiled.assert_found(
        profiled.client.search(profiled.name, profile="image", **question), "image"
    )
    half = profiled.client.search(profiled.name, profile="image", strength=0.5, **question)
    profiled.assert_found(half, "image", strength=0.5)
    assert status(profiled.store, profiled.name).profiles == ("default", "image")


def test_a_profile_that_is_not_there_is_named(profiled):
    with pytest.raises(InvalidInput, match=r"no profile 'sound'.*default, image"):
        profiled.client.search(profiled.name, data=list(profiled.queries), profile="sound")
    request = AnnSearchRequest(list(profiled.queries), "vector", {}, 5)
    with pytest.raises(InvalidInput, match=r"no profile 'sound'.*default, image"):
        profiled.client.hybrid_search(profiled.name, [request], RRFRanker(), profile="sound")
    with pytest.raises(InvalidInput, match="pass --bank FILE to add it"):
        refresh(profiled.store, profiled.name, profile="sound")


def test_raw_scores_come_beside_the_corrected(profiled):
    raw = similarity(profiled.queries, profiled.items, profiled.metric)
    for options in ({}, {"profile": "image"}, {"strength": 0}, {"output_fields": ["note"]}):
        found = profiled.client.search(
            profiled.name, data=list(profiled.queries), limit=5, with_raw_score=True, **options
        )
        for hits, query_scores in zip(found, raw, strict=True):
            given = [hit["raw_score"] for hit in hits]
            wanted = as_distance(query_scores[[hit["id"] for hit in hits]], profiled.metric)
            np.testing.assert_allclose(given, wanted, atol=3e-5)
            assert set(hits[0]["entity"]) == set(options.get("output_fields", []))
    rounded = profiled.client.search(
        profiled.name, data=[profiled.queries[0]], round_decimal=2, with_raw_score=True
    )
    assert all(hit["raw_score"] == round(hit["raw_score"], 2) for hit in rounded[0])


def test_a_refresh_renews_the_profile_it_is_told_and_no_other(profiled):
    before = profiled.store.info(profiled.name).state
    assert refresh(profiled.store, profiled.name, profile="image", refit="always").action == "full"
    after = profiled.store.info(profiled.name).state
    assert after.profiles["default"] == before.profiles["default"]
    assert after.profiles["image"].epoch == before.profiles["image"].epoch + 1
    question = {"data": list(profiled.queries), "limit": 7}
    profiled.assert_found(profiled.client.search(profiled.name, **question), "default")
    profiled.assert_found(
        profiled.client.search(profiled.name, profile="image", **question), "image"
    )


def test_new_rows_get_the_bias_of_every_profile_at_once_or_later(lite):
    here = Collection(lite, "IP")
    here.add_images()
    new = vectors(np.random.default_rng(5), 2, DIM) * 2
    here.client.insert(here.name, [{"id": ITEMS, "vector": new[0], "group": 0}])
    here.client.insert(here.name, [{"id": ITEMS + 1, "vector": new[1], "group": 0}], bias="pending")
    items = np.r_[here.items, new]
    assert status(here.store, here.name).pending == 1
    [row] = here.client.query(
        here.name, filter="hubness_epoch == 0", output_fields=["hubness_bias"]
    )
    assert row["hubness_bias"] == 0
    [hits] = here.client.search(here.name, data=[new[1]], limit=ITEMS + 2)
    [waiting] = [hit["distance"] for hit in hits if hit["id"] == ITEMS + 1]
    assert waiting == pytest.approx(float(new[1] @ new[1]), rel=1e-6)
    done = refresh(here.store, here.name, force=True)
    assert (done.action, done.written) == ("full", ITEMS + 2)
    for profile in ("default", "image"):
        found = here.client.search(here.name, data=list(here.queries), profile=profile)
        here.assert_found(found, profile, items)
    with pytest.raises(InvalidParameter, match="bias is one of compute, pending"):
        here.client.insert(here.name, [{"id": 7_000, "vector": new[0], "group": 0}], bias="later")


def test_rows_beside_their_biases_may_wait_too(lite):
    rng = np.random.default_rng(6)
    name, items = lite.name("waiting"), vectors(rng, 60, DIM)
    lite.made += [f"{name}__bias_a", f"{name}__bias_b"]
    plain_collection(lite.client(), name, items, "IP")
    store = lite.store()
    enable(
        store,
        plan_correction(
            store, name, Recipe(QueryBank(vectors(rng, 20, DIM)), estimator=NNN(4)), Beside()
        ),
    )
    lite.hubness_client().insert(name, [{"id": 60, "vector": items[0], "group": 0}], bias="pending")
    assert status(store, name).pending == 1
    assert refresh(store, name).written == 1


def test_banks_share_their_budget(lite, monkeypatch):
    one, two = Collection(lite, "IP"), Collection(lite, "IP")
    load, loaded = MilvusStore.load_bank, []

    def loading(store, reference, **options):
        loaded.append(reference.collection)
        return load(store, reference, **options)

    monkeypatch.setattr(MilvusStore, "load_bank", loading)
    client = lite.hubness_client(bank_budget=60 * DIM * 4 + 100)
    for here in (one, one, two, two, one):
        client.insert(here.name, [{"id": ITEMS, "vector": here.queries[0], "group": 0}])
    banks = [here.store.info(here.name).state.profile.bank.collection for here in (one, two, one)]
    assert loaded == banks
