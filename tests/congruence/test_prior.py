"""A prior from a field of the rows or from clicks: stored numbers, renewals, refusals, the way back."""

from datetime import datetime, timezone

import numpy as np
import pytest
from pymilvus.exceptions import MilvusException
from qdrant_client import models

from milvus_hubness import (
    NNN,
    Beside,
    InvalidInput,
    InvalidParameter,
    QueryBank,
    Recipe,
    enable,
    migrate,
    plan_correction,
    refresh,
    rollback,
    status,
)
from milvus_hubness.correction.estimators import to_dict
from milvus_hubness.correction.prior import SMOOTHING, Prior
from milvus_hubness.jobs.common.stored_biases import StoredBiases
from milvus_hubness.jobs.store.records import TUNING_PROPERTY, TuningRecord, Verdicts
from tests.support.aliases import aliased
from tests.support.galleries import all_keys, nnn, vectors
from tests.support.recipes import as_plan

DIM, ITEMS, LAMBDA = 12, 100, 0.3

FIELD = "clicks"


class Shop:
    """A collection with clicks, every seventh row without any, and one bank."""

    def __init__(self, database):
        rng = np.random.default_rng(2)
        self.database = database
        self.items, self.bank = vectors(rng, ITEMS, DIM), vectors(rng, 50, DIM)
        self.clicks = rng.zipf(1.6, ITEMS).clip(max=1e6).astype(float)
        self.clicks[::7] = 0
        self.keys = [database.key(i) for i in range(ITEMS)]
        self.source = database.name()
        kind = "int" if all(isinstance(key, int) for key in self.keys) else "other"
        database.make(self.source, DIM, "IP", kind)
        database.put(self.source, [self.row(i) for i in range(ITEMS)])
        self.store = database.store()
        self.name = self.source

    def row(self, number, **changes):
        row = {"id": self.keys[number], "vector": self.items[number], "group": 1, "note": ""}
        # Rows without clicks lack the field.
        if self.clicks[number]:
            row[FIELD] = int(self.clicks[number])
        return {**row, **changes}

    def migrate(self, **options):
        options = {"prior": FIELD, "prior_weight": LAMBDA, **options}
        plan = plan_correction(
            self.store,
            self.source,
            **as_plan(QueryBank(self.bank), **{"estimator": NNN(8), **options}),
        )
        target = migrate(self.store, plan).target
        self.name = plan.body.request.alias or aliased(self.store, target)
        return plan

    @property
    def state(self):
        return self.store.info(self.name).state

    def stored(self, keys=None):
        """The numbers that searches of these rows subtract, by key."""
        info = self.store.info(self.name)
        stored = StoredBiases(self.store, info, info.state)
        keys = all_keys(self.store, self.name) if keys is None else keys
        rows = stored.read(keys, info.partitions[0])
        return dict(zip(rows.batch.keys, rows.biases[:, info.state.profile.slot], strict=True))

    @property
    def factor(self):
        scores = self.bank.astype(float) @ self.items.T
        return LAMBDA * np.sqrt(scores.var(axis=1).mean())

    def wanted(self, values, factor=None, added=None):
        """b(r) − λ·log p(r) in float64, centred as the stored numbers are."""
        profile = self.state.profile
        factor = self.factor if factor is None else factor
        added = SMOOTHING * values.mean() if added is None else added
        shares = (values + added) / (values + added).sum()
        prior = factor * np.log(shares)
        neutral = nnn(self.bank, self.items, "IP", 8, 0.75) - profile.mean_bias
        return neutral - (prior - prior.mean())

    def set_clicks(self):
        """Write the values alone, as a client that knows of no correction does."""
        batch = self.store.get(self.name, self.keys, self.state.field)
        for key, row in zip(batch.keys, batch.rows, strict=True):
            row.pop(FIELD, None)
            row[FIELD] = int(self.clicks[self.keys.index(key)])
        self.store.upsert(self.name, batch, self.state.field)

    def assert_stored(self, values, **parameters):
        stored = self.stored()
        wanted = self.wanted(values, **parameters)
        np.testing.assert_allclose([stored[key] for key in self.keys], wanted, atol=2e-5)


@pytest.fixture
def shop(database):
    return Shop(database)


@pytest.fixture(scope="module")
def migrated(shared_database):
    """(shop, plan) for the tests that leave each row as it was."""
    shop = Shop(shared_database)
    return shop, shop.migrate()


