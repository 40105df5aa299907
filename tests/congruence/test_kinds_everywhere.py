"""Kinds of items on every database: scores, writes, renewals, profiles, refusals, the way back.

What is Milvus's alone: test_kinds.
"""

import numpy as np
import pytest
from pymilvus.exceptions import MilvusException
from qdrant_client import models

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
    rollback,
)
from milvus_hubness.jobs.common.stored_biases import StoredBiases
from tests.support.aliases import aliased
from tests.support.databases import OnQdrant
from tests.support.galleries import all_keys
from tests.support.incomplete import incomplete
from tests.support.recipes import as_plan, as_recipe

DIM, ITEMS, K, ALPHA = 12, 220, 8, 0.75
KINDS = ("image", "text")
FIELD = "modality"
OTHERS = {3: None, 7: "video", 11: ["image"], 13: 5, 17: ""}
"""Rows whose field is missing, rare, a list, of another type or empty: they have no kind."""


def gapped(rng, numbers):
    """Vectors of two kinds, (n, d), which lie apart along one axis; lengths vary."""
    rows = rng.normal(size=(len(numbers), DIM)) + rng.normal(size=DIM) / 2
    rows[:, 0] = np.where(numbers == 0, 3.0, -2.0) + 0.3 * rows[:, 0]
    return (rows * np.exp(0.2 * rng.normal(size=(len(rows), 1)))).astype(np.float32)


class Mixture:
    """A collection of images and texts, some twice and some of no kind, and banks of queries, which are
    nearer to the texts.
    """

    def __init__(self, database):
        rng = np.random.default_rng(5)
        self.database = database
        self.numbers = (rng.random(ITEMS) < 0.6).astype(int)
        self.items = gapped(rng, self.numbers)
        self.items[60:70], self.numbers[60:70] = self.items[:10], self.numbers[:10]
        self.values = [KINDS[number] for number in self.numbers]
        for row, value in OTHERS.items():
            self.values[row] = value
        self.bank, self.second_bank = (
            gapped(rng, np.ones(70, int)) + shift for shift in (0.0, np.linspace(0, 2, DIM))
        )
        self.bank = self.bank.astype(np.float32)
        self.second_bank = self.second_bank.astype(np.float32)
        self.query = self.bank[0] + rng.normal(size=DIM).astype(np.float32) / 3
        self.keys = [database.key(i) for i in range(ITEMS)]
        self.source = self.name = database.name()
        self.store = database.store()
        self.metric = None

    def make(self, metric):
        self.metric = metric
        self.database.make(self.source, DIM, metric, self.kind_of_keys)
        self.database.put(self.source, [self.row(i) for i in range(ITEMS)])
        return self

    @property
    def kind_of_keys(self):
        return "int" if all(isinstance(key, int) for key in self.keys) else "other"

    def row(self, number, **changes):
        row = {"id": self.keys[number], "vector": self.items[number], "group": 1, "note": ""}
        if self.values[number] is not None:
            row[FIELD] = self.values[number]
        return {**row, **changes}

    def plan(self, **options):
        options = {"estimator": NNN(K, ALPHA), "verdict": "skip", "kind": FIELD, **options}
        return plan_correction(self.store, self.source, **as_plan(QueryBank(self.bank), **options))

    def migrate(self, **options):
        plan = self.plan(**options)
        target = migrate(self.store, plan, no_writers=True).target
        self.name = plan.body.request.alias or aliased(self.store, target)
        return plan

    @property
    def state(self):
        return self.store.info(self.name).state

    def reduced(self, vectors):
        rows = vectors.astype(float)
        if self.metric == "COSINE":
            rows /= np.linalg.norm(rows, axis=1, keepdims=True)
        return rows

    def kind_numbers(self):
        return np.array([KINDS.index(value) if value in KINDS else -1 for value in self.values])

    def means(self, bank):
        """Those of the queries and of each kind, in float64."""
        items, numbers = self.reduced(self.items), self.kind_numbers()
        of_kinds = [items[numbers == number].mean(axis=0) for number in range(len(KINDS))]
        return np.stack([self.reduced(bank).mean(axis=0), *of_kinds])

    def assert_means(self, profile, bank):
        """Stored means are rounded to 127 steps in each direction."""
        kinds = self.state.kinds_of(profile)
        wanted = self.means(bank)
        stored = np.vstack([kinds.mean_query, kinds.of_kinds])
        steps = np.abs(wanted).max(axis=1, keepdims=True) / 127
        assert (np.abs(stored - wanted) <= 0.51 * steps).all()
        numbers = self.kind_numbers()
        shares = np.bincount(numbers[numbers >= 0]) / (numbers >= 0).sum()
        np.testing.assert_allclose(kinds.means.shares, shares)

    def expected(self, query=None, *, strength=1.0, kinds=1.0, profile=None, bank=None):
        """The scores of all rows in float64: ⟨q − κμq, r − κ(μk − μ)⟩ + κ⟨μq, μ⟩ − w·b."""
        profile = self.state.profile_of(profile)
        held = self.state.kinds_of(profile)
        mean_query = held.mean_query.astype(float)
        # UNKNOWN, −1, is the last row.
        overall = np.array(held.means.shares) @ held.of_kinds.astype(float)
        offsets = np.vstack([held.of_kinds - overall, np.zeros(DIM)])[self.kind_numbers()]
        items = self.reduced(self.items)

        # NNN on vectors less their means, less the mean bias of the profile.
        queries = self.reduced(self.bank if bank is None else bank) - mean_query
        similarities = queries @ (items - overall - offsets).T
        bias = ALPHA * np.sort(similarities, axis=0)[-K:].mean(axis=0) - profile.mean_bias

        q = self.reduced((self.query if query is None else query)[None])[0]
        products = (items - kinds * offsets) @ (q - kinds * mean_query)
        return products + kinds * mean_query @ overall - strength * bias

    def found(self, limit=ITEMS, **options):
        """The scores of a search, by key."""
        client = self.database.application()
        if isinstance(self.database, OnQdrant):
            points = client._client.query_points(
                self.name, self.query.tolist(), limit=limit, **options
            ).points
            return {point.id: point.score for point in points}
        [hits] = client.search(self.name, data=[self.query], limit=limit, **options)
        return {hit["id"]: hit["distance"] for hit in hits}

    def assert_scores(self, *, atol=2e-5, **options):
        names = {"strength", "kinds", "profile"}
        found = self.found(**{name: value for name, value in options.items() if name in names})
        wanted = self.expected(**options)
        np.testing.assert_allclose([found[key] for key in self.keys], wanted, atol=atol)

    def set_values(self, values):
        """Write the field alone where it is set, as a client that knows of no correction does."""
        self.values = values
        batch = self.store.get(self.name, self.keys, self.state.field)
        for key, row in zip(batch.keys, batch.rows, strict=True):
            value = values[self.keys.index(key)]
            if value is not None:
                row.pop(FIELD, None)
                row[FIELD] = value
        self.store.upsert(self.name, batch, self.state.field)


