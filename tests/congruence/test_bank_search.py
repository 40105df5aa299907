"""Biases of new rows from a bank that is searched, beside those from the same bank in memory."""

import numpy as np
import pytest
from pymilvus import MilvusClient

from milvus_hubness import (
    CSLS,
    NNN,
    BankTooLarge,
    Blend,
    DistributionNormalization,
    DualBankSinkhorn,
    DualInvertedSoftmax,
    EmptyBank,
    InvertedSoftmax,
    QueryBank,
    Sinkhorn,
    StateError,
    migrate,
    plan_migration,
    refresh,
    status,
)
from milvus_hubness.correction.estimators import from_dict
from milvus_hubness.milvus.client.methods import drive
from milvus_hubness.milvus.client.operations import Operations
from milvus_hubness.milvus.store.banks import bank_rows
from milvus_hubness.milvus.store.milvus_store import MilvusStore
from tests.congruence.test_async import opened
from tests.support.galleries import METRICS, not_called, plain_collection, similarity, vectors

ON_SERVERS = {"searched": ["COSINE"]}

DIM, ITEMS, BANK, TARGETS, NEW = 9, 80, 300, 200, 3

ESTIMATORS = [
    NNN(5, 0.75),
    CSLS(70),
    InvertedSoftmax(0.05),
    Sinkhorn(0.1),
    DualInvertedSoftmax(0.05, 0.3),
    DualBankSinkhorn(0.1),
    DistributionNormalization(0.5),
    Blend(),
    Blend(
        [
            Sinkhorn(0.2),
            DualInvertedSoftmax(0.1, 0.1),
            DistributionNormalization(0.5),
            Sinkhorn(0.05),
        ],
        [0.25, 0.25, 0.25, 0.25],
    ),
]
IN_EVERY_METRIC = (NNN, Sinkhorn, DualInvertedSoftmax)


class Searched:
    def __init__(self, backend, metric):
        rng = np.random.default_rng(41)
        self.backend, self.metric = backend, metric
        self.new = vectors(rng, NEW, DIM)
        source = backend.name("searched")
        plain_collection(backend.client(), source, vectors(rng, ITEMS, DIM), metric)
        self.store = backend.store()
        self.bank, self.targets = (QueryBank(vectors(rng, n, DIM)) for n in (BANK, TARGETS))
        plan = plan_migration(self.store, source, self.bank, estimator=NNN(3))
        self.name = migrate(self.store, plan, no_writers=True).target
        self.reader = backend.hubness_client()

    def fit(self, estimator):
        refresh(self.store, self.name, estimator=estimator, target_bank=self.targets)

    def rows(self, first=ITEMS):
        return [{"id": first + i, "vector": row, "group": 0} for i, row in enumerate(self.new)]

    def biases(self):
        """Those of the new rows."""
        found = self.reader.query(self.name, f"id >= {ITEMS}", ["hubness_bias"])
        return np.array([row["hubness_bias"] for row in sorted(found, key=lambda row: row["id"])])

    def written_by(self, client):
        client.upsert(self.name, self.rows())
        return self.biases()


@pytest.fixture(scope="module", params=METRICS)
def searched(shared_backend, request):
    return Searched(shared_backend, request.param)


@pytest.fixture(scope="module")
def under_ip(shared_lite):
    return Searched(shared_lite, "IP")


@pytest.fixture
def small(under_ip):
    """Under IP on Milvus Lite, its estimator a log-sum-exp that is too flat to be cut off early."""
    under_ip.fit(Sinkhorn(0.5))
    return under_ip


@pytest.fixture
def spoilt(lite):
    return Searched(lite, "IP")


def listening(backend, **policy):
    """A client that holds no bank, and its requests to banks: (method, limit) each."""
    calls = []

    class Listening(MilvusClient):
        def query(self, name, *arguments, **options):
            if "__bank" in name:
                calls.append(("query", options.get("limit")))
            return super().query(name, *arguments, **options)

        def search(self, name, *arguments, **options):
            if "__bank" in name:
                calls.append(("search", options.get("limit")))
            return super().search(name, *arguments, **options)

    return backend.hubness_client(Listening, policy, bank_budget=0), calls


@pytest.mark.parametrize(
    "estimator",
    [
        each
        if isinstance(each, IN_EVERY_METRIC)
        else pytest.param(each, marks=pytest.mark.beyond_contract)
        for each in ESTIMATORS
    ],
    ids=repr,
)
def test_the_bias_is_that_of_the_bank_in_memory(searched, estimator, monkeypatch):
    if searched.metric != "COSINE" and not isinstance(estimator, IN_EVERY_METRIC):
        pytest.skip("shown under COSINE")
    searched.fit(estimator)
    wanted = searched.written_by(searched.backend.hubness_client())
    small = searched.backend.hubness_client(bank_budget=0)
    state = searched.store.info(searched.name).state
    allowed = from_dict(state.profile.estimator).needs.tolerance
    monkeypatch.setattr(MilvusStore, "load_bank", not_called)
    np.testing.assert_allclose(searched.written_by(small), wanted, atol=min(allowed, 1e-3) + 5e-6)


