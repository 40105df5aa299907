"""What a recipe takes, and what follows from it and from a verdict, without a database."""

from datetime import datetime, timezone

import numpy as np
import pytest

from milvus_hubness import (
    NNN,
    CorrectionConfig,
    InvalidInput,
    InvalidParameter,
    InvertedSoftmax,
    QueryBank,
    Recipe,
    RefreshOptions,
    WithDemand,
)
from milvus_hubness.correction.estimators import DEFAULT_ESTIMATOR, to_dict
from milvus_hubness.jobs.common.choice import Choice, choice_of
from milvus_hubness.jobs.store.records import TuningRecord

BANK = np.random.default_rng(0).standard_normal((30, 4)).astype(np.float32)
IN_USE = Choice(NNN(4), 0.7, 3)


def verdict(said="apply", **values):
    return TuningRecord(
        **{
            "field": "vector",
            "verdict": said,
            "choice": to_dict(InvertedSoftmax()),
            "strength": 0.4,
            "reason": "because",
            "labelled": True,
            "gate": 2,
            "real_queries": 0,
            "bank_fingerprint": "sha256:0",
            "tuned_at": datetime.now(timezone.utc),
            **values,
        }
    )


def test_a_bank_alone_is_a_recipe(tmp_path):
    np.save(tmp_path / "bank.npy", BANK)
    recipe = Recipe(BANK, estimator=NNN(4))
    assert Recipe.of(recipe) is recipe
    for bank in (BANK, BANK.tolist(), QueryBank(BANK), tmp_path / "bank.npy"):
        assert np.array_equal(Recipe.of(bank).named_bank.vectors, BANK)
    assert Recipe.of(None).bank is None


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        ({"gate": -1}, InvalidParameter, "gate: "),
        ({"on_hub": "stop"}, InvalidParameter, "on_hub"),
        ({"verdict": "perhaps"}, InvalidParameter, "verdict"),
        ({"queries": BANK[:19]}, InvalidInput, "19 queries cannot judge a bank"),
        ({"prior": "clicks", "no_prior": True}, InvalidParameter, "no_prior drops the prior"),
        ({"prior_weight": -0.1}, InvalidParameter, "prior_weight"),
        ({"kind": ""}, InvalidInput, "kind is the name of a field"),
        ({"kind": "auto", "target_bank": BANK}, InvalidInput, "a target bank has no kinds"),
        ({"bank": "no_such_file.npy"}, InvalidInput, "no_such_file.npy"),
        ({"target_bank": "samples"}, InvalidInput, "samples"),
    ],
)
def test_what_does_not_go_together_is_refused_where_it_is_written(words, error, message):
    with pytest.raises(error, match=message):
        Recipe(**{"bank": BANK, **words})


@pytest.mark.parametrize(
    "call",
    [
        lambda: RefreshOptions(recipe=Recipe(kind="auto")),
        lambda: RefreshOptions(recipe=Recipe(on_hub="warn")),
        lambda: CorrectionConfig(Recipe()),
        lambda: CorrectionConfig(Recipe("samples")),
        lambda: CorrectionConfig(Recipe(BANK, queries="collection:past")),
        lambda: CorrectionConfig(Recipe(BANK, kind="auto")),
        lambda: CorrectionConfig(Recipe(BANK, gate=1)),
        lambda: CorrectionConfig(Recipe(BANK, prior={1: 2.0})),
        lambda: CorrectionConfig(Recipe(BANK, prior="bank")),
        lambda: CorrectionConfig(Recipe(BANK, prior_weight=0.2)),
    ],
)
def test_no_word_is_ignored_where_it_cannot_be_followed(call):
    with pytest.raises((InvalidInput, InvalidParameter)):
        call()


@pytest.mark.parametrize(
    ("words", "record", "wanted"),
    [
        # Nothing is named: the verdict chooses, and where it does not, what is in use stays.
        ({}, verdict(), Choice(InvertedSoftmax(), 0.4, 2)),
        ({}, None, IN_USE),
        ({}, verdict(choice=None, labelled=False, gate=None), Choice(NNN(4), 0.4, 3)),
        ({}, verdict("leave it alone", choice=None, strength=0.0), IN_USE),
        # A method of the user's own is applied as strongly as before.
        ({"estimator": NNN(9)}, verdict(), Choice(NNN(9), 0.7, 3)),
        ({"gate": 5}, verdict(), Choice(InvertedSoftmax(), 0.4, 5)),
        ({"gate": 0}, verdict(), Choice(InvertedSoftmax(), 0.4, None)),
        ({"prior": "bank", "prior_weight": 0.0}, None, None),
    ],
)
def test_what_is_named_comes_first_then_the_verdict_then_what_is_in_use(words, record, wanted):
    choice = choice_of(Recipe(BANK, **words), record, IN_USE)
    if wanted is None:
        assert choice.estimator == WithDemand((NNN(4),), weight=0.0)
    else:
        assert choice == wanted


def test_where_clients_gate_no_search_the_gate_of_a_verdict_does_not_count():
    assert choice_of(Recipe(BANK), verdict(), IN_USE, are_gated=False).gate == 3


def test_a_recipe_without_words_is_the_default():
    assert choice_of(Recipe(BANK), None, Choice(DEFAULT_ESTIMATOR)) == Choice(DEFAULT_ESTIMATOR)
