"""One recipe, whichever job takes it: the same method, strength and gate."""

from dataclasses import replace

import pytest

from milvus_hubness import (
    NNN,
    Beside,
    Copy,
    InvalidInput,
    InvalidParameter,
    Judgements,
    QueryBank,
    Recipe,
    enable,
    migrate,
    plan_correction,
    refresh,
)
from milvus_hubness.correction.estimators import from_dict
from milvus_hubness.jobs.migration.options import MigrationOptions
from milvus_hubness.reports.biased import read_biased
from milvus_hubness.reports.collections import tune
from tests.support.aliases import aliased
from tests.support.galleries import half_known, plain_collection

ALONE = MigrationOptions(no_writers=True)


@pytest.fixture(scope="module")
def tuned(shared_lite):
    """A collection whose bank has a labelled verdict, with a gate."""
    vectors, items, queries = half_known()
    bank, store, name = QueryBank(vectors), shared_lite.store(), shared_lite.name("tuned")
    plain_collection(shared_lite.client(), name, items, "IP")
    record = tune(store, name, bank, judgements=Judgements.of(queries, list(range(200))))
    assert record.gate == 1
    return store, name, bank, record


@pytest.mark.parametrize(
    "words",
    [
        {},
        {"estimator": NNN(8)},
        {"gate": 0},
        {"gate": 2, "estimator": NNN(8)},
        {"prior": "bank"},
    ],
)
def test_every_job_follows_a_recipe_alike(tuned, words):
    store, name, bank, _ = tuned
    recipe = Recipe(bank, **words)
    copied = plan_correction(store, name, recipe).chosen
    beside = plan_correction(store, name, recipe, Beside()).chosen
    assert (copied.estimator, copied.strength, copied.gate) == (
        beside.estimator,
        beside.strength,
        beside.gate,
    )
    if not words:
        shown = read_biased(store, name, bank)
        assert shown.strength == copied.strength


def test_a_refresh_follows_a_recipe_as_a_migration_does(tuned, lite):
    store, name, bank, _ = tuned
    first = Recipe(QueryBank(bank.vectors[:60]), estimator=NNN(4), verdict="skip")
    target = lite.name("followed")
    migrate(store, plan_correction(store, name, first, Copy(target=target)), ALONE)
    live = aliased(store, target)
    assert store.info(live).state_of(None).profile.gate is None

    refresh(store, live, Recipe(gate=1), client_ttl=0)
    state = store.info(live).state_of(None)
    assert (state.profile.gate, from_dict(state.profile.estimator)) == (1, NNN(4))
    assert refresh(store, live, Recipe(gate=1), client_ttl=0).action == "none"
    done = refresh(store, live, Recipe(gate=0), client_ttl=0)
    assert "the gate changed" in done.reason
    assert store.info(live).state_of(None).profile.gate is None


def test_biases_beside_are_compared_by_no_kind(tuned):
    store, name, bank, _ = tuned
    with pytest.raises(InvalidInput, match="leave the kinds out, or migrate the collection"):
        plan_correction(store, name, Recipe(bank, kind="auto"), Beside())


def test_a_recipe_without_a_bank_says_so(tuned):
    store, name, bank, _ = tuned
    for body in (Copy(), Beside()):
        with pytest.raises(
            InvalidInput, match=f"'{name}' has no reference queries yet: pass a bank"
        ):
            plan_correction(store, name, replace(Recipe(bank), bank=None), body)


@pytest.mark.parametrize(
    ("body", "job", "right"), [(Beside(), migrate, "enable"), (Copy(), enable, "migrate")]
)
def test_a_plan_of_another_job_is_refused_in_one_line(tuned, body, job, right):
    store, name, bank, _ = tuned
    plan = plan_correction(store, name, bank, body)
    wrong = job.__name__
    with pytest.raises(
        InvalidParameter,
        match=f"^the plan for '{name}' cannot be carried out by {wrong}: pass it to {right}$",
    ):
        job(store, plan)
    assert not store.info(name).states
    assert not store.exists(f"{name}_hubness")
