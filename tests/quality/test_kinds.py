"""Verdicts, tuning and reports that compare items by their kinds."""

from dataclasses import replace

import numpy as np
import pytest

from milvus_hubness import InvalidInput, QueryBank
from milvus_hubness.correction.kinds import GalleryKinds, KindRule, Kinds
from milvus_hubness.correction.near_copies import with_groups
from milvus_hubness.quality.labelled import LabelledQueries
from milvus_hubness.quality.retrieval import PositiveRanks
from milvus_hubness.quality.right_items import RightItems
from milvus_hubness.quality.tuning import judge_bank, tune
from milvus_hubness.reports.page import render
from tests.support.diagnoses import diagnose
from tests.support.mixed_kinds import mixed_kinds, scores_by_kind


@pytest.fixture(scope="module")
def mixed():
    return mixed_kinds()


@pytest.mark.parametrize("factor", [0.0, 1.0, 0.4])
def test_products_of_the_tables_are_the_scores_of_searches(mixed, factor):
    kinds = mixed.kinds
    table = kinds.item_table(mixed.items).astype(float)
    sent = kinds.query_table(mixed.queries, factor).astype(float)
    np.testing.assert_allclose(
        sent @ table.T, scores_by_kind(mixed, mixed.queries, factor), atol=2e-6
    )


def test_less_the_means_of_kinds_a_bank_of_queries_is_no_bank_of_items(mixed):
    """Both have the mean 0 then, and would be taken for one thing."""
    bank = QueryBank(mixed.bank)
    judged = judge_bank(bank, mixed.items, kinds=mixed.kinds)
    assert judged.verdict == "apply"
    assert "compared by kind" in judged.reason

    kinds = mixed.kinds
    at_one_point = QueryBank(kinds.centred_queries(mixed.bank))
    mistaken = judge_bank(at_one_point, kinds.centred_items(mixed.items))
    assert "looks like a bank of items" in mistaken.reason


def tuned(mixed, *, labelled):
    queries = LabelledQueries.of(mixed.queries, mixed.answers) if labelled else None
    return tune(QueryBank(mixed.bank), mixed.items, queries=queries, kinds=mixed.kinds)


@pytest.fixture(scope="module")
def by_labels(mixed):
    return tuned(mixed, labelled=True)


def test_labels_choose_kinds_where_they_are_apart(mixed, by_labels):
    kinds = by_labels.kinds
    assert (by_labels.kind, kinds.chosen, by_labels.verdict) == ("modality", True, "apply")
    assert kinds.gain.low > 0.3
    assert by_labels.interval.estimate > kinds.gain.estimate, "the former is over the raw search"
    assert all(row.kinds for row in by_labels.rows[1:])
    assert not by_labels.rows[0].kinds


def test_the_rows_of_the_comparison_are_those_of_the_definition(mixed, by_labels):
    """R@1 in float64: raw, the default at the agreement and in full, the means alone, and both with them."""
    kinds = mixed.kinds.kinds
    means = np.vstack([kinds.of_kinds, kinds.overall]).astype(float)[mixed.numbers]
    bank, queries = (rows.astype(float) for rows in (mixed.bank, mixed.queries))
    items, moved = mixed.items.astype(float), mixed.items.astype(float) - means
    mean_query = kinds.mean_query.astype(float)

    def right(scores, bias=0.0):
        return (np.argmax(scores - bias, axis=1) == mixed.answers).mean()

    def biases(bank, items, rows):
        log = with_groups(QueryBank(mixed.bank), mixed.items)
        log = replace(log, vectors=bank.astype(np.float32))
        small = items.astype(np.float32)
        return [row.estimator.unmeasured().fit(log, gallery=small).bias(small) for row in rows]

    raw, agreed, full, alone, agreed_by_kind, full_by_kind = by_labels.kinds.rows
    assert [row.kinds for row in by_labels.kinds.rows] == [False] * 3 + [True] * 3
    plain, by_kind = queries @ items.T, (queries - mean_query) @ moved.T
    assert raw.value == pytest.approx(right(plain), abs=0.002)
    assert alone.value == pytest.approx(right(by_kind), abs=0.002)
    for rows, scores, of_bank, of_items in (
        ((agreed, full), plain, bank, items),
        ((agreed_by_kind, full_by_kind), by_kind, bank - mean_query, moved),
    ):
        for row, bias in zip(rows, biases(of_bank, of_items, rows), strict=True):
            assert row.value == pytest.approx(right(scores, bias), abs=0.01)
    assert full_by_kind.estimator.strength == 1.0
    assert agreed_by_kind.estimator.strength == "agreement"
    assert full_by_kind.gain.estimate == pytest.approx(full_by_kind.value - raw.value)


