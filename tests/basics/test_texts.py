"""Numbers as messages show them."""

import pytest

from milvus_hubness.basics.texts import in_points, percent


@pytest.mark.parametrize(
    ("share", "decimals", "text"),
    [
        (-0.004, 0, "0%"),
        (-0.0004, 1, "0.0%"),
        (-0.03, 0, "-3%"),
        (0.1234, 1, "12.3%"),
        (0, 0, "0%"),
    ],
)
def test_a_share_that_is_rounded_to_zero_has_no_sign(share, decimals, text):
    assert percent(share, decimals) == text


@pytest.mark.parametrize(
    ("difference", "text"), [(-0.0002, "+0.0"), (-0.012, "−1.2"), (0.012, "+1.2")]
)
def test_a_difference_that_is_rounded_to_zero_has_one_sign(difference, text):
    assert in_points(difference) == text
