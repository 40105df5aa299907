"""Every estimator, served by Milvus: scores are the oracle's, new rows are corrected without the gallery."""

import numpy as np
import pytest
from typer.testing import CliRunner

from milvus_hubness import (
    CSLS,
    NNN,
    Blend,
    Copy,
    DistributionNormalization,
    DualBankSinkhorn,
    DualInvertedSoftmax,
    InvalidInput,
    InvertedSoftmax,
    QueryBank,
    Recipe,
    Sinkhorn,
    WithDemand,
    migrate,
    plan_correction,
    refresh,
    status,
)
from milvus_hubness.cli import app
from milvus_hubness.cli.options import EstimatorOptions
from milvus_hubness.correction.estimators.products import FittedItems, logsumexp_with_room
from milvus_hubness.correction.fitted import reduced_targets
from tests.support.aliases import aliased
from tests.support.galleries import METRICS, as_distance, plain_collection, similarity, vectors

MADE = {"test_an_estimator_that_needs_targets_says_so": {"served": ["IP"]}}
ON_SERVERS = {"served": ["L2"]}

DIM, ITEMS = 12, 120

ESTIMATORS = [
    CSLS(5),
    InvertedSoftmax(0.05),
    DualInvertedSoftmax(0.05, 0.1),
    DistributionNormalization(0.5),
    Sinkhorn(0.05),
    DualBankSinkhorn(0.05),
    Blend([NNN(8), Sinkhorn(0.1), DualBankSinkhorn(0.2)], [0.5, 0.25, 0.25]),
]


SHOWN_ON_SERVERS = (InvertedSoftmax, DistributionNormalization, Blend)


class Served:
    def __init__(self, backend, metric):
        rng = np.random.default_rng(3)
        self.backend, self.metric = backend, metric
        self.items, self.bank, self.targets = (vectors(rng, n, DIM) for n in (ITEMS, 60, 50))
        self.fresh, self.query = vectors(rng, 5, DIM), vectors(rng, 1, DIM)
        self.source = backend.name()
        plain_collection(backend.client(), self.source, self.items, metric)
        self.store = backend.store()
        self.plan = plan_correction(self.store, self.source, QueryBank(self.bank))
        self.name = aliased(self.store, migrate(self.store, self.plan).target)

    def fitted(self, estimator, gallery):
        layout = self.plan.chosen.layout
        bank = QueryBank(layout.reduce_queries(self.bank))
        return estimator.fit(
            bank,
            gallery=layout.reduce_items(gallery),
            target_bank=reduced_targets(layout, QueryBank(self.targets)),
        )

    def scores(self, extra=0):
        client = self.backend.hubness_client()
        [hits] = client.search(self.name, data=list(self.query), limit=ITEMS + extra)
        found = {hit["id"]: hit["distance"] for hit in hits}
        return np.array([found[i] for i in range(ITEMS + extra)])

    def wanted(self, biases, items):
        mean_bias = self.store.info(self.name).state.profile.mean_bias
        return as_distance(
            similarity(self.query, items, self.metric) - (biases - mean_bias), self.metric
        )[0]


@pytest.fixture(scope="module", params=METRICS)
def served(shared_backend, request):
    return Served(shared_backend, request.param)


def test_without_an_estimator_the_blend_is_taken(served):
    told = status(served.store, served.name).estimator
    assert told["name"] == "WithDemand"
    assert told["estimators"][0]["name"] == "Blend"
    # This bank is no log of uneven demand.
    assert told["factor"] == 0
    biases = served.fitted(Blend(), served.items).bias(
        served.plan.chosen.layout.reduce_items(served.items)
    )
    np.testing.assert_allclose(served.scores(), served.wanted(biases, served.items), atol=1e-4)


@pytest.mark.parametrize(
    "estimator",
    [
        each
        if isinstance(each, SHOWN_ON_SERVERS)
        else pytest.param(each, marks=pytest.mark.beyond_contract)
        for each in ESTIMATORS
    ],
    ids=lambda estimator: type(estimator).__name__,
)
def test_scores_are_the_estimators_and_new_rows_need_no_gallery(served, estimator):
    reduce = served.plan.chosen.layout.reduce_items
    refresh(
        served.store,
        served.name,
        Recipe(estimator=estimator, target_bank=QueryBank(served.targets)),
    )
    fitted = served.fitted(estimator, served.items)
    biases = fitted.bias(reduce(served.items))
    np.testing.assert_allclose(served.scores(), served.wanted(biases, served.items), atol=1e-4)

    client = served.backend.hubness_client()
    rows = [
        {"id": ITEMS + i, "vector": vector, "group": 0} for i, vector in enumerate(served.fresh)
    ]
    client.insert(served.name, rows)
    everything = np.vstack([served.items, served.fresh])
    biases = np.r_[biases, fitted.new_bias(reduce(served.fresh))]
    np.testing.assert_allclose(served.scores(5), served.wanted(biases, everything), atol=1e-4)
    client.upsert(served.name, rows)
    biases = fitted.bias(reduce(everything))
    np.testing.assert_allclose(served.scores(5), served.wanted(biases, everything), atol=1e-4)
    client.delete(served.name, ids=[row["id"] for row in rows])


