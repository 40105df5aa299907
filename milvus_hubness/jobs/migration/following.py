"""A copy kept equal to a collection that is written to."""

from __future__ import annotations

from collections.abc import Sequence

from milvus_hubness.errors import NotCaughtUp
from milvus_hubness.jobs.migration.catch_up import NO_WRITERS_DELAYS, RECHECK_DELAYS, Pass, catch_up
from milvus_hubness.jobs.migration.differences import Pair
from milvus_hubness.jobs.migration.ledger import Ledger, Migration
from milvus_hubness.jobs.migration.steering import MigrationOptions
from milvus_hubness.operations.owner import now
from milvus_hubness.state import DualWrite
from milvus_hubness.stores.base import Store

MOST_PASSES = 5


def announced(
    store: Store, ledger: Ledger, migration: Migration, origin: str, dual_write: DualWrite
) -> Migration:
    """Have clients that write to `origin` write to the other collection too. When they all know is
    `MigrationOptions.wait_for_clients` after that."""
    if store.info(origin).dual_write != dual_write:
        migration = ledger.write(migration, announced_at=None)
        store.write_dual_write(origin, dual_write)
    if migration.announced_at is None:
        migration = ledger.write(migration, announced_at=now())
    return migration


def until_equal(
    ledger: Ledger,
    migration: Migration,
    pair: Pair,
    partitions: Sequence[str | None],
    options: MigrationOptions,
) -> tuple[Migration, Pass, int]:
    """Passes until one finds nothing: the migration as the ledger has it then, that pass, and the rows that
    those before it carried over. Raises NotCaughtUp where none finds nothing."""
    carried = 0
    for number in range(migration.passes + 1, migration.passes + 1 + MOST_PASSES):
        done = one_pass(pair, partitions, migration, number, options)
        migration = ledger.write(migration, passes=number)
        if not done.differing:
            return migration, done, carried
        carried += done.differing
    raise NotCaughtUp(
        f"{pair.copy.collection!r} does not catch up with {pair.origin.collection!r}: each of {MOST_PASSES} "
        f"passes found rows that differ, {done.differing} the last. Somebody writes without HubnessClient, "
        "which writes to both: stop them, say so with --no-writers, and run it again"
    )


def one_pass(
    pair: Pair, partitions: Sequence[str | None], migration: Migration, number: int, options: MigrationOptions
) -> Pass:
    """One comparison of all rows, and what differs carried over."""
    return catch_up(
        pair,
        partitions,
        number=number,
        rows_per_page=pair.store.chunk_rows(pair.store.info(pair.origin.collection)),
        rows_total=migration.rows,
        throttle=options.throttle,
        events=options.events,
        looks=NO_WRITERS_DELAYS if options.no_writers else RECHECK_DELAYS,
    )