@pytest.fixture
def mixture(database):
    return Mixture(database).make("IP")


@pytest.fixture(scope="module", params=["IP", "COSINE"])
def migrated(shared_database, request):
    """(mixture, plan) for the tests that leave each row as it was."""
    mixture = Mixture(shared_database).make(request.param)
    return mixture, mixture.migrate()


def test_vectors_are_compared_less_the_means_of_their_kinds(migrated):
    mixture, plan = migrated
    facts = plan.to_dict()["kinds"]
    numbers = mixture.kind_numbers()
    assert (facts["field"], facts["names"]) == (FIELD, list(KINDS))
    assert facts["counts"] == {
        kind: int((numbers == number).sum()) for number, kind in enumerate(KINDS)
    }
    mixture.assert_means(mixture.state.profile, mixture.bank)

    # Strength and kinds are apart.
    mixture.assert_scores()
    mixture.assert_scores(strength=0.0)
    mixture.assert_scores(kinds=0.0)
    mixture.assert_scores(strength=0.5, kinds=0.5)
    raw = mixture.reduced(mixture.items) @ mixture.reduced(mixture.query[None])[0]
    found = mixture.found(strength=0, kinds=0)
    np.testing.assert_allclose([found[key] for key in mixture.keys], raw, atol=2e-5)

    # Queries lie near the texts: without kinds, nearly no image is among the best ones.
    def images(**options):
        best = [mixture.keys.index(key) for key in mixture.found(limit=40, **options)]
        return np.count_nonzero(numbers[best] == 0)

    assert max(images(kinds=0), images(strength=0, kinds=0)) < 3
    assert images() > 8


def test_rows_of_a_client_get_their_kind(migrated):
    mixture, _ = migrated
    client = mixture.database.application()
    client.delete(mixture.name, ids=mixture.keys[:8])
    client.insert(mixture.name, [mixture.row(i) for i in range(8)])
    mixture.assert_scores()

    before = mixture.values[30:34]
    for values in (["image", "text", "video", None], before):
        mixture.values[30:34] = values
        client.upsert(mixture.name, [mixture.row(i) for i in range(30, 34)])
        mixture.assert_scores()


