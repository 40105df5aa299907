"""The state survives the database as text, and refuses what it cannot read."""

import json
from datetime import datetime, timezone

import pytest

from milvus_hubness.correction.codec.base import form_of
from milvus_hubness.correction.codec.layout import Layout
from milvus_hubness.correction.codec.multi_vectors import MultiVectorLayout
from milvus_hubness.correction.codec.parts import (
    BiasSlots,
    GraphHint,
    HalfSquares,
    LocalityHints,
)
from milvus_hubness.correction.prior import Prior
from milvus_hubness.correction.state import (
    BankReference,
    CollectionState,
    Profile,
    read_states,
    require_state,
    suffix_for,
)
from milvus_hubness.errors import InvalidInput, NotCorrected, StateError, UnknownStateVersion


@pytest.fixture
def state():
    profile = Profile(
        estimator={"name": "NNN", "k": 16, "alpha": 0.75},
        slot=0,
        mean_bias=0.1234567890123,
        bank=BankReference(
            collection="b", generation="01", fingerprint="sha256:00", count=3, size=3
        ),
        epoch=4,
        refreshed_at=datetime(2026, 1, 2, tzinfo=timezone.utc),
        fitted_at=datetime(2026, 1, 2, tzinfo=timezone.utc),
    )
    return CollectionState(
        field="vector",
        layout=Layout(384, "COSINE"),
        source="products",
        phase="ready",
        profiles={"default": profile},
    )


def test_it_reads_what_it_wrote(state):
    assert read_states({"hubness": state.to_json()}, "products") == {state.field: state}
    assert state.layout.width == 400
    assert state.profile.epoch == 4


LAYOUTS = [
    Layout(384, "COSINE"),
    Layout(384, "IP", BiasSlots(2, spread=8), multiple_of=48),
    Layout(384, "L2", BiasSlots(scale=1 / 64), half_squares=HalfSquares(1234.5678901234, 16.0)),
    Layout(
        2,
        "IP",
        locality_hints=LocalityHints("AAECAw==", 0.5),
        graph_hint=GraphHint(2.0, 0.3, 0.1),
    ),
    MultiVectorLayout(128, "COSINE", BiasSlots(spread=2)),
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_layout_that_is_read_is_the_one_that_was_written(state, layout):
    text = state.model_copy(update={"layout": layout}).to_json()
    [read] = read_states({"hubness": text}, "products").values()
    assert read.layout == layout
    assert type(read.layout) is type(layout)
    assert read.codec.form.width == form_of(layout, "float32").width


def test_a_state_names_no_part_that_the_layout_lacks(state):
    assert json.loads(state.to_json())["layout"] == {
        "dim": 384,
        "metric": "COSINE",
        "slots": {"count": 1, "scale": 1.0, "spread": 1},
        "multiple_of": 16,
    }


def test_rows_of_several_vectors_have_no_other_columns(state):
    def read(layout):
        record = {**json.loads(state.to_json()), "layout": layout}
        return CollectionState.from_json(json.dumps(record), "products")

    plain = {"dim": 380, "metric": "COSINE"}
    assert read({"of_tokens": plain}).layout == MultiVectorLayout(380, "COSINE")
    with pytest.raises(
        StateError, match=r"broken at layout: .* no columns for kinds or index hints"
    ):
        read({"of_tokens": {**plain, "graph_hint": {"anchor": 1.0}}})
    with pytest.raises(StateError, match=r"broken at layout\.of_tokens: dim is from 1 to"):
        read({"of_tokens": {**plain, "dim": 0}})
    with pytest.raises(StateError, match=r"broken at layout\.of_tokens"):
        read({"of_tokens": plain, **plain})


def test_no_property_is_no_state():
    assert read_states({"something": "else", "hubness": ""}, "products") == {}
    with pytest.raises(NotCorrected, match="products"):
        require_state(None, "products")


def test_another_version_is_not_guessed_at(state):
    with pytest.raises(UnknownStateVersion, match="version 2"):
        read_states({"hubness": state.to_json().replace('"version":1', '"version":2')}, "products")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("not json", "is broken: "),
        ("[1]", "not a state"),
        ('{"version": 1}', "broken at"),
        ("{}", "not a state"),
    ],
)
def test_a_broken_state_says_where(text, said):
    with pytest.raises(StateError, match=said):
        CollectionState.from_json(text, "products")


def test_a_broken_layout_is_a_broken_state(state):
    for part, broken in (
        ('"dim":384', '"dim":0'),
        ('"metric":"COSINE"', '"metric":"JACCARD"'),
        ("scale", "size"),
    ):
        with pytest.raises(StateError, match="broken at layout"):
            CollectionState.from_json(state.to_json().replace(part, broken), "products")


def test_each_field_has_its_own_property_and_columns(state):
    second = state.model_copy(update={"field": "image", "suffix": suffix_for("image", [state])})
    assert second.suffix == "_image"
    assert not set(second.codec.hidden_fields) & set(state.codec.hidden_fields)
    properties = {each.property_name: each.to_json() for each in (state, second)}
    assert read_states(properties, "products") == {state.field: state, "image": second}
    assert suffix_for(state.field, [second]) == ""
    assert suffix_for("image", [state, second]) == "_image"


def test_a_profile_is_found_by_its_name(state):
    assert state.profile_of(None) == state.profile_of("default") == state.profile
    with pytest.raises(InvalidInput, match=r"no profile 'text'.*default"):
        state.profile_of("text")


def test_norms_are_hidden_only_where_they_are_kept(state):
    assert "hubness_norm" in state.codec.hidden_fields
    assert (
        "hubness_norm"
        not in state.model_copy(update={"layout": Layout(384, "IP")}).codec.hidden_fields
    )


def test_a_state_from_before_half_precision_is_of_float32(state):
    text = state.to_json().replace('"dtype":"float32",', "")
    assert "dtype" not in text
    assert read_states({"hubness": text}, "products") == {state.field: state}
    assert state.codec.form.width == state.layout.width


def test_a_field_of_half_precision_gives_each_number_three_columns(state):
    halves = state.model_copy(update={"dtype": "bfloat16", "layout": Layout(382, "COSINE")})
    assert (halves.layout.width, halves.codec.form.width) == (384, 400)
    assert (
        read_states({"hubness": halves.to_json()}, "products")[state.field].codec.form
        == halves.codec.form
    )


@pytest.mark.parametrize(
    "change",
    [
        {"epoch": 5},
        {"mean_bias": 0.5},
        {"estimator": {"name": "NNN", "k": 7, "alpha": 0.75}},
        {"prior": Prior(source="field", field="sales", weight=0.2)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_the_number_of_a_generation_is_one_of_what_its_biases_come_from(state, change):
    """It survives JSON, and does not depend on what a refresh without new biases changes."""
    profile = state.profile
    assert profile.generation == Profile.model_validate_json(profile.model_dump_json()).generation
    renewed = {"strength": 0.5, "refreshed_at": datetime(2030, 1, 1, tzinfo=timezone.utc)}
    assert profile.generation == profile.model_copy(update=renewed).generation
    assert profile.generation != profile.model_copy(update=change).generation
    assert 0 < profile.generation <= 2**48
