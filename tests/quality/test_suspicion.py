"""The scan for planted hubs, on numbers."""

import numpy as np
import pytest

from milvus_hubness.errors import InvalidInput
from milvus_hubness.quality.suspicion import scan
from tests.support.planted import DIM, centroid, gallery, genuine, unit

ITEMS, BANK, USERS = gallery(rows=1000, queries=1600)


def planted(count, seed=0):
    return np.concatenate([ITEMS, centroid(USERS, count, seed)])


@pytest.mark.parametrize("count", [1, 10, 50])
def test_planted_rows_do_not_hide_behind_each_other(count):
    found = scan(BANK, planted(count))
    assert set(found.suspicious[:count]) == set(range(1000, 1000 + count))
    assert len(found.suspicious) <= count + 2, "genuine rows"
    assert found.share == pytest.approx(len(found.suspicious) / (1000 + count))
    assert found.exceeds(0.002) == (len(found.suspicious) > 2)


def test_a_genuine_gallery_is_not_suspicious():
    for seed in range(3):
        items, bank, _ = gallery(rows=1000, queries=1000, seed=seed)
        assert len(scan(bank, items).suspicious) <= 2


def test_the_reach_is_that_of_the_formula():
    rows = planted(5)
    scores = BANK.astype(float) @ rows.T.astype(float)
    references = np.sort(scores, axis=1)[:, ::-1][:, 16:26].mean(axis=1)
    expected = (scores > references[:, None]).mean(axis=0)
    for row in scan(BANK, rows).listed:
        assert row.reach == pytest.approx(expected[row.row], abs=2 / len(BANK))


def test_evidence_names_copies_of_queries_lengths_and_biases():
    copy = unit(BANK[7][None] + 0.01)
    long = 9 * ITEMS[:1]
    rows = np.concatenate([ITEMS, copy, long])
    biases = np.arange(len(rows), dtype=np.float32)
    found = scan(BANK, rows, biases=biases, top=len(rows))
    by_row = {row.row: row for row in found.listed}
    assert by_row[1000].nearest_query == 7
    assert by_row[1000].remarks == ("near copy of bank query 7",)
    assert "long vector" in by_row[1001].remarks
    assert by_row[1001].bias_quantile == 1
    assert by_row[0].bias_quantile == pytest.approx(1 / 1002)


def test_a_hub_of_one_topic_is_told_from_a_universal_one():
    rng = np.random.default_rng(1)
    centres = unit(rng.standard_normal((8, DIM)))
    topics = rng.integers(8, size=1600)
    queries = unit(centres[topics] + 0.5 * rng.standard_normal((1600, DIM)) / DIM**0.5)
    items = unit(rng.standard_normal((1000, DIM)))
    hubs = np.stack([unit(queries[topics == 3].mean(axis=0)), unit(queries.mean(axis=0))])
    found = scan(queries, np.concatenate([items, hubs]))
    by_row = {row.row: row for row in found.listed}
    assert by_row[1000].scope == "topic"
    assert by_row[1000].spread < 0.3 < by_row[1001].spread


def test_zero_and_repeated_vectors_are_faults_of_the_data():
    rows = np.concatenate(
        [ITEMS, np.zeros((2, DIM), np.float32), np.repeat(ITEMS[:1], 120, axis=0)]
    )
    found = scan(BANK, rows)
    assert found.zero_vectors == (1000, 1001)
    [group] = found.repeated
    assert group == (0, *range(1002, 1122))


def test_few_rows_are_refused_in_one_line():
    with pytest.raises(InvalidInput, match="199 rows are too few"):
        scan(BANK, ITEMS[:199])


def test_what_the_gate_knows_counts():
    known = np.zeros(1000, np.float32)
    known[5] = 1.5
    found = scan(BANK, ITEMS, by_guard=known)
    assert 5 in found.suspicious
    assert len(genuine(3)) == 3
