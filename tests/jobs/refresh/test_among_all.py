"""The measure among all rows, of which only a part is in memory, is that of a search of all."""

import numpy as np
import pytest

from milvus_hubness.jobs.refresh.among_all import MOST_SCORES, values_among_all
from milvus_hubness.quality.outcomes import assess
from milvus_hubness.quality.retrieval import Measure
from milvus_hubness.quality.right_items import RightItems

ITEMS, SAMPLE, QUERIES, DIM = 4_000, 900, 600, 12


@pytest.fixture(scope="module")
def space():
    """Items of which some are equal, queries with one to four right ones in the first rows, and two biases."""
    rng = np.random.default_rng(2)
    items = rng.standard_normal((ITEMS, DIM)).astype(np.float32)
    items[SAMPLE : SAMPLE + 30] = items[:30]
    right = rng.integers(0, SAMPLE, QUERIES)
    queries = items[right] + 0.7 * rng.standard_normal((QUERIES, DIM))
    positives = [
        np.unique(np.r_[right[n], rng.permutation(SAMPLE)[: n % 4]]) for n in range(QUERIES)
    ]
    biases = [np.zeros(ITEMS, np.float32), rng.standard_normal(ITEMS).astype(np.float32)]
    # With the same biases, equal rows count as equal.
    biases[1][SAMPLE : SAMPLE + 30] = biases[1][:30]
    return items, queries.astype(np.float32), positives, biases


def parts_of(items, biases, size):
    for start in range(SAMPLE, ITEMS, size):
        block = slice(start, start + size)
        yield items[block], [bias[block] for bias in biases]


@pytest.mark.parametrize("measure", ["R@1", "R@5", "MRR", "MAP", "nDCG@10"])
@pytest.mark.parametrize("size", [370, ITEMS])
def test_it_is_the_measure_of_a_search_of_all(space, measure, size):
    items, queries, positives, biases = space
    if size == ITEMS:
        assert sum(map(len, positives)) * (ITEMS - SAMPLE) > MOST_SCORES, "some queries at a time"
    rng = np.random.default_rng(3)
    # A third of the queries are rows themselves, which are no answers.
    rows = [(7 * n) % SAMPLE if n % 3 == 0 else -1 for n in range(QUERIES)]
    own = [-1 if row in of_query else row for row, of_query in zip(rows, positives, strict=True)]
    grades = [rng.integers(1, 4, len(of_query)).astype(float) for of_query in positives]
    right = RightItems.of(positives, grades, own=np.array(own))
    chosen = Measure.of(measure)
    part = (items[:SAMPLE], [bias[:SAMPLE] for bias in biases])
    others = parts_of(items, biases, size)
    found = values_among_all(queries, *part, right, others, chosen)
    wanted = assess(queries, items, biases, right, chosen).values
    # Rows far behind, whose scores differ by the rounding of float32, may change places.
    np.testing.assert_allclose(found, wanted, atol=1e-4)
    assert assess(queries, *part, right, chosen).values.mean() > 1.1 * wanted.mean()
