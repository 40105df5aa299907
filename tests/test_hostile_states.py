"""Records that a stranger wrote: each call succeeds or is refused in one line, within seconds and bounded memory."""

import json
import math
import resource
import sys
import time

import numpy as np
import pytest

from milvus_hubness import (
    NNN,
    Beside,
    InvalidInput,
    InvalidParameter,
    QueryBank,
    Recipe,
    Sinkhorn,
    StateError,
    enable,
    plan_correction,
    refresh,
    status,
)
from milvus_hubness.basics.bounds import MOST_CHARACTERS
from milvus_hubness.correction.codec.layout import Layout
from milvus_hubness.correction.estimators import from_dict
from milvus_hubness.correction.fitted import Correction, initial_state
from milvus_hubness.correction.guard import LEVELS
from milvus_hubness.correction.state import BankReference, CollectionState, read_states
from milvus_hubness.jobs.common.lease_records import LEASES
from milvus_hubness.jobs.store.generations import fitted_bank
from milvus_hubness.jobs.store.ownership import LEDGER
from milvus_hubness.jobs.store.records import (
    MOST_VERDICTS,
    DualWrite,
    Record,
    Samplings,
    Verdicts,
)
from tests.support import hostile_states
from tests.support.galleries import plain_collection, vectors
from tests.support.hostile_states import PLACES, World

MOST_MEMORY = 1 << 30
"""Bytes by which the process may grow while hostile records are read."""
FEW = 0.008
"""Share of the mutations in `make test`."""
MANY = 0.16
"""Share of the mutations in `make test-long`."""


def memory():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )


def assert_no_faults(lite, place, share, record_property, per_mutation=1):
    before = memory()
    world = World(lite, place)
    outcomes = hostile_states.run(world, share, per_mutation=per_mutation)
    record_property("counts", f"{place}: {outcomes}")
    assert not outcomes.faults, "\n".join(outcomes.faults)
    assert outcomes.counts["StateError"] > 3
    assert memory() - before < MOST_MEMORY


@pytest.mark.lite_only
@pytest.mark.parametrize("place", ["vector", "beside", "kinds"])
def test_no_hostile_record_ends_in_anything_but_one_line(lite, place, record_property):
    assert_no_faults(lite, place, FEW, record_property, per_mutation=4)


@pytest.mark.long
@pytest.mark.lite_only
@pytest.mark.parametrize("place", PLACES)
def test_no_hostile_record_of_many_ends_in_anything_but_one_line(lite, place, record_property):
    """About 2,500 calls in all."""
    assert_no_faults(lite, place, MANY, record_property)


# -- one problem each -------------------------------------------------------------------------------------------------

PROFILE = {
    "estimator": {"name": "NNN", "k": 3},
    "slot": 0,
    "mean_bias": 0.5,
    "bank": {"collection": "b", "generation": "01", "fingerprint": "f", "count": 3, "size": 3},
    "epoch": 1,
    "refreshed_at": "2026-01-02T00:00:00Z",
    "fitted_at": "2026-01-02T00:00:00Z",
}
STATE = {
    "version": 1,
    "field": "vector",
    "layout": {"dim": 8, "metric": "IP", "slots": {"count": 2}},
    "source": "products",
    "profiles": {"default": PROFILE},
}
OTHER = {**PROFILE, "slot": 1}
RERANKING = {"side_prefix": None, "candidates": 50, "missed": 0.0, "allowed": 0.1, "queries": 9}
BESIDE = {**STATE, "reranking": RERANKING}


def read(state):
    return read_states(
        {"hubness": state if isinstance(state, str) else json.dumps(state)}, "products"
    )["vector"]


def with_profile(**fields):
    return {**STATE, "profiles": {"default": {**PROFILE, **fields}}}


def with_layout(**fields):
    return {**STATE, "layout": {**STATE["layout"], **fields}}


def with_half_squares(**fields):
    return with_layout(metric="L2", half_squares=fields)


