"""How the service stands at one moment: what the page and /status.json show."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from pydantic_core import to_jsonable_python

from milvus_hubness.serve.config import CollectionTable
from milvus_hubness.serve.keeper import Worker
from milvus_hubness.serve.look import Course, Reconciliation


@dataclass(frozen=True)
class CollectionView:
    """last, failing, failures: as `Standing` has them. next_run: by schedule. outcomes: of `History`."""

    table: CollectionTable
    running: Course | None
    last: Reconciliation | None
    last_success: datetime | None
    failing: Reconciliation | None
    failures: int
    next_run: datetime | None
    outcomes: tuple[Reconciliation, ...]

    @classmethod
    def of(cls, worker: Worker, next_run: datetime | None) -> CollectionView:
        standing = worker.standing()
        return cls(
            table=worker.table,
            running=standing.running,
            last=standing.last,
            last_success=standing.last_success,
            failing=standing.failing,
            failures=standing.failures,
            next_run=next_run,
            outcomes=worker.history.outcomes,
        )


@dataclass(frozen=True)
class ServiceView:
    """database: its address, without secrets. waiting_for: why it is not ready, empty where it is."""

    version: str
    database: str
    started_at: datetime
    at: datetime
    waiting_for: str
    collections: tuple[CollectionView, ...]

    def to_dict(self) -> dict[str, Any]:
        """As plain data that JSON can carry."""
        return {
            "version": self.version,
            "database": self.database,
            "started_at": self.started_at.isoformat(),
            "at": self.at.isoformat(),
            "ready": not self.waiting_for,
            "waiting_for": self.waiting_for,
            "collections": [_plain(each) for each in self.collections],
        }


def _plain(view: CollectionView) -> dict[str, Any]:
    return {
        "collection": view.table.name,
        "field": view.table.field,
        "profile": view.table.profile,
        "schedule": view.table.schedule.text,
        "full_schedule": view.table.full_schedule.text,
        "running": to_jsonable_python(view.running),
        "last": to_jsonable_python(view.last),
        "last_success": to_jsonable_python(view.last_success),
        "failing": to_jsonable_python(view.failing),
        "failures": view.failures,
        "next_run": to_jsonable_python(view.next_run),
        "history": to_jsonable_python(view.outcomes),
    }
