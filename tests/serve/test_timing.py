"""When something is due."""

from datetime import datetime, timedelta, timezone
from itertools import pairwise
from zoneinfo import ZoneInfo

import pytest

from milvus_hubness.errors import InvalidParameter
from milvus_hubness.serve.config import Calendar, Timing

UTC = timezone.utc


def times(text, after, count, zone=UTC):
    found = [after]
    for _ in range(count):
        found.append(Timing.parse(text).after(found[-1], zone))
    return found[1:]


@pytest.mark.parametrize(
    ("text", "seconds"), [("60s", 60), ("5m", 300), ("2h", 7_200), ("1d", 86_400)]
)
def test_intervals(text, seconds):
    found = times(text, datetime(2026, 1, 1, tzinfo=UTC), 4)
    assert {(later - former).total_seconds() for former, later in pairwise(found)} == {seconds}


def test_weekday_0_is_sunday_as_in_cron():
    first, second = times("0 3 * * 0", datetime(2026, 1, 1, tzinfo=UTC), 2)
    assert (first.isoweekday(), first.hour) == (7, 3)
    assert second - first == timedelta(days=7)
    assert times("0 3 * * 7", datetime(2026, 1, 1, tzinfo=UTC), 1) == [first]


def test_of_a_day_and_a_weekday_either_will_do():
    """1 January 2026 is a Thursday."""
    found = times("0 0 15 * 1", datetime(2026, 1, 1, tzinfo=UTC), 4)
    assert [moment.day for moment in found] == [5, 12, 15, 19]


def test_cron_is_meant_in_the_time_zone():
    [moment] = times("30 4 * * *", datetime(2026, 7, 1, tzinfo=UTC), 1, ZoneInfo("Europe/Berlin"))
    assert moment.astimezone(UTC) == datetime(2026, 7, 1, 2, 30, tzinfo=UTC)


def test_cron_comes_once_on_days_on_which_the_clock_is_set():
    """At 02:30 there is no such time on 29 March 2026, and there are two on 25 October."""
    for month, day in ((3, 28), (10, 24)):
        found = times(
            "30 2 * * *", datetime(2026, month, day, 12, tzinfo=UTC), 3, ZoneInfo("Europe/Berlin")
        )
        assert [moment.day for moment in found] == [day + 1, day + 2, day + 3]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "neither an interval"),
        ("60", "neither an interval"),
        ("5 minutes", "neither an interval"),
        ("* * * *", "neither an interval"),
        ("0s", "from a second to a year"),
        ("99999999999d", "from a second to a year"),
        ("61 * * * *", "bad minute"),
        ("* * * * mun", "bad day-of-week"),
        ("0 0 30 2 *", "never fires|bad day-of-month"),
    ],
)
def test_what_is_wrong_is_told(text, said):
    with pytest.raises(InvalidParameter, match=said):
        Timing.parse(text)


def test_times_that_passed_are_counted():
    first = datetime(2026, 1, 1, tzinfo=UTC)
    calendar = Calendar({"minute": Timing.parse("60s"), "hour": Timing.parse("0 * * * *")}, UTC)
    calendar.begin(first)
    assert calendar.passed(first) == {}
    assert calendar.passed(first + timedelta(minutes=10)) == {"minute": 10}
    assert calendar.passed(first + timedelta(minutes=10)) == {}
    assert calendar.passed(first + timedelta(minutes=61)) == {"minute": 51, "hour": 1}
    assert calendar.next_times["hour"] == first + timedelta(hours=2)


def test_in_the_hour_that_comes_twice_the_earlier_time_is_first():
    """At 02:06 in summer time on 25 October 2026, 02:50 comes next, and then 02:05 in winter time."""
    timings = {"fill": Timing.parse("5 * * * *"), "refresh": Timing.parse("50 2 * * *")}
    calendar = Calendar(timings, ZoneInfo("Europe/Berlin"))
    calendar.begin(datetime(2026, 10, 25, 0, 6, tzinfo=UTC))
    assert min(calendar.next_times.values()) == datetime(2026, 10, 25, 0, 50, tzinfo=UTC)


def test_a_clock_that_was_wrong_at_the_start_holds_nothing_up():
    right = datetime(2026, 1, 1, tzinfo=UTC)
    timings = {"minute": Timing.parse("60s"), "day": Timing.parse("0 3 * * *")}
    calendar = Calendar(timings, UTC)
    calendar.begin(right + timedelta(days=365))
    assert calendar.passed(right) == {}
    assert calendar.next_times["minute"] == right + timedelta(minutes=1)
    assert calendar.next_times["day"] == right + timedelta(hours=3)


def test_a_clock_that_is_put_right_by_seconds_repeats_no_run():
    night = datetime(2026, 1, 1, 3, tzinfo=UTC)
    calendar = Calendar({"day": Timing.parse("0 3 * * *")}, UTC)
    calendar.begin(night - timedelta(hours=1))
    assert calendar.passed(night) == {"day": 1}
    assert calendar.passed(night - timedelta(seconds=2)) == {}
    assert calendar.passed(night + timedelta(seconds=2)) == {}