BROKEN = {
    "evidence without biases": (
        with_profile(evidence={"rows": 300, "biases": []}),
        "profiles.default.evidence.biases",
    ),
    "evidence with few reaches": (
        with_profile(evidence={"rows": 300, "biases": [0.0] * len(LEVELS), "reaches": [0.5]}),
        "profiles.default.evidence.reaches",
    ),
    "an active profile that is none": ({**STATE, "active": "nobody"}, "active is 'nobody'"),
    "no profile": ({**STATE, "profiles": {}}, "active is 'default'"),
    "a slot beyond the layout": (
        with_profile(slot=2),
        "profiles.default.slot is 2: there are the slots 0 to 1",
    ),
    "a slot of another profile": (
        {**STATE, "profiles": {"default": PROFILE, "text": PROFILE}},
        "profiles.text.slot is 0, as profiles.default.slot is",
    ),
    "a second generation in the slot that searches read": (
        {**BESIDE, "other": {"use": "filling", "profile": PROFILE}},
        "other.profile.slot is 0, as profiles.default.slot is",
    ),
    "a second generation in a third slot": (
        {**BESIDE, "other": {"use": "former", "profile": {**PROFILE, "slot": 2}}},
        "other.profile.slot is 2: there are the slots 0 to 1",
    ),
    "a second generation of another use": (
        {**BESIDE, "other": {"use": "spare", "profile": OTHER}},
        "other.use",
    ),
    "a second generation in the vectors": (
        {**STATE, "other": {"use": "filling", "profile": OTHER}},
        "only biases beside have a second generation",
    ),
    "two profiles beside": (
        {**BESIDE, "profiles": {"default": PROFILE, "text": OTHER}},
        "profiles has 2 names: biases beside have one profile",
    ),
    "10^9 candidates": (
        {**STATE, "reranking": {**RERANKING, "candidates": 10**9}},
        "reranking.candidates",
    ),
    "a foreign suffix": ({**STATE, "suffix": "_image"}, "suffix is '_image'"),
    "a mean bias of NaN": (
        json.dumps(with_profile(mean_bias=math.nan)),
        "profiles.default.mean_bias",
    ),
    "a mean bias beyond float32": (with_profile(mean_bias=1e300), "profiles.default.mean_bias"),
    "an infinite strength": (
        json.dumps(with_profile(strength=math.inf)),
        "profiles.default.strength",
    ),
    "a gate of 10^9": (with_profile(gate=10**9), "profiles.default.gate"),
    "an estimator without a name": (
        with_profile(estimator={"k": 3}),
        "an estimator has a name, not None",
    ),
    "an estimator with an odd name": (
        with_profile(estimator={"name": "No\nbody"}),
        "an estimator has a name, not",
    ),
    "an unknown parameter": (
        with_profile(estimator={"name": "NNN", "x": 1}),
        "NNN has no parameter 'x'",
    ),
    "a parameter beyond float32": (
        with_profile(estimator={"name": "NNN", "alpha": 1e300}),
        "profiles.default.estimator",
    ),
    "a billion iterations": (
        with_profile(estimator={"name": "Sinkhorn", "tau": 0.1, "iterations": 10**9}),
        "iterations must be a whole number",
    ),
    "a deep estimator": ('{"version": 1, "profiles": ' + "[" * 10_000, "recursion limit"),
    "a dimension beyond Milvus": (with_layout(dim=10**9), "layout: dim is from 1 to 32768"),
    "an endless dimension": (with_layout(dim=10**400), "layout: dim is from 1 to 32768"),
    "a mean that is none": (
        with_half_squares(mean="AAAA"),
        "3 bytes are no mean of 8 dimensions",
    ),
    "a mean of another metric": (
        with_layout(half_squares={}),
        "layout: a mean, an offset and a scale of half squares are for L2, not for IP",
    ),
    "a scale of 2^1000": (with_half_squares(scale=2.0**1000), "half squares is a power of two"),
    "a bias scale of 2^1000": (
        with_layout(slots={"scale": 2.0**1000}),
        "layout.slots: the scale of biases is a power of two",
    ),
    "a bias scale that rounds": (
        with_layout(slots={"scale": 0.3}),
        "the scale of biases is a power of two",
    ),
    "a spread of a billion": (
        with_layout(slots={"spread": 2**30}),
        "spread of biases is a power of two up to 64",
    ),
    "a spread of 0": (
        with_layout(slots={"spread": 0}),
        "spread of biases is a power of two up to 64",
    ),
    "an offset beyond its scale": (with_half_squares(offset=1e30), "too large for a scale of 1"),
    "a date without a zone": (
        with_profile(refreshed_at="2026-01-02T00:00:00"),
        "profiles.default.refreshed_at",
    ),
    "the last date": (
        with_profile(refreshed_at="9999-12-31T23:59:59Z"),
        "profiles.default.refreshed_at",
    ),
    "a long name": ({**STATE, "source": "x" * 256}, "at source"),
    "a name with control characters": ({**STATE, "field": "a\x1b[31m"}, "at field"),
    "a huge text": (json.dumps(STATE) + " " * MOST_CHARACTERS, "characters, at most"),
    "a huge key": ({**STATE, "k\n" * 9_000: 1}, "Extra inputs"),
}


