"""The clock of a service set forward, from one scheduled time to the next."""

import time
from collections import defaultdict
from zoneinfo import ZoneInfo

from milvus_hubness.serve.reconcile import now


class Day:
    """Moves the clock from one scheduled time to the next, and lets what is due then come to its end."""

    def __init__(self, clock, running):
        self._clock, self._workers = clock, running.service._workers
        tables = [worker.table for worker in self._workers]
        self._timings = [
            (table.name, timing) for table in tables for timing in (table.fill, table.refresh)
        ]
        self._next = [timing.after(now(), ZoneInfo("UTC")) for _, timing in self._timings]
        self.settle()

    @property
    def next_time(self):
        return min(self._next)

    def due(self, moment):
        """The scheduled times of each collection until this moment."""
        found = defaultdict(list)
        for number, (name, timing) in enumerate(self._timings):
            at = self._next[number]
            while at <= moment:
                found[name].append(at)
                at = timing.after(at, ZoneInfo("UTC"))
        return found

    def move_to(self, moment):
        """Until every worker has seen it, or is busy."""
        self._clock.move_to(moment)
        for number, (_, timing) in enumerate(self._timings):
            while self._next[number] <= moment:
                self._next[number] = timing.after(self._next[number], ZoneInfo("UTC"))
        for worker in self._workers:
            worker._woken.set()
            while worker.next_run <= moment and worker.standing().running is None:
                time.sleep(0.0002)

    def settle(self):
        """Until every worker has done what is due, and waits again: it then sees twice that it is woken."""
        for worker in self._workers:
            for _ in range(2):
                worker._woken.set()
                while worker._woken.is_set() or worker._requested or worker.standing().running:
                    time.sleep(0.0002)
            assert worker.next_run > now()
