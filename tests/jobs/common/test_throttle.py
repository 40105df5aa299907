"""How fast a migration writes, seen by who writes."""

import threading
import time
from itertools import pairwise

import pytest

from milvus_hubness.errors import InvalidParameter
from milvus_hubness.jobs.common.progress import Throttle


class Time:
    """A clock that stands still but for who waits. `at` calls something when a time is reached."""

    def __init__(self):
        self.now = 100.0
        self.began = self.now
        self._due = []

    @property
    def passed(self):
        return self.now - self.began

    def at(self, passed, call):
        self._due.append((self.began + passed, call))
        self._due.sort(key=lambda each: each[0])

    def clock(self):
        return self.now

    def wait(self, condition, seconds):
        if self._due and self._due[0][0] <= self.now + seconds:
            self.now, call = self._due.pop(0)
            call()
        else:
            assert seconds < 3_000, "nobody will end this wait"
            self.now += seconds


@pytest.fixture
def time_():
    return Time()


@pytest.fixture
def throttled(time_):
    return lambda *limits: Throttle(*limits, clock=time_.clock, wait=time_.wait)


def admitted_within(throttle, time_, seconds, rows):
    """How many rows were admitted up to then."""
    requests = 0
    while True:
        throttle.admit(rows)
        if time_.passed > seconds:
            return requests * rows
        requests += 1


@pytest.mark.parametrize("rows", [1, 7, 100, 350])
def test_rows_per_second_are_held(throttled, time_, rows):
    admitted = admitted_within(throttled(100), time_, 60, rows)
    assert 100 * 60 - rows <= admitted <= 100 * 61 + rows


def test_without_limits_nobody_waits(throttled, time_):
    throttle = throttled()
    for _ in range(1_000):
        throttle.admit(10_000)
    assert time_.passed == 0


def test_after_a_rest_no_more_than_one_second_is_made_up_for(throttled, time_):
    throttle = throttled(100)
    throttle.admit(100)
    time_.now += 3_600
    resumed_at = time_.passed
    for _ in range(30):
        throttle.admit(10)
    assert time_.passed - resumed_at == pytest.approx(2, abs=0.01)


def test_a_request_above_the_rate_is_admitted_and_paid_for_by_the_next(throttled, time_):
    throttle = throttled(100)
    throttle.admit(1_000)
    assert time_.passed == 0
    throttle.admit(100)
    assert time_.passed == pytest.approx(10)


def test_a_new_rate_ends_the_wait_under_the_old_one(throttled, time_):
    throttle = throttled(1)
    throttle.admit(1_000)
    time_.at(5, lambda: throttle.set_rate(rows_per_second=1_000))
    throttle.admit(500)
    assert time_.passed == pytest.approx(5.5)


def test_a_rate_that_is_set_again_gives_no_second_burst(throttled, time_):
    throttle = throttled(100)
    for _ in range(20):
        throttle.set_rate(rows_per_second=100, chunk_seconds=None)
        throttle.admit(100)
    assert time_.passed == pytest.approx(19)


def test_a_rate_can_be_taken_away(throttled, time_):
    throttle = throttled(1)
    throttle.set_rate(rows_per_second=None)
    throttle.admit(10_000)
    throttle.admit(10_000)
    assert time_.passed == 0


def test_a_pause_lasts_until_every_reason_is_gone(throttled, time_):
    throttle = throttled()
    assert throttle.pause("user")
    assert throttle.pause("the control file")
    assert not throttle.pause("user")
    time_.at(3, lambda: throttle.resume("user"))
    time_.at(8, lambda: throttle.resume("the control file"))
    throttle.admit(1)
    assert time_.passed == 8
    assert not throttle.resume("user")


def test_a_pause_holds_who_already_waits_for_the_rate(throttled, time_):
    throttle = throttled(10)
    throttle.admit(100)
    time_.at(2, lambda: throttle.pause("user"))
    time_.at(60, lambda: throttle.resume("user"))
    throttle.admit(10)
    assert time_.passed == pytest.approx(60)


def test_stopping_raises_in_who_waits_and_in_who_comes_later(throttled, time_):
    throttle = throttled()
    throttle.pause("user")
    time_.at(2, lambda: throttle.stop(ValueError("disk full")))
    with pytest.raises(ValueError, match="disk full"):
        throttle.admit(1)
    throttle.stop(RuntimeError("later"))
    with pytest.raises(ValueError, match="disk full"):
        throttle.admit(0)


