"""The schedules: at each of its times a worker is asked to look, and no time is lost unseen."""

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

from milvus_hubness.serve.keeper import Worker
from milvus_hubness.serve.look import now
from milvus_hubness.serve.looker import Task
from milvus_hubness.serve.timing import Timing, count_between

SHARE_SECONDS = 10
SAME_TIME = timedelta(seconds=1)
"""A look that began no longer ago is the one for another schedule of the same moment."""

Missed = Callable[[Worker, str, int], None]
"""Told of a worker, why its times passed ("late": this process was held up; "running": the look before was
not over) and how many."""


class Scheduler:
    """A tick only asks, so that none waits for an outcome: a worker that looks already does so again after
    that, and of several times that passed while the process was held up the last is made up for. Both are
    told to `missed`. zone: in which cron is meant."""

    def __init__(self, workers: Iterable[Worker], zone: tzinfo, missed: Missed) -> None:
        self._missed = missed
        self._workers: dict[str, tuple[Worker, Task]] = {}
        self._expected: dict[str, datetime] = {}
        self._scheduler = BackgroundScheduler(
            executors={"default": ThreadPoolExecutor(1)},
            job_defaults={"coalesce": True, "max_instances": 1, "misfire_grace_time": None},
            timezone=timezone.utc,
            daemon=True,
        )
        self._scheduler.add_listener(self._submitted, EVENT_JOB_SUBMITTED)
        self._scheduler.add_listener(self._dropped, EVENT_JOB_MAX_INSTANCES)
        for worker in workers:
            self._add(worker, "pending", worker.table.schedule, zone)
            self._add(worker, "full", worker.table.full_schedule, zone)
            if worker.table.pending_share is not None:
                every = Timing(f"{SHARE_SECONDS}s", timedelta(seconds=SHARE_SECONDS))
                self._add(worker, "share", every, zone)

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

    def next_run(self, worker: Worker) -> datetime | None:
        """When it will be asked to look at its rows again; None before the start."""
        if not self.is_running:
            return None
        times = [
            job.next_run_time
            for job in self._scheduler.get_jobs()
            if self._workers[job.id][0] is worker and self._workers[job.id][1] != "share"
        ]
        return min((time for time in times if time is not None), default=None)

    def _add(self, worker: Worker, task: Task, timing: Timing, zone: tzinfo) -> None:
        name = f"{worker.table.label} {task}"
        self._workers[name] = worker, task
        self._scheduler.add_job(self._tick, timing.trigger(zone), id=name, args=[worker, task])

    def _tick(self, worker: Worker, task: Task) -> None:
        running_since = worker.ask(task)
        if task != "share" and running_since is not None and now() - running_since > SAME_TIME:
            self._missed(worker, "running", 1)

    def _submitted(self, event: JobSubmissionEvent) -> None:
        """A tick, which stands for times that passed before it."""
        self._report_late(event, self._passed(event))

    def _dropped(self, event: JobSubmissionEvent) -> None:
        """A tick that the scheduler left out, as the one before had not even been able to ask."""
        worker, task = self._workers[event.job_id]
        worker.ask(task)
        self._report_late(event, self._passed(event) + 1)

    def _passed(self, event: JobSubmissionEvent) -> int:
        """How many times passed since the tick before."""
        trigger = self._scheduler.get_job(event.job_id).trigger
        at = event.scheduled_run_times[-1]
        passed = count_between(trigger, self._expected.get(event.job_id, at), at)
        self._expected[event.job_id] = trigger.get_next_fire_time(at, at) or at
        return passed

    def _report_late(self, event: JobSubmissionEvent, count: int) -> None:
        worker, task = self._workers[event.job_id]
        if count and task != "share":
            self._missed(worker, "late", count)