def test_each_row_stores_its_bias_and_its_prior(migrated):
    shop, plan = migrated
    assert plan.to_dict()["prior"]["weight"] == LAMBDA
    shop.assert_stored(shop.clicks)
    prior = status(shop.store, shop.name).prior
    assert (prior["source"], prior["field"], prior["weight"]) == ("field", FIELD, LAMBDA)
    # The ranking is that of the corrected score and the prior.
    query = vectors(np.random.default_rng(9), 1, DIM)
    scores = query[0].astype(float) @ shop.items.T - shop.wanted(shop.clicks)
    found = shop.database.scores(shop.name, query[0], 10)
    assert [shop.keys[i] for i in np.argsort(-scores)[:10]] == list(found)
    np.testing.assert_allclose(list(found.values()), np.sort(scores)[::-1][:10], atol=3e-5)


def test_rows_of_a_client_get_the_same_numbers(migrated):
    shop, _ = migrated
    before = shop.stored()
    client = shop.database.application()
    client.delete(shop.name, ids=shop.keys[:3])
    client.insert(shop.name, [shop.row(i) for i in range(3)])
    client.upsert(shop.name, [shop.row(i) for i in range(3, 6)])
    assert shop.stored() == pytest.approx(before, abs=1e-5)

    prior = shop.state.profile.prior
    moved = np.log(5_000 + prior.added) - np.log(shop.clicks[4] + prior.added)
    client.upsert(shop.name, [shop.row(4, **{FIELD: 5_000})])
    number = shop.stored()[shop.keys[4]]
    assert number == pytest.approx(before[shop.keys[4]] - prior.factor * moved, abs=1e-5)
    client.upsert(shop.name, [shop.row(4)])
    assert shop.stored() == pytest.approx(before, abs=1e-5)


def test_a_refresh_reads_the_values_again(shop):
    plan = shop.migrate(prior_weight=None)
    assert any("no weight for the prior from field 'clicks'" in remark for remark in plan.remarks)
    shop.assert_stored(shop.clicks, factor=0.0)
    refresh(shop.store, shop.name, Recipe(prior_weight=LAMBDA))
    shop.assert_stored(shop.clicks)

    before = shop.stored()
    shop.clicks = shop.clicks[::-1].copy()
    shop.clicks[50] = -1
    shop.set_clicks()
    state = shop.state
    assert refresh(shop.store, shop.name, refit="pending").action == "none"
    with pytest.raises(
        InvalidInput, match=rf"^field '{FIELD}' of .* is negative in 1 row, such as"
    ):
        refresh(shop.store, shop.name)
    # Of a refresh that read nothing, the state has the time.
    assert (shop.stored(), shop.state.profile.prior) == (before, state.profile.prior)

    shop.clicks[50] = 20_000
    shop.set_clicks()
    done = refresh(shop.store, shop.name)
    assert (done.action, f"the values of {FIELD!r} changed" in done.reason) == ("full", True)
    shop.assert_stored(shop.clicks)
    assert refresh(shop.store, shop.name).action == "none", "no value has changed"

    refresh(shop.store, shop.name, Recipe(no_prior=True))
    assert shop.state.profile.prior is None
    shop.assert_stored(shop.clicks, factor=0.0)
    rollback(shop.store, shop.name)
    shop.assert_stored(shop.clicks)


def test_the_source_takes_over_again_unchanged(shop):
    plan = shop.migrate(alias=shop.database.name("live"))
    client = shop.database.application()
    client.upsert(plan.body.request.alias, [shop.row(7, **{FIELD: 77})])
    done = rollback(shop.store, plan.body.request.alias)
    assert done.carried == 1
    values = shop.store.values(shop.source, FIELD, shop.keys)
    assert [values[key] for key in shop.keys[:8]] == [
        *(shop.clicks[i] or None for i in range(7)),
        77,
    ]


def test_a_value_that_is_none_is_refused(migrated):
    shop, _ = migrated
    before = shop.stored()
    client = shop.database.application()
    for value, problem in {
        -3: "negative",
        float("nan"): "not finite",
        float("inf"): "not finite",
        10**400: "too large",
        "many": "not a number",
        (1,): "not a number",
        True: "not a number",
    }.items():
        rows = [shop.row(0), shop.row(1, **{FIELD: value})]
        message = rf"^row 1 has a '{FIELD}' that is {problem}: a prior needs a number from 0 up"
        with pytest.raises(InvalidInput, match=message):
            client.upsert(shop.name, rows)
    assert shop.stored() == before