def test_a_kind_that_a_write_leaves_out_is_read(mixture, found):
    """A client may bring a vector without the value that goes with it, or the value alone."""
    mixture.migrate()
    client = mixture.database.application()
    key = mixture.keys[5]
    mixture.items[5] = mixture.items[6]
    if found[0].startswith("qdrant"):
        point = models.PointVectors(id=key, vector=mixture.items[5].tolist())
        client._client.update_vectors(mixture.name, [point])
        mixture.assert_scores()
        client._client.set_payload(mixture.name, {FIELD: "video"}, points=[key])
    else:
        try:
            row = {"id": key, "vector": mixture.items[5]}
            client.upsert(mixture.name, [row], partial_update=True)
        except MilvusException as error:
            pytest.skip(f"no partial updates: {error}")
        mixture.assert_scores()
        client.upsert(mixture.name, [{"id": key, FIELD: "video"}], partial_update=True)

    # The value alone waits for a refresh of all rows.
    mixture.assert_scores()
    refresh(mixture.store, mixture.name, force=True, client_ttl=0)
    mixture.values[5] = "video"
    mixture.assert_scores()


def test_a_refresh_renews_the_means(mixture):
    mixture.migrate()
    assert refresh(mixture.store, mixture.name, client_ttl=0).action == "none"
    before = mixture.state.profile

    options = {"client_ttl": 0, "verdict": "skip", "force": True}
    done = refresh(
        mixture.store, mixture.name, **as_recipe(QueryBank(mixture.second_bank), **options)
    )
    assert done.action == "full"
    assert mixture.state.profile.kinds != before.kinds
    mixture.assert_means(mixture.state.profile, mixture.second_bank)
    mixture.assert_scores(bank=mixture.second_bank)
    mixture.assert_scores(bank=mixture.second_bank, strength=0.0)
    assert refresh(mixture.store, mixture.name, client_ttl=0).action == "none"

    rollback(mixture.store, mixture.name)
    assert mixture.state.profile.kinds == before.kinds
    mixture.assert_scores()


def test_a_refresh_of_all_rows_repairs_changed_kinds(mixture):
    """It also measures the means again, which move by much here."""
    mixture.migrate()
    values = list(mixture.values)
    values[20:60] = ["text"] * 40
    values[100] = "video"
    mixture.set_values(values)
    assert refresh(mixture.store, mixture.name, client_ttl=0).action == "none"

    done = refresh(mixture.store, mixture.name, force=True, client_ttl=0)
    assert done.action == "full"
    mixture.assert_means(mixture.state.profile, mixture.bank)
    mixture.assert_scores()


def test_a_further_profile_has_means_of_its_own(mixture):
    mixture.migrate()
    options = {"client_ttl": 0, "verdict": "skip"}
    bank = QueryBank(mixture.second_bank)
    refresh(
        mixture.store, mixture.name, profile="other", **as_recipe(bank, estimator=NNN(K), **options)
    )
    state = mixture.state
    mixture.assert_means(state.profiles["other"], mixture.second_bank)
    mixture.assert_scores(profile="other", bank=mixture.second_bank)
    mixture.assert_scores()

    client = mixture.database.application()
    client.upsert(mixture.name, [mixture.row(i) for i in range(20)])
    mixture.assert_scores(profile="other", bank=mixture.second_bank)
    mixture.assert_scores()
    refresh(mixture.store, mixture.name, profile="other", force=True, client_ttl=0)
    mixture.assert_scores(profile="other", bank=mixture.second_bank)
    mixture.assert_scores()


def test_a_copy_that_a_refresh_makes_has_the_kinds(mixture):
    plan = mixture.migrate(alias=mixture.database.name("live"))
    values = list(mixture.values)
    values[20:40] = ["text"] * 20
    mixture.set_values(values)
    done = refresh(mixture.store, plan.body.request.alias, client_ttl=0, force=True)
    assert done.action == "full"
    mixture.assert_means(mixture.state.profile, mixture.bank)
    mixture.assert_scores()


def test_rows_written_during_a_refresh_get_their_kind(mixture):
    """One is new, and one changes its kind while the job copies the others."""
    mixture.migrate()
    client = mixture.database.application()
    mixture.values[40] = "image" if mixture.values[40] == "text" else "text"
    written = []

    class Writing(mixture.database.base):
        def flush(self, collection):
            if not written:
                client.delete(mixture.name, ids=[mixture.keys[6]])
                client.insert(mixture.name, [mixture.row(6)])
                client.upsert(mixture.name, [mixture.row(40)])
                written.append(collection)
            super().flush(collection)

    store = mixture.database.store(Writing)
    bank = QueryBank(mixture.second_bank)
    refresh(store, mixture.name, Recipe(bank, verdict="skip"), force=True, client_ttl=0)
    assert written
    mixture.assert_scores(bank=mixture.second_bank)


