"""The schedules: at each of its times a keeper is asked to look, and no time is lost unseen."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import datetime, timedelta, timezone, tzinfo

from apscheduler.events import (
    EVENT_JOB_MAX_INSTANCES,
    EVENT_JOB_SUBMITTED,
    JobSubmissionEvent,
)
from apscheduler.executors.pool import ThreadPoolExecutor
from apscheduler.schedulers.background import BackgroundScheduler

from milvus_hubness.serve.keeper import Keeper
from milvus_hubness.serve.look import now
from milvus_hubness.serve.looker import Wish
from milvus_hubness.serve.timing import Timing, count_between

SHARE_SECONDS = 10
SAME_TIME = timedelta(seconds=1)
"""A look that began no longer ago is the one for another schedule of the same moment."""

Missed = Callable[[Keeper, str, int], None]
"""Told of a keeper, why its times passed ("late": this process was held up; "running": the look before was
not over) and how many."""


class Ticker:
    """A tick only asks, so that none waits for a look: a keeper that looks already does so again after that,
    and of several times that passed while the process was held up the last is made up for. Both are told to
    `missed`. zone: in which cron is meant."""

    def __init__(self, keepers: Iterable[Keeper], zone: tzinfo, missed: Missed) -> None:
        self._missed = missed
        self._keepers: dict[str, tuple[Keeper, Wish]] = {}
        self._expected: dict[str, datetime] = {}
        self._scheduler = BackgroundScheduler(
            executors={"default": ThreadPoolExecutor(1)},
            job_defaults={"coalesce": True, "max_instances": 1, "misfire_grace_time": None},
            timezone=timezone.utc,
            daemon=True,
        )
        self._scheduler.add_listener(self._submitted, EVENT_JOB_SUBMITTED)
        self._scheduler.add_listener(self._dropped, EVENT_JOB_MAX_INSTANCES)
        for keeper in keepers:
            self._add(keeper, "pending", keeper.table.schedule, zone)
            self._add(keeper, "full", keeper.table.full_schedule, zone)
            if keeper.table.pending_share is not None:
                every = Timing(f"{SHARE_SECONDS}s", timedelta(seconds=SHARE_SECONDS))
                self._add(keeper, "share", every, zone)

    def start(self) -> None:
        self._scheduler.start()
        for job in self._scheduler.get_jobs():
            self._expected[job.id] = job.next_run_time

    def stop(self) -> None:
        if self._scheduler.running:
            self._scheduler.shutdown()

    @property
    def is_running(self) -> bool:
        return bool(self._scheduler.running)

    def next_look(self, keeper: Keeper) -> datetime | None:
        """When it will be asked to look at its rows again; None before the start."""
        if not self.is_running:
            return None
        times = [
            job.next_run_time
            for job in self._scheduler.get_jobs()
            if self._keepers[job.id][0] is keeper and self._keepers[job.id][1] != "share"
        ]
        return min((time for time in times if time is not None), default=None)

    def _add(self, keeper: Keeper, wish: Wish, timing: Timing, zone: tzinfo) -> None:
        name = f"{keeper.table.label} {wish}"
        self._keepers[name] = keeper, wish
        self._scheduler.add_job(self._tick, timing.trigger(zone), id=name, args=[keeper, wish])

    def _tick(self, keeper: Keeper, wish: Wish) -> None:
        looking_since = keeper.ask(wish)
        if wish != "share" and looking_since is not None and now() - looking_since > SAME_TIME:
            self._missed(keeper, "running", 1)

    def _submitted(self, event: JobSubmissionEvent) -> None:
        """A tick, which stands for times that passed before it."""
        self._tell_late(event, self._passed(event))

    def _dropped(self, event: JobSubmissionEvent) -> None:
        """A tick that the scheduler left out, as the one before had not even been able to ask."""
        keeper, wish = self._keepers[event.job_id]
        keeper.ask(wish)
        self._tell_late(event, self._passed(event) + 1)

    def _passed(self, event: JobSubmissionEvent) -> int:
        """How many times passed since the tick before."""
        trigger = self._scheduler.get_job(event.job_id).trigger
        at = event.scheduled_run_times[-1]
        passed = count_between(trigger, self._expected.get(event.job_id, at), at)
        self._expected[event.job_id] = trigger.get_next_fire_time(at, at) or at
        return passed

    def _tell_late(self, event: JobSubmissionEvent, count: int) -> None:
        keeper, wish = self._keepers[event.job_id]
        if count and wish != "share":
            self._missed(keeper, "late", count)