@pytest.mark.parametrize("value", [-3, "many"])
def test_rows_with_such_a_value_have_no_plan(shop, value):
    shop.database.put(shop.source, [shop.row(i, **{FIELD: value}) for i in (1, 2)])
    before = shop.database.database.collections()
    message = rf"^field '{FIELD}' of '{shop.source}' is (negative|not a number) in 2 rows, such as "
    with pytest.raises(InvalidInput, match=message) as refused:
        shop.migrate()
    assert "\n" not in str(refused.value)
    assert any(str(shop.keys[i]) in str(refused.value) for i in (1, 2))
    assert shop.database.database.collections() == before, "nothing is written"


def test_a_prior_that_says_nothing_is_refused(shop):
    before = shop.database.database.collections()
    for prior, message in [
        ("sales", "field 'sales' of '.*' is 0 or missing in all rows"),
        ("group", "field 'group' of '.*' is the same in all rows"),
        ("", "has no name"),
        ({}, "there are no clicks"),
        ({"no such key": 3}, "no key of the clicks is one of "),
        ({1.5: 3}, "not 1.5"),
        ({1: -3}, "the clicks of 1 are negative"),
        (3, "not int"),
    ]:
        with pytest.raises(InvalidInput, match=message):
            shop.migrate(prior=prior)
    for weight in (-0.1, 11, float("nan"), "much", True):
        with pytest.raises(InvalidParameter, match=r"^prior_weight is a number from 0 to 10"):
            shop.migrate(prior_weight=weight)
    with pytest.raises(InvalidParameter, match=r"^prior_weight is the weight of a prior"):
        shop.migrate(prior=None)
    assert shop.database.database.collections() == before, "nothing is written"


def test_clicks_are_stored_with_the_bank(shop):
    counts = {key: float(shop.clicks[i]) for i, key in enumerate(shop.keys)}
    shop.migrate(prior=counts)
    shop.assert_stored(shop.clicks)
    assert shop.store.load_bank(shop.state.profile.bank).clicks == {
        key: count for key, count in counts.items() if count
    }
    assert refresh(shop.store, shop.name).action == "none"

    # New rows have no clicks, and rows that are written again theirs.
    client = shop.database.application()
    new = shop.database.key(ITEMS)
    client.insert(shop.name, [shop.row(4, id=new)])
    client.upsert(shop.name, [shop.row(5)])
    prior = shop.state.profile.prior
    numbers = shop.stored()
    gained = prior.factor * np.log1p(shop.clicks[4] / prior.added)
    assert numbers[new] == pytest.approx(numbers[shop.keys[4]] + gained, abs=1e-5)
    client.delete(shop.name, ids=[new])
    shop.assert_stored(shop.clicks)

    shop.clicks = shop.clicks[::-1].copy()
    counts = {key: float(shop.clicks[i]) for i, key in enumerate(shop.keys)}
    done = refresh(shop.store, shop.name, Recipe(prior=counts, prior_weight=LAMBDA))
    assert (done.action, "the prior changed" in done.reason) == ("full", True)
    shop.assert_stored(shop.clicks)
    rollback(shop.store, shop.name)
    shop.assert_stored(shop.clicks[::-1])


def test_clicks_that_went_with_their_bank_are_passed_again_or_dropped(shop):
    """Without them each row would count as one that nobody wants."""
    counts = {key: float(shop.clicks[i]) for i, key in enumerate(shop.keys)}
    shop.migrate(prior=counts)
    bank = QueryBank(shop.bank)
    shop.store.drop(shop.state.profile.bank.collection)
    before = shop.state
    for given in ({}, {"prior_weight": LAMBDA}):
        with pytest.raises(
            InvalidInput, match=r"clicks of the prior went with the bank.*--no-prior"
        ):
            refresh(shop.store, shop.name, Recipe(bank, **given))
    assert shop.state == before

    done = refresh(shop.store, shop.name, Recipe(bank, prior=counts, prior_weight=LAMBDA))
    assert (done.action, "the bank in use is gone" in done.reason) == ("full", True)
    shop.assert_stored(shop.clicks)

    shop.store.drop(shop.state.profile.bank.collection)
    assert refresh(shop.store, shop.name, Recipe(bank, no_prior=True)).action == "full"
    assert shop.state.profile.prior is None


def test_a_value_that_a_write_leaves_out_is_read(shop, found):
    """A client may bring a vector without the value that goes with it."""
    shop.migrate()
    before = shop.stored()
    client = shop.database.application()
    key, item = shop.keys[5], shop.items[5].tolist()
    if found[0].startswith("qdrant"):
        client._client.update_vectors(shop.name, [models.PointVectors(id=key, vector=item)])
        with pytest.raises(InvalidInput, match=rf"^row 0 has a '{FIELD}' that is negative"):
            client._client.set_payload(shop.name, {FIELD: -1}, points=[key])
        client._client.set_payload(shop.name, {FIELD: 8_000}, points=[key])
    else:
        try:
            client.upsert(shop.name, [{"id": key, "vector": item}], partial_update=True)
        except MilvusException as error:
            pytest.skip(f"no partial updates: {error}")
        with pytest.raises(InvalidInput, match=rf"^row 0 has a '{FIELD}' that is negative"):
            client.upsert(shop.name, [{"id": key, FIELD: -1}], partial_update=True)
        client.upsert(shop.name, [{"id": key, FIELD: 8_000}], partial_update=True)
    assert shop.stored() == pytest.approx(before, abs=1e-5), "the value alone waits for a refresh"


