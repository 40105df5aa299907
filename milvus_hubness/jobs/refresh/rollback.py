"""Takes the last migration or refresh back: by the former copy, or by the former generation of biases
beside the vectors.
"""

from __future__ import annotations

from milvus_hubness.basics.progress import Progress
from milvus_hubness.errors import NoMigration
from milvus_hubness.jobs.common.lease import leasing
from milvus_hubness.jobs.migration.ledger import Ledger
from milvus_hubness.jobs.migration.migrator import Rollback
from milvus_hubness.jobs.migration.options import MigrationOptions
from milvus_hubness.jobs.migration.run import roll_back
from milvus_hubness.jobs.refresh.beside import BesideVectors
from milvus_hubness.jobs.refresh.options import RefreshOptions
from milvus_hubness.jobs.refresh.plan import ready_state
from milvus_hubness.jobs.store.protocols import Store, expect_store
from milvus_hubness.jobs.store.records import CollectionInfo


def rollback(
    store: Store,
    name: str,
    *,
    field: str | None = None,
    options: MigrationOptions | None = None,
) -> Rollback:
    """Let the application read the source again, once it has caught up, or the former biases beside
    the vectors, once the rows that were written since have theirs.

    name: the source, the copy or the alias of a migration or a refresh, or a collection with biases
    beside its vectors. field: the corrected field, if there are several. A refresh beside that is
    unfinished is given up. Raises WrongPhase unless the copy took over and the name leads to it,
    InvalidInput without former biases, CollectionNotFound, NotCaughtUp, and the exceptions of the
    store.
    """
    expect_store(store)
    options = options or MigrationOptions()
    if not is_beside(store, name, field):
        return roll_back(store, name, options)

    def validate(info: CollectionInfo) -> object:
        return ready_state(info, field)

    with leasing(store, name, validate) as (lease, info):
        state = ready_state(info, field)
        job = BesideVectors(
            store=lease.store,
            lease=lease,
            info=info,
            requested=name,
            state=state,
            active=state.active,
            is_new=False,
            options=RefreshOptions(
                client_ttl=options.client_ttl,
                throttle=options.throttle,
                progress=_progress_of(options),
            ),
            is_planned=False,
            waiting=0,
        )
        options.events.report("before-rollback", source=info.name, target=info.name, alias=name)
        with options.throttle.checking(lease.check):
            done = job.taken_back()
        options.events.report("after-rollback", alias=name, carried=done.written)

    return Rollback(name, info.name, info.name, done.written, done.reason)


def is_beside(store: Store, name: str, field: str | None = None) -> bool:
    """Whether a rollback of this name concerns biases beside the vectors, and no copy.

    A field whose biases are beside is named, or the collection has no others and nothing moved to a
    copy.
    """
    if not store.exists(name) and store.alias_target(name) is None:
        return False
    # Whose banks its states name is looked at by the job, which may wait for rows that are hidden.
    info = store.info(name, counted=False, checked=False)
    states = info.states.values() if field is None else [info.state_of(field)]
    if not states or not all(state and state.codec.leaves_vectors for state in states):
        return False
    if field is not None:
        return True

    try:
        found = Ledger(store).find(name)
    except NoMigration:
        return True
    return found.phase not in {"switched", "rolling back"}


def _progress_of(options: MigrationOptions) -> Progress:
    """Return a progress that reports the event `filling`."""

    def report(doing: str, rows: int, rows_total: int) -> None:
        options.events.report("filling", doing=doing, rows=rows, rows_total=rows_total)

    return report
