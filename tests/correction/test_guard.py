"""The hub guard in numbers: limits across refits, and rows of one writer together."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest

from milvus_hubness.correction.guard import MOST_RISE, REMEMBERED, Evidence, RowEvidence

RNG = np.random.default_rng(0)
REACHES = np.float32(np.minimum(RNG.gamma(1.0, 0.012, 3_000), 0.2))
BIASES = np.float32(RNG.standard_normal(3_000))
EVIDENCE = Evidence.of(BIASES, REACHES)


def written(reaches, writer=None):
    reaches = np.float32(reaches)
    return RowEvidence(np.zeros(len(reaches), np.float32), reaches, writer)


def stopped(reaches, writer=None):
    return written(reaches, writer).stopped(EVIDENCE).tolist()


@pytest.mark.parametrize("rounds", [1, 4, 12])
def test_rows_just_under_the_limit_hardly_raise_it_at_each_refit(rounds):
    """Without the bound, a hundredth of the rows just under the limit is the next quantile."""
    evidence, reaches = EVIDENCE, REACHES
    unbounded = EVIDENCE
    for _ in range(rounds):
        reaches = np.concatenate([reaches, np.full(40, 0.99 * evidence.limit, np.float32)])
        biases = np.zeros(len(reaches), np.float32)
        unbounded = Evidence.of(biases, reaches)
        evidence = unbounded.after(evidence)
    assert evidence.limit <= EVIDENCE.limit * (1 + MOST_RISE) ** rounds + 1e-9
    assert unbounded.limit > EVIDENCE.limit


def test_the_limit_falls_at_once_and_biases_bound_no_reach():
    lower = Evidence.of(BIASES, REACHES / 2)
    assert lower.after(EVIDENCE).limit == pytest.approx(EVIDENCE.limit / 2, rel=1e-3)
    of_biases = Evidence.of(10 * BIASES, None)
    assert of_biases.after(EVIDENCE).limit == of_biases.limit
    risen = of_biases.after(Evidence.of(BIASES, None))
    assert risen.limit == pytest.approx((1 + MOST_RISE) * Evidence.of(BIASES, None).limit)
    assert EVIDENCE.after(None) is EVIDENCE


def test_the_ceiling_is_stored():
    bounded = EVIDENCE.after(Evidence.of(BIASES, REACHES / 4))
    assert Evidence.model_validate_json(bounded.model_dump_json()).limit == bounded.limit


def test_one_row_has_the_limit_of_one():
    assert stopped([1.01 * EVIDENCE.limit]) == [0]
    assert stopped([0.99 * EVIDENCE.limit]) == []
    assert EVIDENCE.limits_of_means(1)[0] == pytest.approx(EVIDENCE.limit)


@pytest.mark.parametrize("genuine", [0, 80, 400])
def test_weak_hubs_count_together_among_genuine_rows(genuine):
    rows = np.concatenate([RNG.choice(REACHES, genuine), np.full(20, 0.8 * EVIDENCE.limit)])
    found = stopped(rows)
    assert set(range(genuine, genuine + 20)) <= set(found)
    assert len(found) <= 20 + genuine // 40


def test_genuine_rows_pass_alone_and_together():
    counts = [len(stopped(RNG.choice(REACHES, size))) for size in (1, 10, 100, 1_000) * 25]
    assert sum(counts) == 0


def test_rows_of_one_writer_count_together_across_writes():
    writer = deque(maxlen=REMEMBERED)
    passed = 0
    for _ in range(30):
        one = written([0.8 * EVIDENCE.limit], writer)
        if not len(one.stopped(EVIDENCE)):
            passed += 1
            one.remember()
    assert 1 <= passed <= 5
    assert len(stopped(RNG.choice(REACHES, 5), writer)) == 0, "an honest row pays for no other"
    assert len(stopped([0.8 * EVIDENCE.limit])) == 0, "of another writer"