@pytest.mark.parametrize("problem", BROKEN)
def test_a_broken_state_is_refused_in_one_line_that_names_the_place(problem):
    text, place = BROKEN[problem]
    with pytest.raises(
        StateError, match="the collection property 'hubness' of 'products' "
    ) as refusal:
        read(text)
    message = str(refusal.value)
    assert place in message
    assert len(message) < 700
    assert message.isprintable()


def test_the_states_from_which_these_are_made_are_valid():
    assert isinstance(read(STATE), CollectionState)
    assert read({**STATE, "profiles": {"default": PROFILE, "text": OTHER}}).slots == 2
    assert read(BESIDE).codec.candidates == 50
    filling = read({**BESIDE, "other": {"use": "filling", "profile": OTHER}})
    assert [slot for slot, _ in filling.generations] == [0, 1]
    former = read({**BESIDE, "other": {"use": "former", "profile": OTHER}})
    assert [slot for slot, _ in former.generations] == [0]


def test_an_estimator_of_another_package_is_no_reason_to_refuse_a_search():
    """Its name and its numbers are bounded; it is known, or not, where biases are computed."""
    unknown = {"name": "MeanShift", "bandwidth": 0.5}
    profile = read(with_profile(estimator=unknown)).profile
    assert profile.estimator == unknown
    with pytest.raises(InvalidParameter, match="no estimator is named 'MeanShift'"):
        from_dict(profile.estimator)


def test_a_state_in_the_property_of_another_field_is_refused():
    with pytest.raises(
        StateError, match=r"'hubness.image' of 'products' is the state of 'hubness'"
    ):
        read_states({"hubness.image": json.dumps(STATE)}, "products")


TUNED = {
    "field": "vector", "verdict": "apply", "choice": {"name": "NNN"}, "strength": 1.0, "reason": "", "labelled": False,
    "bank_fingerprint": "", "tuned_at": "2026-01-02T00:00:00Z",
}  # fmt: skip
SAMPLING = {
    "field": "vector",
    "samples_collection": "s",
    "rate": 0.5,
    "size": 9,
    "dim": 4,
}
RECORDS = [
    (
        Verdicts,
        {"records": [TUNED]},
        {"records": [{**TUNED, "choice": {"name": "NNN", "k": 0}}]},
        "records.0.choice",
    ),
    (
        Verdicts,
        {"records": [TUNED]},
        {"records": [{**TUNED, "strength": math.nan}]},
        "records.0.strength",
    ),
    (
        Verdicts,
        {"records": [TUNED]},
        {"records": [{**TUNED, "tuned_at": "2026-01-02"}]},
        "records.0.tuned_at",
    ),
    (
        Verdicts,
        {"records": [TUNED]},
        {"records": [{**TUNED, "gate": 2**31}]},
        "records.0.gate",
    ),
    (Verdicts, {"records": [TUNED]}, {"records": [TUNED] * (MOST_VERDICTS + 1)}, "records"),
    (DualWrite, {"collection": "c"}, {"collection": "x" * 300}, "collection"),
    (DualWrite, {"collection": "c"}, {"collection": ""}, "collection"),
    (
        Samplings,
        {"fields": [SAMPLING]},
        {"fields": [{**SAMPLING, "rate": 5e-324}]},
        "fields.0.rate",
    ),
    (
        Samplings,
        {"fields": [SAMPLING]},
        {"fields": [{**SAMPLING, "size": 10**400}]},
        "fields.0.size",
    ),
    (Samplings, {"fields": [SAMPLING]}, {"fields": [{**SAMPLING, "dim": 0}]}, "fields.0.dim"),
    (Samplings, {"fields": [SAMPLING]}, {"fields": [SAMPLING] * 2_000}, "fields"),
]


@pytest.mark.parametrize(("model", "valid", "change", "place"), RECORDS)
def test_the_other_properties_are_validated_alike(model, valid, change, place):
    name = model.property_name
    assert model.read({name: json.dumps(valid)}, "products") is not None
    with pytest.raises(
        StateError, match=rf"property '{name}' of 'products' is broken at {place}: "
    ):
        model.read({name: json.dumps({**valid, **change})}, "products")


# -- numbers that only a computation shows -------------------------------------------------------------------------


def test_biases_that_are_not_finite_are_neither_returned_nor_stored():
    rng = np.random.default_rng(0)
    layout, bank = Layout(8, "IP"), QueryBank(vectors(rng, 20, 8))
    items = vectors(rng, 5, 8)
    with np.errstate(over="ignore"):
        fitted = Correction.fit(layout, NNN(3, alpha=1e300), bank)
        for biases in (fitted.centred, lambda rows: fitted.of_rows(rows, are_new=True)):
            with pytest.raises(InvalidInput, match="not finite in float32"):
                biases(items)
    with pytest.raises(InvalidInput, match="finite numbers of float32"):
        layout.augment(items, np.full(5, np.nan))


