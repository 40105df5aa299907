"""Rankings that are saved: their order survives float32, and their figures are those of the diagnosis."""

import json

import ir_measures
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from milvus_hubness.quality.rankings import falling, rankings
from milvus_hubness.quality.retrieval import Measure, ranks
from milvus_hubness.quality.right_items import RightItems
from milvus_hubness.reports.runs import RunFiles
from tests.support.diagnoses import diagnose

NAMES = {"R@1": "Success@1", "MRR": "RR", "MAP": "AP", "nDCG@10": "nDCG@10"}


@given(arrays(np.float32, st.integers(1, 40), elements=st.floats(-4, 4, width=32)))
def test_each_score_is_below_the_one_before_and_no_larger_than_it_was(scores):
    scores = np.sort(scores)[::-1]
    result = falling(scores)
    assert result.dtype == np.float32
    assert (np.diff(result) < 0).all()
    assert (result <= np.maximum(scores, 0) + np.minimum(scores, 0) * (scores < -1e-37)).all()
    assert np.allclose(result, scores, atol=4e-5)


def test_scores_that_fall_already_stay_exactly():
    scores = np.float32([3, 0.1, 1e-7, 0, -1e-7, -2])
    np.testing.assert_array_equal(falling(scores), scores)


@pytest.mark.parametrize("depth", [1, 7, 60, 500])
def test_the_first_items_are_those_of_a_sort_with_right_rows_first_among_equal_ones(depth):
    rng = np.random.default_rng(1)
    gallery = rng.integers(-1, 2, (60, 3)).astype(np.float32)
    queries = rng.integers(-1, 2, (25, 3)).astype(np.float32)
    positives = [rng.choice(60, rng.integers(1, 5), replace=False) for _ in range(25)]
    of_positives = ranks(queries, gallery, RightItems.of(positives))
    result = list(rankings(queries, gallery, depth, of_positives))
    assert len(result) == 25
    for query, right, ranking in zip(queries, positives, result, strict=True):
        is_right = np.isin(np.arange(60), right)
        expected = np.lexsort((~is_right, -(gallery @ query)))[:depth]
        np.testing.assert_array_equal(is_right[ranking.items], is_right[expected])
        np.testing.assert_array_equal((gallery @ query)[ranking.items], (gallery @ query)[expected])
        assert len(set(ranking.items.tolist())) == min(depth, 60)


def test_with_a_gate_the_corrected_run_is_the_gated_one(tmp_path):
    rng = np.random.default_rng(2)
    gallery = rng.normal(size=(80, 4)).astype(np.float32)
    gallery[40:] = gallery[:40]
    queries = rng.normal(size=(50, 4)).astype(np.float32)
    positives = [rng.choice(80, rng.integers(1, 6), replace=False).tolist() for _ in range(50)]
    grades = [rng.integers(1, 4, len(items)).tolist() for items in positives]
    relevant = {
        str(query): {f"d{item}": grade for item, grade in zip(*of_query, strict=True)}
        for query, of_query in enumerate(zip(positives, grades, strict=True))
    }
    files = RunFiles(tmp_path / "raw.json", tmp_path / "corrected.json", depth=80)
    activated = rng.random(80) < 0.5
    found = {}
    for name, theirs in NAMES.items():
        diagnosis = diagnose(
            queries,
            gallery,
            rng.normal(size=80) / 2,
            positives=positives,
            grades=grades,
            measure=Measure.of(name),
            activated=activated,
            strength=0.7,
            runs=files,
            keys=[f"d{item}" for item in range(80)],
        )
        for path, ours in (
            (files.raw, diagnosis.value_before),
            (files.corrected, diagnosis.value_after),
        ):
            measure = ir_measures.parse_measure(theirs)
            run = json.loads(path.read_text())
            values = ir_measures.calc_aggregate([measure], relevant, run)
            assert values[measure] == pytest.approx(ours, abs=1e-6)
            found[path] = run
        is_same = [list(found[files.raw][q]) == list(found[files.corrected][q]) for q in relevant]
        assert 5 < sum(is_same) < 45, "the gate leaves some queries as they are"
