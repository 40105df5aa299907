"""A day of schedules under a clock that is set: no time is lost, and memory stays flat."""

import gc
import threading
import time
import tracemalloc
from collections import Counter, defaultdict
from datetime import datetime, timedelta, timezone

import pytest
import time_machine

from milvus_hubness.serve import ServicePolicy
from milvus_hubness.serve.reconcile import now
from tests.serve.days import Day
from tests.serve.worlds import Running, config_file, kept

START = datetime(2026, 3, 28, 0, 0, 30, tzinfo=timezone.utc)
CONFIG = """\
[[collection]]
name = "products"
fill = "60s"
refresh = "0 3 * * *"
hub_scan_rows = 0
[[collection]]
name = "videos"
fill = "*/5 * * * *"
refresh = "15 * * * *"
hub_scan_rows = 0
[[collection]]
name = "songs"
fill = "7m"
refresh = "0 3 * * *"
hub_scan_rows = 0
"""


class Galleries:
    """The job: rows come all the time and wait for the next look."""

    def __init__(self):
        self.waiting = defaultdict(list)
        self.waits = defaultdict(list)
        self.outcomes = defaultdict(list)
        self.slow = None
        self.held = False

    def wait_for_slow(self):
        """Until the look that is under way has begun."""
        while not self.held:
            time.sleep(0.0002)

    def add(self, moment):
        for name in ("products", "videos", "songs"):
            self.waiting[name].append(moment)

    def __call__(self, store, collection, options):
        self.outcomes[collection].append(now().timestamp())
        found, self.waiting[collection] = self.waiting[collection], []
        if self.slow is not None and collection == "products":
            self.held = True
            self.slow.wait(10)
        self.waits[collection] += [(now() - moment).total_seconds() for moment in found]
        count = len(found)
        return kept(
            collection, "pending" if found else "none", written=count, scanned=count, pending=count
        )


@pytest.fixture
def day(tmp_path, any_collection):
    """Histories are full, and rolled over, within hours."""
    galleries = Galleries()
    with (
        time_machine.travel(START, tick=False) as clock,
        Running(
            config_file(tmp_path, CONFIG + '[http]\nlisten = "127.0.0.1:0"\n'),
            galleries,
            policy=ServicePolicy(results=20),
        ) as running,
    ):
        running.wait_for("ready")
        yield Day(clock, running), galleries, running


def missed(running):
    found = Counter()
    for event in running.heard:
        if event.name == "missed":
            found[event.facts["collection"], event.facts["reason"]] += event.facts["count"]
    return found


def test_no_time_of_a_day_is_lost_and_memory_stays_flat(day):
    """Once the process stands still for ten minutes, once a look takes four."""
    day, galleries, running = day
    held_up, slept = START + timedelta(hours=5, seconds=10), timedelta(minutes=10)
    slow, took = START + timedelta(hours=9), timedelta(minutes=4)
    due, sizes, moment = defaultdict(list), {}, START
    while moment < START + timedelta(hours=24):
        before, moment = moment, day.next_time
        if before < held_up <= moment:
            moment = held_up + slept
        galleries.add(before + (moment - before) / 2)
        for name, times in day.due(moment).items():
            due[name] += map(datetime.timestamp, times)
        if before < slow <= moment:
            galleries.slow = threading.Event()
        day.move_to(moment)
        if galleries.slow is not None and moment < slow + took:
            galleries.wait_for_slow()
            continue
        if galleries.slow is not None:
            galleries.slow.set()
            ended = moment.timestamp()
            galleries.slow = None
        day.settle()
        running.heard = [event for event in running.heard if event.name == "missed"]
        hour = (moment - START) // timedelta(hours=1)
        if hour in (12, 16, 23):
            sizes[hour] = sizes.get(hour) or ours()
    tracemalloc.stop()
    every = {
        "products": timedelta(minutes=1),
        "videos": timedelta(minutes=5),
        "songs": timedelta(minutes=7),
    }
    for name, interval in every.items():
        longest = max(interval + slept, 2 * took)
        assert max(galleries.waits[name]) <= longest.total_seconds()
        for scheduled in due[name]:
            assert any(
                scheduled <= outcome <= scheduled + slept.total_seconds()
                for outcome in galleries.outcomes[name]
            )
    assert ended in galleries.outcomes["products"]
    found = missed(running)
    assert (found["products", "late"], found["products", "running"]) == (9, 4)
    assert len(due["products"]) == 24 * 60 + 1
    assert abs(sizes[23] - sizes[16]) < 20_000, sizes


def ours():
    """Bytes that are held of what this package and cronsim made since the first call."""
    if not tracemalloc.is_tracing():
        tracemalloc.start()
    gc.collect()
    packages = [tracemalloc.Filter(True, f"*/{name}/*") for name in ("milvus_hubness", "cronsim")]
    found = tracemalloc.take_snapshot().filter_traces(packages)
    return sum(trace.size for trace in found.traces)
