"""What a job does at each verdict on its bank: it stops, goes on, or goes on and says so once."""

from datetime import datetime, timezone

import numpy as np
import pytest

from milvus_hubness.correction.estimators import NNN, to_dict
from milvus_hubness.errors import CorrectionNotRecommended
from milvus_hubness.jobs.common.choice import Choice, choice_of
from milvus_hubness.jobs.common.judging import Judging, store_verdict
from milvus_hubness.jobs.common.recipe import Recipe
from milvus_hubness.jobs.store.records import MOST_VERDICTS, TuningRecord, Verdicts

REASON = "expect +1.6 points of R@1; 200 pairs cannot tell it from 0, about 2,600 would"


def record(verdict, strength=0.5, *, bank=0, **facts):
    values = {
        "choice": to_dict(NNN(7)) if strength else None,
        "labelled": True,
        "tuned_at": datetime.now(timezone.utc),
        **facts,
    }
    return TuningRecord(
        field="vector",
        verdict=verdict,
        strength=strength,
        reason=REASON,
        bank_fingerprint=f"sha256:{bank:064}",
        **values,
    )


LABELLED = record("apply")
BY_REAL = record("apply weakly", labelled=False, real_queries=30)
BY_BANK = record("apply", labelled=False)
BY_JOB = record("apply", labelled=False, real_queries=40, choice=None)
AGAINST = record("leave it alone", 0.0, labelled=False, real_queries=40)
KINDS_TRIED = record("apply", labelled=False, kind_tried="modality")


class Shelf:
    """A store of one collection, as far as verdicts are concerned."""

    def __init__(self, *records):
        self.verdicts = Verdicts(records=records)

    def info(self, name, counted=True):
        return self

    def write_property(self, name, property_name, verdicts):
        self.verdicts = verdicts


@pytest.mark.parametrize(
    ("stored", "new", "stays"),
    [
        (LABELLED, BY_REAL, True),
        (LABELLED, BY_BANK, True),
        (LABELLED, AGAINST, True),
        (LABELLED, record("apply", 0.75), False),
        (BY_REAL, BY_BANK, True),
        (BY_REAL, LABELLED, False),
        # A job tries no methods: it does not take the place of a choice on equal grounds.
        (BY_REAL, BY_JOB, True),
        (BY_BANK, BY_JOB, False),
        # tune may change its mind on equal grounds.
        (BY_REAL, AGAINST, False),
        # One verdict takes the place of two: with the kinds that were tried, and without.
        (record("apply", kind="modality"), KINDS_TRIED, True),
        (record("apply", kind="language"), KINDS_TRIED, False),
    ],
)
def test_a_verdict_takes_no_place_of_one_that_rests_on_more(stored, new, stays):
    shelf = Shelf(stored)
    assert store_verdict(shelf, "products", new) == (stored if stays else None)
    assert (new in shelf.verdicts.records) is not stays
    assert store_verdict(shelf, "products", new, replaces=True) is None
    assert shelf.verdicts.records[0] == new


def test_the_oldest_of_the_weakest_verdicts_goes_first():
    """Those on eight other banks drive no labelled one out."""
    shelf = Shelf(LABELLED)
    for bank in range(1, MOST_VERDICTS + 4):
        store_verdict(shelf, "products", record("apply", bank=bank, labelled=False))
    kept = shelf.verdicts.records
    assert len(kept) == MOST_VERDICTS
    assert kept[-1] == LABELLED
    assert [int(one.bank_fingerprint[-2:]) for one in kept[:-1]] == list(range(11, 4, -1))


@pytest.mark.parametrize("mode", ["require", "warn"])
def test_a_gain_that_is_not_proven_is_said_once_and_stops_nothing(mode, caplog):
    Judging(mode).require(record("not proven"), "products")
    [message] = caplog.messages
    assert "'products' is not proven" in message
    assert REASON in message
    assert "strength=0" in message


@pytest.mark.parametrize("verdict", ["apply", "apply weakly"])
def test_other_verdicts_for_a_correction_say_nothing(verdict, caplog):
    Judging("require").require(record(verdict), "products")
    assert caplog.messages == []


def test_a_verdict_against_it_stops_and_one_that_is_not_looked_at_does_nothing(caplog):
    against = record("leave it alone", 0.0)
    with pytest.raises(CorrectionNotRecommended, match="to leave 'products' alone"):
        Judging("require").require(against, "products")
    Judging("skip").require(against, "products")
    Judging("skip").require(record("not proven"), "products")
    assert caplog.messages == []


def test_a_verdict_that_is_overruled_is_in_the_audit_log(caplog):
    """Not so in the search for what is to be done, before the job writes."""
    against = record("leave it alone", 0.0)
    Judging("warn").require(against, "products", is_last=False)
    assert [each.name for each in caplog.records] == ["milvus_hubness"]
    caplog.clear()
    Judging("warn").require(against, "products")
    [line] = [each.getMessage() for each in caplog.records if each.name.endswith(".audit")]
    assert "forced 'products' " in line
    assert REASON in line


def test_jobs_take_the_method_and_the_strength_of_what_is_not_proven():
    recipe, default = Recipe(np.eye(3)), Choice(NNN(3))
    chosen = choice_of(recipe, record("not proven"), default)
    assert (chosen.estimator, chosen.strength) == (NNN(7), 0.5)
    assert choice_of(recipe, record("leave it alone", 0.0), default).strength == 1.0