def test_labels_leave_kinds_out_that_say_nothing():
    alike = mixed_kinds(gap=0.0)
    result = tuned(alike, labelled=True)
    assert (result.kind, result.kinds.chosen) == ("", False)
    assert result.kinds.gain.estimate <= 0
    assert not any(row.kinds for row in result.rows)
    without = tune(
        QueryBank(alike.bank), alike.items, queries=LabelledQueries.of(alike.queries, alike.answers)
    )
    assert without.kinds is None
    assert result.verdict == without.verdict == "apply"


def test_without_labels_the_verdict_decides_if_the_gap_is_real(mixed):
    result = tuned(mixed, labelled=False)
    assert result.kind == "modality"
    # As the jobs fit it by default.
    [blend] = result.choice.estimators
    assert (type(result.choice).__name__, blend.strength) == ("WithDemand", 1.0)
    assert "compared by kind" in result.reason

    alike = tuned(mixed_kinds(gap=0.0), labelled=False)
    assert alike.kind == ""
    assert alike.kinds.preference < 3 < result.kinds.preference
    assert "labelled pairs" in alike.kinds.reason


def test_topics_are_no_kinds_though_their_verdict_is_good():
    """Less the mean of its topic, an item no longer says what it is about."""
    alike = mixed_kinds(gap=0.0)
    # About as many queries look for one as for the other.
    common = alike.bank.mean(axis=0) / np.linalg.norm(alike.bank.mean(axis=0))
    across = alike.items[0] - (alike.items[0] @ common) * common
    numbers = (alike.items @ across > 0).astype(int)
    rule = KindRule(field="topic", values=("a", "b"))
    topics = GalleryKinds(Kinds.measured(rule, alike.items, numbers, alike.bank), numbers)
    result = tune(QueryBank(alike.bank), alike.items, kinds=topics)
    assert "with them 'apply'" in result.kinds.reason
    assert (result.kind, result.kinds.chosen) == ("", False)


def test_a_target_bank_has_no_kinds(mixed):
    with pytest.raises(InvalidInput, match="a target bank has no kinds") as caught:
        tune(QueryBank(mixed.bank), mixed.items, target_bank=mixed.items[:50], kinds=mixed.kinds)
    assert "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def diagnosis(mixed):
    return diagnose(
        mixed.queries,
        mixed.items,
        bias_by_kind(mixed),
        bank=mixed.bank,
        positives=mixed.answers,
        kinds=mixed.kinds,
        strength=0.8,
        strengths=[],
    )


def bias_by_kind(mixed):
    """Float64 biases of NNN(8, 0.75) on the vectors less their means."""
    kinds = mixed.kinds
    items = kinds.centred_items(mixed.items).astype(float)
    scores = kinds.centred_queries(mixed.bank).astype(float) @ items.T
    return 0.75 * np.sort(scores, axis=0)[-8:].mean(axis=0)


