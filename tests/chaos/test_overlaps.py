"""Two jobs overlap on a collection while an application writes: no write of HubnessClient is undone."""

import pytest

from tests.chaos.kinds import KINDS
from tests.chaos.overlaps import NAMES, Trial, late_changes_of_names, run_trial

TAKEOVERS = {
    "refresh": "request of Upsert 3 _src_hubness_r2",
    "refresh-beside": "request of Upsert 3 _src__bias_b",
    "serve": "request of Upsert 3 _src_hubness_r2",
    "enable-beside": "request of Upsert 3 _src__bias_a",
    "disable-beside": "request of AlterCollection 1 _src",
    "migrate": "request of Upsert 3 _src_hubness",
    "cutover": "request of AlterAlias 1 _src_hubness",
    "rollback": "request of AlterAlias 1 _src",
    "clean": "request of RenameCollection 1 _src_hubness",
}
"""A write of each group of kinds, before which the job is stopped until another has taken over."""


def assert_passes(trial, uri, folder):
    outcome = run_trial(trial, uri, folder)
    assert not outcome.problem, outcome.line
    assert outcome.reached, outcome.line


@pytest.mark.parametrize("kind", TAKEOVERS)
def test_a_job_takes_over_from_one_that_was_paused_before_a_write(uri, tmp_path, kind):
    assert KINDS.keys() >= TAKEOVERS.keys()
    assert {KINDS[name].group for name in TAKEOVERS} == {each.group for each in KINDS.values()}
    assert_passes(
        Trial(11, kind, "lite", "take over", skewed=False, call=TAKEOVERS[kind]), uri, tmp_path
    )


@pytest.mark.parametrize(("plan", "seed"), [("duplicate", 3), ("late", 5)])
def test_a_write_is_delivered_twice(uri, tmp_path, plan, seed):
    assert_passes(
        Trial(seed, "refresh", "lite", plan, skewed=False, call=TAKEOVERS["refresh"]), uri, tmp_path
    )


@pytest.mark.long
@pytest.mark.parametrize("kind", ["refresh", "rollback", "clean"])
def test_a_change_of_a_name_arrives_after_another_job(uri, tmp_path, kind):
    trials = late_changes_of_names(Trial(19, kind, "lite", call=NAMES), uri, tmp_path)
    assert trials
    for trial in trials:
        outcome = run_trial(trial, uri, tmp_path)
        assert not outcome.problem, outcome.line


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("plan", "seed"), [("take over", 13), ("together", 17)])
def test_any_call_is_held(uri, tmp_path, kind, plan, seed):
    outcome = run_trial(Trial(seed, kind, "lite", plan), uri, tmp_path)
    assert not outcome.problem, outcome.line
