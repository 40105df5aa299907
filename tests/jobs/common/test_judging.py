"""What a job does at each verdict on its bank: it stops, goes on, or goes on and says so once."""

from datetime import datetime, timezone

import pytest

from milvus_hubness.correction.estimators import NNN, to_dict
from milvus_hubness.errors import CorrectionNotRecommended
from milvus_hubness.jobs.common.choice import choose
from milvus_hubness.jobs.common.judging import Judging
from milvus_hubness.jobs.store.records import TuningRecord

REASON = "expect +1.6 points of R@1; 200 pairs cannot tell it from 0, about 2,600 would"


def record(verdict, strength=0.5):
    return TuningRecord(
        field="vector",
        verdict=verdict,
        choice=to_dict(NNN(7)) if strength else None,
        strength=strength,
        reason=REASON,
        labelled=True,
        bank_fingerprint=f"sha256:{0:064}",
        tuned_at=datetime.now(timezone.utc),
    )


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
    chosen = choose(record("not proven"), None, None)
    assert (chosen.estimator, chosen.strength) == (NNN(7), 0.5)
    assert choose(record("leave it alone", 0.0), None, None).strength == 1.0