def test_looking_for_a_stop_is_not_held_up_by_the_rate(throttled, time_):
    throttle = throttled(1)
    throttle.admit(1_000)
    throttle.admit(0)
    assert time_.passed == 0


def test_real_threads_are_woken():
    throttle = Throttle()
    throttle.pause("user")
    admitted = threading.Event()
    thread = threading.Thread(target=lambda: (throttle.admit(1), admitted.set()))
    thread.start()
    assert not admitted.wait(0.05)
    resumed_at = time.monotonic()
    throttle.resume("user")
    assert admitted.wait(10)
    assert time.monotonic() - resumed_at < 5
    thread.join()


def write_for(throttle, requests, seconds_for):
    """Sizes and times of so many requests, each of as many rows as the throttle says."""
    result = []
    for _ in range(requests):
        rows = throttle.rows_per_request(1_000, 100_000)
        throttle.took(rows, seconds_for(rows))
        result.append((rows, seconds_for(rows)))
    return result


@pytest.mark.parametrize("fixed", [0.0, 0.1, 0.4])
def test_requests_come_to_take_chunk_seconds_also_when_the_writer_slows_down(throttled, fixed):
    throttle = throttled(None, 1.0)
    told = write_for(throttle, 20, lambda rows: fixed + 0.0001 * rows)
    assert told[-1][1] == pytest.approx(1, rel=0.05)
    slowed = write_for(throttle, 40, lambda rows: fixed + 0.0003 * rows)
    assert slowed[0][1] > 1.5
    assert slowed[-1][1] == pytest.approx(1, rel=0.05)
    sizes = [rows for rows, _ in told + slowed]
    steps = [after / before for before, after in pairwise(sizes)]
    assert all(0.499 < step < 2.001 for step in steps)


def test_requests_shrink_no_further_than_16_rows_and_grow_no_further_than_the_ceiling(throttled):
    throttle = throttled(None, 1.0)
    assert write_for(throttle, 20, lambda rows: 50.0)[-1][0] == 16
    assert write_for(throttle, 30, lambda rows: 0.0)[-1][0] == 100_000
    assert write_for(throttle, 3, lambda rows: 50.0)[-1][0] <= 50_000


def test_the_few_rows_at_the_end_of_a_partition_do_not_steer(throttled):
    throttle = throttled(None, 1.0)
    steady = write_for(throttle, 20, lambda rows: 0.1 + 0.0001 * rows)[-1][0]
    for _ in range(10):
        assert throttle.rows_per_request(1_000, 5) == 5
        throttle.took(5, 0.1005)
    assert throttle.rows_per_request(1_000, 100_000) == pytest.approx(steady, rel=0.05)


def test_a_request_is_no_more_than_the_rate_allows_for_a_second(throttled):
    assert throttled(200).rows_per_request(1_000, 5_000) == 200
    assert throttled(2).rows_per_request(1_000, 5_000) == 16


def test_without_chunk_seconds_requests_are_as_large_as_ever(throttled):
    throttle = throttled()
    assert {rows for rows, _ in write_for(throttle, 5, lambda rows: 60.0)} == {1_000}
    assert throttle.rows_per_request(1_000, 300) == 300


@pytest.mark.parametrize("value", [0, -3, float("nan"), float("inf"), 10**400, "7", True, [1]])
@pytest.mark.parametrize("name", ["rows_per_second", "chunk_seconds"])
def test_limits_out_of_range_are_refused_and_change_nothing(name, value):
    with pytest.raises(InvalidParameter, match=name):
        Throttle(**{name: value})
    throttle = Throttle(5, 7)
    with pytest.raises(InvalidParameter, match=name):
        throttle.set_rate(**{"rows_per_second": 9, "chunk_seconds": 9, name: value})
    limits = throttle.snapshot()
    assert (limits["rows_per_second"], limits["chunk_seconds"]) == (5, 7)


def test_a_limit_that_does_not_exist_is_refused():
    with pytest.raises(InvalidParameter, match="rows_per_minute"):
        Throttle().set_rate(rows_per_minute=3)


def test_the_snapshot_says_who_paused():
    throttle = Throttle(50)
    throttle.pause("the control file")
    throttle.pause("user")
    assert throttle.snapshot() == {
        "paused_by": ["the control file", "user"],
        "rows_per_second": 50,
        "chunk_seconds": None,
    }


def test_who_only_asks_whether_to_stop_does_not_wait():
    throttle = Throttle()
    throttle.pause("somebody")
    throttle.check()
    throttle.stop(ValueError("enough"))
    with pytest.raises(ValueError, match="enough"):
        throttle.check()