@pytest.mark.parametrize("metric", METRICS)
def test_targets_are_as_near_as_the_metric_says(lite, metric):
    """The dual inverted softmax by its definition, from a bank in memory and from one that is searched."""
    here = Searched(lite, metric)
    here.fit(DualInvertedSoftmax(0.1, 0.3))
    by_queries, by_targets = (
        tau * np.log(np.exp(similarity(bank, here.new, metric) / tau).sum(0))
        for bank, tau in ((here.bank.vectors, 0.1), (here.targets.vectors, 0.3))
    )
    wanted = (
        0.75 * by_queries + 0.25 * by_targets - here.store.info(here.name).state.profile.mean_bias
    )
    for budget in (0, 1 << 20):
        client = lite.hubness_client(bank_budget=budget)
        np.testing.assert_allclose(here.written_by(client), wanted, atol=0.1 / 300 + 5e-6)


def test_more_is_asked_for_only_where_it_is_needed(small):
    client, calls = listening(small.backend)
    small.written_by(client)
    searches = [("search", 64), ("search", 256), ("search", 1_024)]
    assert calls == [("query", None), ("query", None), *searches], "the queries are counted first"
    calls.clear()
    small.written_by(client)
    assert calls == searches
    small.fit(InvertedSoftmax(0.002))
    calls.clear()
    small.written_by(client)
    assert calls == [("query", None), ("search", 64)]


def test_large_banks_are_read_in_pages(small):
    for estimator in (DistributionNormalization(), ESTIMATORS[-1]):
        small.fit(estimator)
        wanted = small.written_by(small.backend.hubness_client())
        client, calls = listening(small.backend, numbers_per_page=420)
        np.testing.assert_allclose(small.written_by(client), wanted, atol=0.05 / 300 + 5e-6)
        assert sum(method == "query" for method, _ in calls) > 6


@pytest.mark.parametrize("estimator", [Sinkhorn(0.5), ESTIMATORS[-1], NNN(201)], ids=repr)
def test_where_the_nearest_do_not_do_all_are_asked_for(small, estimator):
    small.fit(estimator)
    wanted = small.written_by(small.backend.hubness_client())
    client, calls = listening(small.backend, window=200)
    np.testing.assert_allclose(small.written_by(client), wanted, atol=5e-6)
    assert ("search", 200) in calls
    assert max(limit or 0 for _, limit in calls) == 200


def test_a_bound_that_cannot_be_met_is_named(small):
    client = small.backend.hubness_client(policy={"window": 200, "whole": BANK - 1}, bank_budget=0)
    with pytest.raises(
        BankTooLarge, match=r"0 bytes, and Sinkhorn .* 200 nearest .*e-0\d and not .*pending"
    ):
        client.insert(small.name, small.rows())
    client.insert(small.name, small.rows(), bias="pending")
    assert status(small.store, small.name).pending == NEW
    small.fit(NNN(201))
    with pytest.raises(BankTooLarge, match="needs the 201 nearest"):
        client.upsert(small.name, small.rows())


@pytest.mark.parametrize("estimator", [NNN(3), DistributionNormalization()], ids=repr)
def test_a_bank_that_is_gone_is_named(spoilt, estimator):
    spoilt.fit(estimator)
    bank = spoilt.store.info(spoilt.name).state.profile.bank
    spoilt.backend.client().delete(bank.collection, filter=f'generation == "{bank.generation}"')
    client = spoilt.backend.hubness_client(bank_budget=0)
    with pytest.raises(EmptyBank, match=bank.collection):
        client.insert(spoilt.name, spoilt.rows())


@pytest.mark.parametrize("estimator", [NNN(3), DistributionNormalization()], ids=repr)
def test_a_bank_that_lost_queries_is_refused(spoilt, estimator):
    spoilt.fit(estimator)
    bank = spoilt.store.info(spoilt.name).state.profile.bank
    spoilt.backend.client().delete(bank.collection, filter=bank_rows(bank, ["queries"], 5, 7))
    client = spoilt.backend.hubness_client(bank_budget=0)
    with pytest.raises(
        StateError, match=f"{BANK - 2:,} queries and the collection state names {BANK:,}"
    ):
        client.insert(spoilt.name, spoilt.rows())


def test_a_vector_without_a_direction_has_none_here_either(lite):
    here = Searched(lite, "COSINE")
    plain, state = lite.client(), here.store.info(here.name).state
    vectors = np.r_[here.new, np.zeros((1, DIM), np.float32)]
    steps = Operations(None, 0.0, 0).biases.of_rows(
        here.name, state, vectors, "compute", None, are_new=False
    )
    biases = drive(steps, lambda ask: getattr(plain, ask.method)(*ask.args, **ask.options)).by_slot[
        0
    ]
    assert biases[-1] == 0
    assert (biases[:-1] != 0).all()


async def test_the_same_for_tasks(lite):
    here = Searched(lite, "L2")
    here.fit(ESTIMATORS[-1])
    wanted = here.written_by(lite.hubness_client())
    async with opened(lite, bank_budget=0) as client:
        await client.upsert(here.name, here.rows())
    np.testing.assert_allclose(here.biases(), wanted, atol=0.05 / 300 + 5e-6)