def test_the_source_takes_over_again_unchanged(mixture):
    plan = mixture.migrate(alias=mixture.database.name("live"))
    client = mixture.database.application()
    client.upsert(plan.body.request.alias, [mixture.row(7, **{FIELD: "text"})])
    done = rollback(mixture.store, plan.body.request.alias)
    assert done.carried == 1
    assert mixture.store.info(mixture.source).state is None
    values = mixture.store.values(mixture.source, FIELD, mixture.keys[:9], are_numbers=False)
    wanted = [*mixture.values[:7], "text", mixture.values[8]]
    assert [values[key] for key in mixture.keys[:9]] == wanted
    raw = mixture.items.astype(float) @ mixture.query
    scores = mixture.database.scores(plan.body.request.alias, mixture.query, ITEMS)
    np.testing.assert_allclose([scores[key] for key in mixture.keys], raw, atol=2e-5)


def test_auto_takes_the_kinds_that_vectors_show(mixture):
    plan = mixture.migrate(kind="auto")
    facts = plan.to_dict()["kinds"]
    assert facts["field"] is None
    counts = np.bincount(mixture.numbers)
    assert sorted(facts["counts"].values()) == sorted(counts.tolist())

    # The larger cluster is the first one; each row has a kind, whatever its field is.
    order = np.argsort(-counts)
    names = ["image", "text"]
    mixture.values = [names[order.tolist().index(number)] for number in mixture.numbers]
    mixture.assert_means(mixture.state.profile, mixture.bank)
    mixture.assert_scores()
    client = mixture.database.application()
    client.upsert(mixture.name, [mixture.row(i) for i in range(20)])
    mixture.assert_scores()


def test_auto_takes_none_where_vectors_show_none(mixture):
    rng = np.random.default_rng(3)
    mixture.items = rng.normal(size=(ITEMS, DIM)).astype(np.float32)
    mixture.items = np.concatenate([mixture.items, mixture.items + 0.1])
    mixture.keys = [mixture.database.key(i) for i in range(2 * ITEMS)]
    mixture.values = [*mixture.values, *mixture.values]
    mixture.bank = rng.normal(size=(70, DIM)).astype(np.float32)
    mixture.database.put(mixture.source, [mixture.row(i) for i in range(2 * ITEMS)])
    plan = mixture.migrate(kind="auto")
    assert plan.to_dict()["kinds"] is None
    assert any(remark.startswith("no kinds were found") for remark in plan.remarks)
    assert mixture.state.kinds is None
    with pytest.raises(InvalidParameter):
        mixture.found(kinds=-1)


def test_kinds_that_are_none_are_refused(mixture):
    before = mixture.database.database.collections()
    for kind, message in [
        ("nowhere", "field 'nowhere' of '.*' does not have two kinds"),
        ("group", "field 'group' of '.*' does not have two kinds of at least 30 rows"),
        ("", "kind is the name of a field"),
        (3, "kind is the name of a field"),
    ]:
        with pytest.raises(InvalidInput, match=message) as refused:
            mixture.plan(kind=kind)
        assert "\n" not in str(refused.value)

    with pytest.raises(InvalidInput, match="a target bank has no kinds"):
        mixture.plan(target_bank=QueryBank(mixture.items))
    mixture.values = [f"n{i % 20}" for i in range(ITEMS)]
    mixture.database.put(mixture.source, [mixture.row(i) for i in range(ITEMS)])
    with pytest.raises(InvalidInput, match="has more than 16 values, such as 'n"):
        mixture.plan()
    assert mixture.database.database.collections() == before, "nothing is written"


def test_kinds_under_distances_are_refused(database):
    mixture = Mixture(database).make("L2")
    with pytest.raises(CannotMigrate, match="is compared by L2, under which kinds") as refused:
        mixture.plan()
    assert "\n" not in str(refused.value)


def test_factors_that_are_none_are_refused(migrated):
    mixture, _ = migrated
    for factor in (-0.5, float("nan"), float("inf"), "much", True):
        with pytest.raises(InvalidParameter, match=r"^kinds is a number from 0 up"):
            mixture.found(kinds=factor)


def test_each_row_holds_one_kind(migrated):
    """Rows of an unknown kind hold that they have none, so that they are average items."""
    mixture, _ = migrated
    info = mixture.store.info(mixture.name)
    stored = StoredBiases(mixture.store, info, info.state)
    keys = all_keys(mixture.store, mixture.name)
    rows = stored.read(keys, info.partitions[0])
    kinds = dict(zip(rows.batch.keys, info.state.codec.read_kinds(rows.columns), strict=True))
    numbers = dict(zip(mixture.keys, mixture.kind_numbers(), strict=True))
    assert kinds == {key: numbers[key] for key in kinds}
    assert not incomplete(info.state, rows).any()
