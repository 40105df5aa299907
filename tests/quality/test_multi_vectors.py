"""Measures, tuning and the verdict over MaxSim: what they report is that of the exact scores."""

from __future__ import annotations

import numpy as np
import pytest

from milvus_hubness.correction.banks.bank import QueryBank
from milvus_hubness.correction.estimators import Blend
from milvus_hubness.correction.multi_vectors import MultiVectors
from milvus_hubness.correction.near_copies import near_copies
from milvus_hubness.errors import DimensionMismatch, InvalidInput
from milvus_hubness.quality.labelled import LabelledQueries
from milvus_hubness.quality.measures import nearest, skewness
from milvus_hubness.quality.retrieval import ranks
from milvus_hubness.quality.right_items import RightItems
from milvus_hubness.quality.tuning import judge_bank, tune

DIM = 32
HUBS = 20


def s(queries, documents):
    """(queries, documents) MaxSim in float64, pair by pair."""
    return np.array(
        [[(q.astype(float) @ r.astype(float).T).max(1).mean() for r in documents] for q in queries]
    )


@pytest.fixture(scope="module")
def world():
    """Queries and documents of 120 topics, two of each topic, and a bank of other questions on them.

    A topic has several words, and hubs have a token that is near to every query: the gap between
    queries and documents.
    """
    rng = np.random.default_rng(0)
    gap = rng.standard_normal(DIM)
    gap /= np.linalg.norm(gap)
    topics = rng.standard_normal((120, 4, DIM)) / np.sqrt(DIM)

    def asking(topic):
        words = topics[topic, rng.integers(0, 4, rng.integers(1, 6))]
        return words + 0.8 * rng.standard_normal(words.shape) / np.sqrt(DIM) + 1.2 * gap

    documents = []
    for number in range(2 * len(topics)):
        topic = number % len(topics)
        tokens = topics[topic, rng.integers(0, 4, rng.integers(3, 15))]
        tokens = tokens + 0.5 * rng.standard_normal(tokens.shape) / np.sqrt(DIM)
        if number < HUBS:
            tokens = np.vstack([tokens, gap + 0.3 * tokens[0]])
        documents.append(tokens)

    queries = [asking(topic) for topic in np.arange(240) % len(topics)]
    bank = [asking(topic) for topic in rng.integers(0, len(topics), 500)]
    return tuple(MultiVectors.from_list(rows).normalised() for rows in (queries, documents, bank))


def test_ranks_are_those_of_corrected_maxsim(world):
    queries, documents, bank = world
    bias = Blend().fit(bank, gallery=documents).bias(documents)
    for numbers in (None, bias):
        corrected = s(queries, documents) - (0 if numbers is None else numbers.astype(float))
        right = corrected[np.arange(len(queries)), np.arange(len(queries))]
        expected = 1 + (corrected > right[:, None]).sum(1)
        ours = ranks(queries, documents, RightItems.of(np.arange(len(queries))), numbers)
        # Scores that are equal up to rounding may stand either way.
        assert (ours.best != expected).mean() < 0.01
        first = nearest(queries, documents, 3, numbers)
        assert (first[:, 0] == corrected.argmax(1)).mean() > 0.99


def test_tune_finds_the_hubs_and_reports_the_exact_measure(world):
    queries, documents, bank = world
    positives = [[number % 120, number % 120 + 120] for number in range(len(queries))]
    tuning = tune(bank, documents, queries=LabelledQueries.of(queries, positives))
    scores = s(queries, documents)
    topic = np.arange(len(queries)) % 120
    raw = (scores.argmax(1) % 120 == topic).mean()
    assert tuning.verdict == "apply"
    assert tuning.rows[0].estimator is None
    assert tuning.rows[0].value == pytest.approx(raw, abs=0.005)

    # The chosen estimator, fitted on the bank, gains what the table says of the best ones.
    fitted = tuning.choice.fit(bank, gallery=documents)
    bias = tuning.strength * fitted.bias(documents).astype(float)
    gained = ((scores - bias).argmax(1) % 120 == topic).mean() - raw
    assert gained > 0.05
    assert gained == pytest.approx(tuning.interval.estimate, abs=0.03)


def test_the_default_lowers_the_skewness(world):
    queries, documents, bank = world
    bias = Blend().fit(bank, gallery=documents).bias(documents)
    before, after = (
        skewness(np.bincount(nearest(queries, documents, 1, b).ravel(), minlength=len(documents)))
        for b in (None, bias)
    )
    assert after < 0.5 * before


@pytest.mark.parametrize("with_queries", [False, True])
def test_the_verdict_takes_a_bank_of_the_collection_and_refuses_a_foreign_one(world, with_queries):
    queries, documents, bank = world
    real = queries if with_queries else None
    own = judge_bank(QueryBank.of(bank), documents, queries=real)
    assert own.strength > 0, own.reason

    rng = np.random.default_rng(5)
    noise = [rng.standard_normal((length, DIM)) for length in rng.integers(1, 6, 500)]
    foreign = judge_bank(QueryBank.of(MultiVectors.from_list(noise).normalised()), documents)
    assert foreign.verdict == "leave it alone"


def test_repeats_of_a_query_are_one_group(world):
    _, documents, bank = world
    log = bank[np.r_[np.arange(100), np.full(40, 7)]]
    copies = near_copies(QueryBank.of(log), documents)
    groups = copies.bank.groups
    assert len(set(groups[100:].tolist())) == 1
    assert groups[7] == groups[100]
    assert len(copies.bank.condensed) <= 100


def test_queries_of_the_bank_are_left_out_of_the_fit_that_they_judge(world):
    _, documents, bank = world
    with pytest.raises(InvalidInput, match="nothing but the queries"):
        tune(bank[:60], documents, queries=LabelledQueries.of(bank[:60], np.arange(60)))


def test_more_rows_than_are_tried_are_sampled(world):
    queries, documents, bank = world
    many = documents[np.tile(np.arange(len(documents)), 20)]
    asked = queries[np.tile(np.arange(len(queries)), 6)]
    tuning = tune(bank[:60], many, queries=asked)
    assert (tuning.items, tuning.queries) == (4_000, 1_000)
    positives = np.arange(len(asked)) % len(documents)
    tuning = tune(bank[:60], many, queries=LabelledQueries.of(asked, positives))
    assert (tuning.items, tuning.queries) == (4_000, 1_000)


def test_faults_have_one_line(world):
    queries, documents, bank = world
    other = MultiVectors.from_list([np.ones((2, 5))] * 30)
    vectors = np.ones((30, DIM), np.float32)
    for call, error in (
        (lambda: tune(bank, other), DimensionMismatch),
        (lambda: tune(bank, documents, queries=other), DimensionMismatch),
        (lambda: tune(bank, vectors), InvalidInput),
        (lambda: ranks(queries, vectors, RightItems.of(np.arange(len(queries)))), InvalidInput),
        (lambda: nearest(queries, other, 1), DimensionMismatch),
    ):
        with pytest.raises(error) as raised:
            call()
        assert "\n" not in str(raised.value)
