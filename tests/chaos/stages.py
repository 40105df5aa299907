"""The stages of a command, and where in the package each begins: what moments of a kill are counted by."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from milvus_hubness.correction.state import CollectionState
from milvus_hubness.jobs.common import lease, progress
from milvus_hubness.jobs.migration import ledger
from milvus_hubness.jobs.refresh import beside, refreshing

Enter = Callable[[str | None], None]


class Course(NamedTuple):
    """stages in their order. rows_per_chunk: how many a job takes at once. follow: has `enter` called with
    each stage when it begins, or with None where none does; of jobs through this class of Store."""

    stages: tuple[str, ...]
    rows_per_chunk: int
    follow: Callable[[Enter, type], None]


_BEGUN_BY_EVENT = {
    "plan": "preparing",
    "before-copy": "copying",
    "after-copy": "catching up",
    "before-verify": "verifying",
    "verified": "verified",
    "before-cutover": "switching",
    "after-cutover": "switched",
    "before-rollback": "rolling back",
    "after-rollback": "rolled back",
}
_BEGUN_BY_PHASE = {"copying": "creating", "switching": "moving", "rolling back": "moving back"}


def follow_migration(enter: Enter, store: type) -> None:
    """Have `enter` called with each stage of a migration when it begins."""
    tell, write = progress.Events.report, ledger.Ledger.write

    def reporting_failures(self: Any, name: str, /, **facts: Any) -> None:
        enter(_BEGUN_BY_EVENT.get(name))
        tell(self, name, **facts)

    def writing(self: Any, migration: Any, **changes: Any) -> Any:
        enter(_BEGUN_BY_PHASE.get(changes.get("phase", "")))
        return write(self, migration, **changes)

    progress.Events.report, ledger.Ledger.write = reporting_failures, writing


def follow_refresh(enter: Enter, store: Any) -> None:
    """The same of a refresh. store: the class whose methods begin some."""
    for owner, name, stage in (
        (lease.Lease, "_claim", "taking the lease"),
        (refreshing, "sampled", "judging"),
        (store, "save_bank", "announcing"),
        (beside, "fill_pending", "filling"),
        (beside, "fill_generation", "writing"),
        (store, "wait_visible", "flipping"),
        (lease.Lease, "_release", "cleaning up"),
    ):
        _begins(owner, name, stage, enter)
    _begins(lease.Lease, "_claim", "looking", enter, at_end=True)
    write_property = store.write_property

    def writing(self: Any, collection: str, name: str, record: Any) -> None:
        if isinstance(record, CollectionState):
            enter("announcing" if record.filling else "flipping")
        write_property(self, collection, name, record)

    store.write_property = writing


def follow_copy(enter: Enter, store: Any) -> None:
    """The same of a refresh by a copy: what begins both stages of a refresh and of the copy's migration."""
    stages = COURSES["copy"].stages

    def entering(stage: str | None) -> None:
        enter(stage if stage in stages else None)

    follow_refresh(entering, store)
    follow_migration(entering, store)


def _begins(owner: Any, name: str, stage: str, enter: Enter, *, at_end: bool = False) -> None:
    """Have the stage begin with each call of this method, or with its end."""
    call = getattr(owner, name)

    @functools.wraps(call)
    def entering(*args: Any, **options: Any) -> Any:
        if not at_end:
            enter(stage)
        found = call(*args, **options)
        if at_end:
            enter(stage)
        return found

    setattr(owner, name, entering)


COURSES = {
    "migrate": Course(
        (
            "planning", "preparing", "creating", "copying", "catching up", "verifying", "verified",
            "switching", "moving", "switched", "rolling back", "moving back", "rolled back",
        ),
        150,
        follow_migration,
    ),
    "refresh": Course(
        (
            "starting", "taking the lease", "looking", "judging", "announcing", "filling", "writing",
            "flipping", "cleaning up",
        ),
        40,
        follow_refresh,
    ),
}  # fmt: skip
COURSES["copy"] = Course(
    (
        "starting", "taking the lease", "looking", "judging", "announcing", "copying",
        "catching up", "verifying", "verified", "switching", "moving", "switched", "cleaning up",
    ),
    100,
    follow_copy,
)  # fmt: skip
COURSES["rollback"] = COURSES["migrate"]
"""By command."""