@pytest.mark.lite_only
def test_new_rows_leave_room_for_each_other(served):
    reduce = served.plan.chosen.layout.reduce_items
    refresh(served.store, served.name, Recipe(estimator=Sinkhorn(0.1)))
    fitted = served.fitted(Sinkhorn(0.1), served.items)
    client = served.backend.hubness_client()
    rows = [
        {"id": ITEMS + i, "vector": vector, "group": 0} for i, vector in enumerate(served.fresh)
    ]
    client.insert(served.name, rows)
    biases = np.r_[fitted.bias(reduce(served.items)), fitted.new_bias(reduce(served.fresh))]
    everything = np.vstack([served.items, served.fresh])
    np.testing.assert_allclose(served.scores(5), served.wanted(biases, everything), atol=1e-4)
    client.delete(served.name, ids=[row["id"] for row in rows])


@pytest.mark.lite_only
def test_as_many_new_rows_as_the_fit_saw_leave_little_room_where_no_query_asks_for_them(served):
    """A topic that came after the bank."""
    reduce = served.plan.chosen.layout.reduce_items
    refresh(served.store, served.name, Recipe(estimator=Sinkhorn(0.1)))
    fitted = served.fitted(Sinkhorn(0.1), served.items)
    many = vectors(np.random.default_rng(8), 20 * ITEMS, DIM)
    topic = many[np.argsort(fitted.bias(reduce(many)))[:ITEMS]]

    rows = [{"id": ITEMS + i, "vector": vector, "group": 0} for i, vector in enumerate(topic)]
    client = served.backend.hubness_client()
    client.insert(served.name, rows)

    new_biases = fitted.new_bias(reduce(topic))
    biases = np.r_[fitted.bias(reduce(served.items)), new_biases]
    everything = np.vstack([served.items, topic])
    np.testing.assert_allclose(served.scores(ITEMS), served.wanted(biases, everything), atol=1e-4)
    client.delete(served.name, ids=[row["id"] for row in rows])

    without_limit = logsumexp_with_room(
        reduce(topic) @ fitted.bank.vectors.T,
        fitted.potentials[:, 0],
        0.1,
        FittedItems(ITEMS, fitted.estimator.mean_bias),
        full_share=np.inf,
    )
    alone = fitted.bias(reduce(topic))
    assert np.abs(new_biases - alone).mean() < np.abs(without_limit - alone).mean() / 2


def test_a_refit_learns_what_the_gallery_became(served):
    """Up to a constant, which potentials leave open and no ranking sees."""
    reduce = served.plan.chosen.layout.reduce_items
    refresh(served.store, served.name, Recipe(estimator=Sinkhorn(0.5, iterations=100, tol=1e-6)))
    client = served.backend.hubness_client()
    rows = [
        {"id": ITEMS + i, "vector": vector, "group": 0} for i, vector in enumerate(served.fresh)
    ]
    client.insert(served.name, rows)
    done = refresh(served.store, served.name, refit="always")
    assert (done.action, done.reason.partition(";")[0]) == ("full", "a refit was requested")
    everything = np.vstack([served.items, served.fresh])
    biases = served.fitted(Sinkhorn(0.5, iterations=100, tol=1e-6), everything).bias(
        reduce(everything)
    )
    found, wanted = served.scores(5), served.wanted(biases, everything)
    np.testing.assert_allclose(found - found.mean(), wanted - wanted.mean(), atol=1e-3)
    client.delete(served.name, ids=[row["id"] for row in rows])


def test_the_tau_of_a_temperature_is_kept_shown_and_measured_anew(lite):
    served = Served(lite, "IP")
    spread = np.sqrt(((served.bank @ served.items.T).std(1) ** 2).mean())

    def blend():
        return status(served.store, served.name).estimator["estimators"][0]

    def sinkhorn():
        return blend()["estimators"][1]

    assert (sinkhorn()["temperature"], sinkhorn()["tau"]) == (
        0.375,
        pytest.approx(0.375 * spread, rel=1e-3),
    )
    lines = CliRunner().invoke(app, ["status", served.name, "--uri", lite.uri]).output
    assert f"Sinkhorn(tau={sinkhorn()['tau']:.3g}, temperature=0.375)" in " ".join(lines.split())
    agreement = blend()["agreement"]
    assert (
        f"the two halves of the bank agree to {agreement:.2f}, so that share of each bias"
        in " ".join(lines.split())
    )
    for same in (None, WithDemand()):
        assert refresh(served.store, served.name, Recipe(estimator=same)).action == "none"
    assert refresh(served.store, served.name, Recipe(estimator=InvertedSoftmax())).action == "full"
    client = served.backend.hubness_client()
    client.insert(served.name, [{"id": ITEMS, "vector": served.fresh[0], "group": 0}])
    assert client.get(served.name, ITEMS, ["hubness_bias"])[0]["hubness_bias"] != 0
    kept = served.store.info(served.name).state.profile.estimator
    assert kept == {
        "name": "InvertedSoftmax",
        "tau": pytest.approx(0.5 * spread, rel=1e-3),
        "temperature": 0.5,
    }
    absolute = EstimatorOptions(param=["tau=0.2"]).estimator(kept)
    assert refresh(served.store, served.name, Recipe(estimator=absolute)).reason.startswith(
        "the parameters changed"
    )
    assert served.store.info(served.name).state.profile.estimator == {
        "name": "InvertedSoftmax",
        "tau": 0.2,
    }


def test_an_estimator_that_needs_targets_says_so(served):
    with pytest.raises(InvalidInput, match="target"):
        plan_correction(
            served.store,
            served.source,
            Recipe(QueryBank(served.bank), estimator=DualInvertedSoftmax()),
            Copy(target=f"{served.source}_other"),
        )
