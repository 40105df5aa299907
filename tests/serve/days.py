"""The clock of a service set forward, from one scheduled time to the next."""

import time
from collections import Counter

from apscheduler.events import EVENT_JOB_EXECUTED, EVENT_JOB_SUBMITTED


class Day:
    """Moves the clock from one scheduled time to the next, and lets what is due then come to its end."""

    def __init__(self, clock, running):
        self._clock, self._service = clock, running.service
        self._scheduler = self._service._scheduler._scheduler
        self._counts = Counter()
        self._scheduler.add_listener(self._count, EVENT_JOB_EXECUTED | EVENT_JOB_SUBMITTED)

    def _count(self, event):
        self._counts[event.code] += 1

    @property
    def jobs(self):
        return self._scheduler.get_jobs()

    @property
    def next_time(self):
        return min(job.next_run_time for job in self.jobs)

    def move_to(self, moment):
        """Until everyone has been asked who is to be."""
        due = sum(job.next_run_time <= moment for job in self.jobs)
        asked = self._counts[EVENT_JOB_EXECUTED] + due
        self._clock.move_to(moment)
        self._scheduler.wakeup()
        while min(self._counts[EVENT_JOB_EXECUTED], self._counts[EVENT_JOB_SUBMITTED]) < asked:
            time.sleep(0.0002)

    def settle(self):
        while any(worker._requested or worker.standing().running for worker in self._service._workers):
            time.sleep(0.0002)