def test_no_state_is_written_that_could_not_be_read():
    """`model_copy` checks nothing."""
    state = read(STATE)
    broken = state.with_profile(state.profile.model_copy(update={"mean_bias": math.nan}))
    with pytest.raises(
        StateError, match=r"the new CollectionState is broken at profiles\.default\.mean_bias"
    ):
        broken.to_json()
    with pytest.raises(
        InvalidInput, match=r"these values at estimator: the numbers of an estimator are finite"
    ):
        initial_state(
            state.layout, NNN(3, alpha=1e300), state.profile.bank, field="vector", source="products"
        )


def test_an_estimator_that_would_iterate_for_years_is_refused():
    with pytest.raises(InvalidInput, match="at most 10000"):
        Sinkhorn(iterations=10**9)
    with pytest.raises(InvalidInput, match="finite number"):
        NNN(alpha=10**400)


def test_jobs_refuse_a_state_of_a_field_that_is_not_there(lite):
    client, name = lite.client(), lite.name()
    plain_collection(client, name, vectors(np.random.default_rng(1), 9, 8), "IP")
    client.alter_collection_properties(name, {"hubness": json.dumps({**STATE, "field": "image"})})
    for call in (status, refresh):
        with pytest.raises(
            StateError, match=rf"'hubness' of '{name}' is about the vector field 'image'"
        ):
            call(lite.store(), name)


ROW = {
    "number": 0,
    "part": "queries",
    "added_at": 5,
    "potentials": [0.5],
    "count": 3.0,
    "group": 0,
}


@pytest.mark.parametrize(
    "change",
    [
        {"number": "x"}, {"potentials": 3},
        {"potentials": [math.nan]}, {"potentials": ["a"]}, {"potentials": [[1.0]]}, {"part": None}, {"number": None},
        {"count": 0}, {"count": "x"}, {"count": math.nan}, {"count": [1]}, {"group": "x"}, {"group": 0.5},
        {"group": [0]},
    ],
    ids=str,
)  # fmt: skip
def test_rows_that_are_none_of_a_bank_are_refused(change):
    bank = BankReference(collection="b", generation="01", fingerprint="f", count=2, size=2)
    rows = [ROW, {**ROW, "number": 1, **change}]
    if change == {"part": None}:
        del rows[1]["part"]
    with pytest.raises(
        StateError, match="bank 'b' has rows that no version of milvus-hubness writes"
    ):
        fitted_bank(bank, "milvus", np.ones((2, 8), np.float32), rows)


@pytest.mark.parametrize("group", [1, -1, 2**62, None])
def test_queries_that_somebody_adds_by_hand_leave_a_bank_without_groups(group):
    bank = BankReference(collection="b", generation="01", fingerprint="f", count=2, size=2)
    rows = [ROW, {**ROW, "number": 1}, {**ROW, "number": 2, "group": group}]
    read = fitted_bank(bank, "milvus", np.ones((3, 8), np.float32), rows).queries
    assert len(read) == 3
    expected = [0, 0, 1] if group == 1 else None
    assert (read.groups if read.groups is None else read.groups.tolist()) == expected


# -- the ledger ----------------------------------------------------------------------------------------------------

BODIES = ["{", "[1]", "{}", '{"version": 2}', "[" * 30_000, "null", '"x"']


def test_a_broken_record_of_a_job_is_named(lite):
    rng = np.random.default_rng(1)
    client, store, name = lite.client(), lite.store(), lite.name()
    plain_collection(client, name, vectors(rng, 30, 8), "COSINE")
    plan = plan_correction(
        store,
        name,
        Recipe(QueryBank(vectors(rng, 20, 8)), estimator=NNN(3), verdict="warn"),
        Beside(),
    )
    enable(store, plan, client_ttl=0.0)
    key = f"{LEASES}/{name}"
    for body in BODIES:
        store.put_records(LEDGER, [Record(key, key, body)])
        with pytest.raises(
            StateError,
            match=f"the ledger record '{key}' is broken.*: delete it from 'hubness_ledger'",
        ):
            refresh(store, name, client_ttl=0.0)
    store.drop_records(LEDGER, key, [key])
    assert refresh(store, name, client_ttl=0.0).action == "none"
    assert status(store, name).corrected


# -- speed ---------------------------------------------------------------------------------------------------------


def test_a_state_is_read_within_a_millisecond_or_so():
    """A client reads it every few seconds."""
    text = json.dumps(STATE)
    read(text)
    began = time.perf_counter()
    for _ in range(50):
        read(text)
    assert (time.perf_counter() - began) / 50 < 0.005
