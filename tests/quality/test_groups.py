"""Shares of the answers by group: by hand, and as correction takes away a planted imbalance."""

import re

import numpy as np
import pytest

from milvus_hubness.correction.estimators import NNN
from milvus_hubness.errors import InvalidInput
from milvus_hubness.quality.groups import by_value, shares
from milvus_hubness.quality.right_items import RightItems
from milvus_hubness.reports.page import render
from tests.support.diagnoses import diagnose

N_ITEMS, N_QUERIES, DIM = 300, 600, 24


@pytest.fixture(scope="module")
def planted():
    """A third of the items are lamps, which all queries are nearer to than they should; answers are evenly right."""
    rng = np.random.default_rng(5)
    gallery = rng.normal(size=(N_ITEMS, DIM))
    lamp = np.arange(N_ITEMS) % 3 == 0
    gallery[:, 0] = np.where(lamp, 4, 0)
    positives = np.arange(N_QUERIES + 900) % N_ITEMS
    queries = gallery[positives] + rng.normal(size=(len(positives), DIM))
    queries[:, 0] = 2
    bank, queries = queries[N_QUERIES:], queries[:N_QUERIES]
    fields = [{"kind": "lamp" if one else "chair"} for one in lamp]
    bias = NNN(16, 1.0).fit(bank).bias(gallery)
    labelled = {"fields": fields, "positives": positives[:N_QUERIES], "group_by": "kind"}
    return queries, gallery, bias, labelled


def test_correction_takes_away_a_planted_imbalance(planted):
    queries, gallery, bias, labelled = planted
    diagnosis = diagnose(queries, gallery, bias, strengths=[], **labelled)
    chairs, lamps = diagnosis.groups
    assert (chairs.value, chairs.items, lamps.value, lamps.items) == ("chair", 200, "lamp", 100)
    assert lamps.gallery == pytest.approx(1 / 3)
    assert lamps.right.estimate == pytest.approx(1 / 3)
    assert lamps.excess_before.low > 0.2, "lamps take what is due to chairs"
    assert lamps.excess_after.low < lamps.excess_after.estimate < 0.05
    assert abs(lamps.excess_after.estimate) < lamps.excess_before.estimate / 4
    assert lamps.top_before.low > lamps.top_after.high
    assert (
        f"They take {lamps.first_before.estimate:.1%} of the first answers without"
        in diagnosis.summary[-1]
    )
    page = render(diagnosis)
    assert "Shares of the answers by kind" in page
    cells = rf"<td[^>]*>{lamps.gallery:.1%}</td><td[^>]*>{lamps.right.estimate:.1%}</td>"
    assert re.search(cells, page)
    assert diagnosis.to_dict()["groups"][1]["first_after"]["estimate"] == lamps.first_after.estimate


def test_without_labels_the_excess_is_over_the_share_of_the_gallery(planted):
    queries, gallery, bias, labelled = planted
    lamps = diagnose(queries, gallery, bias, strengths=[], **labelled | {"positives": None}).groups[
        1
    ]
    assert lamps.right is None
    assert lamps.excess_before.estimate == pytest.approx(lamps.first_before.estimate - 1 / 3)


def test_shares_by_hand():
    members = [
        ("a", np.array([True, True, False, False])),
        ("b", np.array([False, False, True, True])),
    ]
    before, after = (
        np.array([[0, 1], [0, 2], [1, 3], [2, 3]]),
        np.array([[3, 1], [0, 2], [2, 3], [2, 1]]),
    )
    a, b = shares(members, before, after, RightItems.of([[0], [0, 3], [3], [2]]))
    assert [a.right.estimate, b.right.estimate] == [0.375, 0.625]
    assert [a.first_before.estimate, a.first_after.estimate] == [0.75, 0.25]
    assert [b.top_before.estimate, b.top_after.estimate] == [0.5, 0.625]
    assert [a.excess_before.estimate, b.excess_after.estimate] == [0.375, 0.125]
    resampled = np.random.default_rng(0).choice([1, 1, 1, 0], (20_000, 4)).mean(1)
    assert a.first_before[1:] == pytest.approx(np.quantile(resampled, [0.025, 0.975]), abs=0.13)
    with pytest.raises(InvalidInput, match="at least two queries"):
        shares(members, before[:1], after[:1], None)


def test_further_values_share_a_group_and_a_field_that_is_missing_is_named():
    fields = [{"price": n if n < 11 else n % 40} for n in range(60)] + [{}]
    groups = by_value(fields, "price", "--group-by")
    assert len(groups) == 13
    assert groups[-1][0] is None
    assert sum(inside.astype(int) for _, inside in groups).tolist() == [1] * 61
    with pytest.raises(
        InvalidInput, match="no scalar field 'kind': choose one of price with --group-by"
    ):
        by_value(fields, "kind", "--group-by")