def test_a_diagnosis_by_kind_has_the_figures_of_searches(mixed, diagnosis):
    raw = scores_by_kind(mixed, mixed.queries, 0.0)
    corrected = scores_by_kind(mixed, mixed.queries) - 0.8 * bias_by_kind(mixed)
    first = [scores.argmax(axis=1) for scores in (raw, corrected)]
    top = [np.argsort(-scores, axis=1)[:, :10] for scores in (raw, corrected)]
    for value, found in zip((diagnosis.value_before, diagnosis.value_after), first, strict=True):
        assert value == pytest.approx((found == mixed.answers).mean(), abs=0.002)

    assert diagnosis.kind == "modality"
    assert [each.shares.name for each in diagnosis.kinds] == ["photo", "text", "no kind"]
    for number, each in zip((0, 1, -1), diagnosis.kinds, strict=True):
        of_kind = mixed.numbers == number
        wanted = of_kind[mixed.answers]
        shares = each.shares
        assert shares.gallery == pytest.approx(of_kind.mean())
        assert shares.right.estimate == pytest.approx(wanted.mean())
        for interval, found in zip((shares.first_before, shares.first_after), first, strict=True):
            assert interval.estimate == pytest.approx(of_kind[found].mean(), abs=0.005)
        for interval, found in zip((shares.top_before, shares.top_after), top, strict=True):
            assert interval.estimate == pytest.approx(of_kind[found].mean(), abs=0.005)
        assert each.queries == wanted.sum()
        for value, found in zip((each.value_before, each.value_after), first, strict=True):
            right = (found == mixed.answers)[wanted].mean()
            assert value == pytest.approx(right, abs=0.01)
    photos = diagnosis.kinds[0]
    assert photos.value_before < 0.02
    assert photos.gain.low > 0.5


def test_strength_0_is_raw_and_the_means_alone_are_a_point_of_their_own(mixed, diagnosis):
    points = [(point.strength, point.by_kind) for point in diagnosis.strengths]
    assert points == [(0.0, False), (0.0, True), (0.8, True)]
    alone = scores_by_kind(mixed, mixed.queries).argmax(axis=1)
    right = (alone == mixed.answers).mean()
    assert diagnosis.strengths[1].value.estimate == pytest.approx(right, abs=0.003)
    plain = diagnose(
        mixed.queries, mixed.items, bias_by_kind(mixed), positives=mixed.answers, strengths=[]
    )
    assert diagnosis.before == plain.before
    assert (plain.kind, plain.kinds) == (None, [])


def test_the_page_and_json_show_each_kind(diagnosis):
    page = render(diagnosis)
    photos = diagnosis.kinds[0]
    assert "By kind: modality" in page
    assert f"{photos.shares.right.estimate:.1%}" in page
    assert f"{photos.value_after:.1%}" in page
    assert "no kind" in page
    stored = diagnosis.to_dict()["kinds"][0]
    assert stored["value_after"] == photos.value_after
    assert stored["shares"]["first_after"]["estimate"] == photos.shares.first_after.estimate
    assert "Items whose kind is text" in diagnosis.summary[-1]


def test_with_several_right_items_each_kind_counts_its_own():
    """One query with a photo and a text: the text in front makes the text's recall 1, not the photo's."""
    right = RightItems(np.array([7, 4, 4]), np.array([0, 2, 3]), np.array([2.0, 1.0, 1.0]))
    ranks = PositiveRanks(np.array([1, 2, 3]), right)
    inside = np.arange(9) == 4
    has_one, of_photos = ranks.among(inside)
    assert has_one.tolist() == [True, True]
    assert of_photos.ranks.tolist() == [2, 3]
    assert of_photos.right.grades.tolist() == [1.0, 1.0]
    has_one, of_texts = ranks.among(~inside)
    assert has_one.tolist() == [True, False]
    assert (of_texts.ranks.tolist(), of_texts.right.starts.tolist()) == ([1], [0, 1])


def test_a_gate_decides_on_the_search_by_kind_alone(mixed):
    """So clients have it: a gate limits biases, not kinds."""
    activated = np.zeros(len(mixed.items), bool)
    activated[::2] = True
    bias = bias_by_kind(mixed)
    gated = diagnose(
        mixed.queries,
        mixed.items,
        bias,
        positives=mixed.answers,
        kinds=mixed.kinds,
        activated=activated,
        strengths=[],
    )
    alone = scores_by_kind(mixed, mixed.queries)
    is_corrected = activated[alone.argmax(axis=1)]
    first = np.where(is_corrected, (alone - bias).argmax(axis=1), alone.argmax(axis=1))
    assert gated.value_after == pytest.approx((first == mixed.answers).mean(), abs=0.003)
    assert 0.2 < is_corrected.mean() < 0.8