def test_jobs_take_the_prior_that_tune_chose(shop):
    def tune(weight):
        record = TuningRecord(
            field=shop.state.field if shop.name != shop.source else shop.database.field,
            verdict="apply",
            choice=to_dict(NNN(8)),
            strength=1.0,
            prior=Prior(source="field", field=FIELD, weight=weight),
            reason="labels said so",
            labelled=True,
            bank_fingerprint=QueryBank(shop.bank).fingerprint,
            tuned_at=datetime.now(timezone.utc),
        )
        shop.store.write_property(shop.name, TUNING_PROPERTY, Verdicts(records=(record,)))

    tune(LAMBDA)
    own = plan_correction(shop.store, shop.source, Recipe(QueryBank(shop.bank), estimator=NNN(4)))
    assert own.to_dict()["prior"] is None, "a method of the caller's own comes without"
    plan = shop.migrate(prior=None, prior_weight=None, estimator=None)
    assert plan.to_dict()["prior"]["weight"] == LAMBDA
    shop.assert_stored(shop.clicks)

    tune(0.1)
    done = refresh(shop.store, shop.name, client_ttl=0)
    assert (done.action, "the prior changed" in done.reason) == ("full", True)
    shop.assert_stored(shop.clicks, factor=shop.factor / 3)
    assert refresh(shop.store, shop.name, client_ttl=0).action == "none"


def test_a_copy_that_a_refresh_makes_has_the_new_values(shop):
    plan = shop.migrate(alias=shop.database.name("live"))
    shop.clicks = shop.clicks[::-1].copy()
    shop.set_clicks()
    done = refresh(shop.store, plan.body.request.alias, client_ttl=0)
    assert (done.action, done.former_copy) == ("full", plan.body.target)
    shop.assert_stored(shop.clicks)


def test_rows_written_during_a_refresh_get_the_new_number(shop):
    shop.migrate()
    client = shop.database.application()
    new = shop.database.key(ITEMS)

    class Writing(shop.database.base):
        """A client inserts a row while the job copies the others."""

        def flush(self, collection):
            if not shop.store.get(shop.name, [new], shop.state.field).keys:
                client.insert(shop.name, [shop.row(4, id=new, **{FIELD: 300})])
            super().flush(collection)

    refresh(shop.database.store(Writing), shop.name, Recipe(prior_weight=0.1), client_ttl=0)
    prior = shop.state.profile.prior
    assert prior.weight == 0.1
    numbers = shop.stored()
    moved = prior.factor * (np.log(300 + prior.added) - np.log(shop.clicks[4] + prior.added))
    assert numbers[new] == pytest.approx(numbers[shop.keys[4]] - moved, abs=1e-5)


def test_biases_in_payloads_have_the_prior_too(shop, found):
    """In the side collections of Milvus: test_prior_on_milvus."""
    if not found[0].startswith("qdrant"):
        pytest.skip("payloads are Qdrant's")
    options = {"prior": FIELD, "prior_weight": LAMBDA}
    plan = plan_correction(
        shop.store,
        shop.source,
        **as_plan(QueryBank(shop.bank), Beside, estimator=NNN(8), **options),
    )
    assert plan.to_dict()["prior"]["field"] == FIELD
    enable(shop.store, plan, client_ttl=0)
    shop.assert_stored(shop.clicks)

    client = shop.database.application()
    before = shop.stored()
    client.upsert(shop.name, [shop.row(4)])
    assert shop.stored() == pytest.approx(before, abs=1e-5)
    query = vectors(np.random.default_rng(9), 1, DIM)
    scores = query[0].astype(float) @ shop.items.T - shop.wanted(shop.clicks)
    best = list(shop.database.scores(shop.name, query[0], 10))
    assert best == [shop.keys[i] for i in np.argsort(-scores)[:10]]

    shop.clicks = shop.clicks[::-1].copy()
    shop.set_clicks()
    assert refresh(shop.store, shop.name, client_ttl=0).action == "full"
    shop.assert_stored(shop.clicks)
