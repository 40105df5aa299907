"""The online bank's reservoir against the distribution it promises."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest, chisquare

from milvus_hubness.correction.banks.bank import Origins, QueryBank
from milvus_hubness.correction.banks.online import Terms, distinct_vectors, merge

DRAWS = 1_500


def terms(size, *, seed_share=0.0, half_life=1.0, duplicate_cosine=0.99, seed=0):
    return Terms(
        size=size,
        seed_share=seed_share,
        half_life_seconds=half_life,
        duplicate_cosine=duplicate_cosine,
        seed=seed,
    )


def sampled(numbers, at):
    return Origins(np.array(numbers, np.int64), np.array(at, np.int64))


def bank_of(vectors, at=0):
    return QueryBank(np.asarray(vectors, np.float32), origins=Origins.seeds(len(vectors), at))


def merged(bank, samples, origins, how):
    """The bank and what became of the samples."""
    done = merge(bank, bank.origins, np.asarray(samples, np.float32), origins, how)
    return done.bank or bank, done


def test_every_subset_is_held_as_often_as_successive_weighted_draws_hold_it():
    at = [0, 0, 1, 2, 3]
    weights = 2.0 ** np.array(at)
    bank, samples = bank_of(np.eye(5)[:2]), np.eye(5)[2:]
    seen = dict.fromkeys(combinations(range(5), 2), 0)
    for seed in range(DRAWS):
        after, _ = merged(bank, samples, sampled([10, 20, 30], at[2:]), terms(2, seed=seed))
        seen[tuple(sorted(after.vectors.argmax(1).tolist()))] += 1

    def successive(i, j):
        shares = weights / weights.sum()
        return shares[i] * shares[j] / (1 - shares[i]) + shares[j] * shares[i] / (1 - shares[j])

    expected = [DRAWS * successive(*pair) for pair in seen]
    assert chisquare(list(seen.values()), expected).pvalue > 0.01


@pytest.mark.parametrize(("age", "odds"), [(3_600, 2), (7_200, 4)])
def test_a_query_counts_half_after_a_half_life(age, odds):
    kept_new = 0
    for seed in range(DRAWS):
        after, _ = merged(
            bank_of(np.eye(2)[:1], at=1_800_000_000),
            np.eye(2)[1:],
            sampled([7], [1_800_000_000 + age]),
            terms(1, half_life=3_600.0, seed=seed),
        )
        kept_new += int(after.vectors[0, 1] == 1)
    assert binomtest(kept_new, DRAWS, odds / (1 + odds)).pvalue > 0.01


@given(
    seeds=st.integers(1, 12),
    lives=st.integers(0, 20),
    size=st.integers(1, 15),
    share=st.floats(0, 1),
    age=st.integers(0, 10_000),
)
def test_the_bank_is_bounded_and_its_first_queries_keep_their_share(seeds, lives, size, share, age):
    dim = seeds + lives
    bank = bank_of(np.eye(dim)[:seeds])
    samples, origins = np.eye(dim)[seeds:], sampled(range(lives), [age] * lives)
    how = terms(size, seed_share=share)
    after, done = merged(bank, samples, origins, how)
    first = int(after.origins.are_seeds.sum())
    assert len(after) == min(size, dim)
    assert first >= min(seeds, how.reserved_slots, size)
    if age == 10_000:
        assert first == min(seeds, max(min(how.reserved_slots, seeds), size - lives), size)
    assert done.taken + done.duplicates + done.dropped == lives
    assert len(after) == seeds + done.taken - done.left


def clouds(rng, count, dim=4):
    """Vectors of which many are nearly alike."""
    centroids = rng.normal(size=(6, dim))
    return (centroids[rng.integers(6, size=count)] + 0.05 * rng.normal(size=(count, dim))).astype(
        np.float32
    )


@given(seed=st.integers(0, 10_000), size=st.integers(1, 30), share=st.floats(0, 1))
def test_the_same_samples_again_and_in_any_order_change_nothing(seed, size, share):
    rng = np.random.default_rng(seed)
    bank, samples = bank_of(clouds(rng, 12)), clouds(rng, 40)
    origins = sampled(rng.permutation(1_000)[:40], rng.integers(0, 20, 40))
    how = terms(size, seed_share=share, half_life=5.0)
    after, before = merged(bank, samples, origins, how)
    assert len(set(after.origins.numbers.tolist())) == len(after) <= size

    again, done = merged(after, samples, origins, how)
    assert done.bank is None
    assert done.taken == done.left == 0
    assert (done.duplicates, done.dropped) == (before.duplicates, before.dropped)
    assert again is after

    order = rng.permutation(40)
    shuffled, _ = merged(bank, samples[order], origins[order], how)
    assert shuffled.fingerprint == after.fingerprint
    np.testing.assert_array_equal(shuffled.origins.numbers, after.origins.numbers)


@given(
    seed=st.integers(0, 10_000),
    size=st.integers(1, 20),
    share=st.floats(0, 1),
    cut=st.integers(0, 25),
)
def test_samples_in_two_parts_are_samples_at_once(seed, size, share, cut):
    rng = np.random.default_rng(seed)
    bank = bank_of(np.eye(33)[:8])
    samples, origins = np.eye(33)[8:], sampled(rng.permutation(500)[:25], rng.integers(0, 9, 25))
    how = terms(size, seed_share=share, half_life=3.0)
    at_once, _ = merged(bank, samples, origins, how)
    first, _ = merged(bank, samples[:cut], origins[np.arange(cut)], how)
    then, _ = merged(first, samples[cut:], origins[np.arange(cut, 25)], how)
    assert set(then.origins.numbers.tolist()) == set(at_once.origins.numbers.tolist())


def test_a_query_like_one_that_is_held_is_counted_and_not_added():
    bank = bank_of([[1, 0, 0], [1, 0, 0], [0, 1, 0]])
    samples = [[5, 0.01, 0], [0, 0, 1], [0, 0.02, 3], [1, 1, 0]]
    for older, newer in ((2, 3), (3, 2)):
        at = [9, 9 if older == 2 else 500, 9 if older == 3 else 500, 9]
        after, done = merged(bank, samples, sampled([1, 2, 3, 4], at), terms(10))
        assert (done.taken, done.duplicates, done.dropped, done.left) == (2, 2, 0, 0)
        np.testing.assert_array_equal(after.vectors[:3], bank.vectors)
        assert set(after.origins.numbers[3:].tolist()) == {newer, 4}


def test_a_query_like_one_that_leaves_is_no_duplicate():
    bank = bank_of([[1, 0]])
    after, done = merged(bank, [[1, 0.001], [0, 1]], sampled([1, 2], [500, 400]), terms(1))
    assert (done.taken, done.left) == (1, 1)
    assert after.origins.numbers.tolist() == [1]
    assert (
        merged(after, [[1, 0.001], [0, 1]], sampled([1, 2], [500, 400]), terms(1))[1].bank is None
    )


def test_what_points_nowhere_is_lost():
    samples = [[0, 0], [np.nan, 1], [np.inf, 0], [0, 2]]
    after, done = merged(bank_of([[1, 0]]), samples, sampled(range(4), [5] * 4), terms(9))
    assert (done.taken, done.dropped) == (1, 3)
    assert after.vectors.tolist() == [[1, 0], [0, 2]]


def test_queries_that_stay_keep_their_rows():
    bank = bank_of(np.eye(20)[:10])
    after, done = merged(
        bank, np.eye(20)[10:], sampled(range(10), [4] * 10), terms(10, half_life=2.0)
    )
    stayed = np.flatnonzero((after.vectors == bank.vectors).all(1))
    assert len(stayed) == 10 - done.left == 10 - done.taken
    assert 0 < done.left < 10
    np.testing.assert_array_equal(after.origins.numbers[stayed], bank.origins.numbers[stayed])
    assert merged(bank, np.eye(20)[:0], sampled([], []), terms(10))[1].bank is None


def test_a_smaller_bank_lets_go_of_the_rest():
    bank = bank_of(np.eye(10))
    after, done = merged(bank, np.eye(10)[:0], sampled([], []), terms(4))
    assert (len(after), done.left) == (4, 6)


def test_one_of_each_kind_of_alike_vectors():
    rows = np.array([[1, 0], [2, 0.001], [0, 1], [0.001, 5], [1, 1]], np.float32)
    assert distinct_vectors(rows, 0.99).tolist() == [True, False, True, False, True]
    steps = np.radians([0, 7, 14])
    assert distinct_vectors(np.column_stack([np.cos(steps), np.sin(steps)]), 0.99).tolist() == [
        True,
        False,
        True,
    ]
    many = np.repeat(np.eye(300, dtype=np.float32), 3, 0)
    assert distinct_vectors(many, 0.99).reshape(300, 3).sum(1).tolist() == [1] * 300
