"""The catch-up passes: they find inserts, updates and deletes that the copy missed, and carry them over."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from milvus_hubness.banks.generations import Batch, Key
from milvus_hubness.errors import NotCaughtUp, VerificationFailed, name_some
from milvus_hubness.job_properties import DUAL_WRITE_PROPERTY, DualWrite
from milvus_hubness.migration.compare import Pair, same_rows
from milvus_hubness.migration.ledger import Ledger, Migration
from milvus_hubness.migration.plan import MigrationOptions
from milvus_hubness.operations.lease_records import now
from milvus_hubness.operations.progress import Events, Throttle
from milvus_hubness.stores.protocols import Store

RECHECK_DELAYS = (0.0, 0.2, 1.0)
"""Seconds to wait before each further read of a row that differs: a client may be between its two writes."""

NO_WRITERS_DELAYS = (0.0,)
"""The same delays if no client writes."""

REPAIR_ROUNDS = 20
BYTES_PER_NUMBER = 4


@dataclass(frozen=True)
class Pass:
    """The result of one comparison of all rows.

    rows: number of compared rows of the origin. fields: number of their compared field values. differing:
    number of rows that still differed when read again; after the pass none of them differs.
    """

    rows: int
    fields: int
    differing: int


def catch_up(
    pair: Pair,
    partitions: Sequence[str | None],
    *,
    number: int,
    rows_per_page: int,
    rows_total: int,
    throttle: Throttle,
    events: Events,
    looks: Sequence[float] = RECHECK_DELAYS,
) -> Pass:
    """Compare all rows once, and carry over the rows of the copy that differ.

    number: the number of the pass, from 1. looks: seconds to wait before each further read of a row that
    differs. Raises NotCaughtUp for a row that changes faster than it can be carried over.
    """

    def repair(broken: dict[Key, str], partition: str | None) -> None:
        _repair_rows(pair, list(broken), partition, throttle)

    return _compare(pair, partitions, rows_per_page, repair, number, rows_total, throttle, events, looks)


def compare(
    pair: Pair,
    partitions: Sequence[str | None],
    *,
    rows_per_page: int,
    rows_total: int,
    throttle: Throttle,
    events: Events,
) -> Pass:
    """Compare all rows once, and write nothing. Raises VerificationFailed, which names rows that differ."""

    def refuse(broken: dict[Key, str], partition: str | None) -> None:
        result = [f"{key!r} ({what})" for key, what in sorted(broken.items(), key=lambda item: str(item[0]))]
        raise VerificationFailed(
            f"{pair.copy.collection!r} does not hold what {pair.origin.collection!r} does: "
            f"rows {name_some(result)}"
        )

    return _compare(pair, partitions, rows_per_page, refuse, 0, rows_total, throttle, events, RECHECK_DELAYS)


def _compare(
    pair: Pair,
    partitions: Sequence[str | None],
    rows_per_page: int,
    on_broken: Callable[[dict[Key, str], str | None], None],
    number: int,
    rows_total: int,
    throttle: Throttle,
    events: Events,
    looks: Sequence[float],
) -> Pass:
    rows = fields = differing = 0
    for partition in partitions:
        for wanted, copied in pair.pages(partition, rows_per_page):
            throttle.admit(0, 0)
            found = pair.differences(wanted, copied)
            if found and (broken := _still_differing(pair, list(found), partition, looks)):
                on_broken(broken, partition)
                differing += len(broken)
            rows += len(wanted)
            fields += sum(len(row) + 1 for row in wanted.rows)
            facts = {"rows": rows, "rows_total": rows_total, "differing": differing, "repaired": differing}
            events.report("catching-up", **{"pass": number}, **facts)
    return Pass(rows, fields, differing)


def _still_differing(
    pair: Pair, keys: list[Key], partition: str | None, looks: Sequence[float]
) -> dict[Key, str]:
    """Return the rows that differ at every further read."""
    found: dict[Key, str] = {}
    for seconds in looks:
        time.sleep(seconds)
        found = pair.differences(*pair.fetch(keys, partition))
        keys = list(found)
        if not keys:
            break
    return found


def _repair_rows(pair: Pair, keys: list[Key], partition: str | None, throttle: Throttle) -> None:
    """Carry these rows over until the copy holds the rows of the origin.

    A client may write a row meanwhile, first to the origin and then to the copy, and this method may undo the
    second write. If the client wrote to the origin before the next read of it, that read shows the write. If
    it writes to the origin after that read, its write to the copy follows this method's write, and stays.
    """
    store, field = pair.store, pair.state.field
    for _ in range(REPAIR_ROUNDS):
        wanted = store.get(pair.origin.collection, keys, field, partition=partition)
        if len(wanted):
            send(pair, carried(pair, wanted), partition, throttle)
        if gone := sorted(set(keys) - set(wanted.keys)):
            store.delete(pair.copy.collection, gone)
        now = store.get(pair.origin.collection, keys, field, partition=partition)
        keys = [key for key, same in same_rows(wanted, now).items() if not same]
        if not keys:
            return
    raise NotCaughtUp(
        f"rows {name_some(keys)} of {pair.origin.collection!r} change faster than they can be carried over"
    )


def carried(pair: Pair, wanted: Batch) -> Batch:
    """Return rows of the origin in the form that the copy must have."""
    return pair.copy.carried(pair.origin, wanted)


def send(pair: Pair, rows: Batch, partition: str | None, throttle: Throttle, *, are_new: bool = False) -> int:
    """Write rows to the copy, in requests that the throttle admits; return the bytes of their vectors.
    are_new: the copy has never had their keys."""
    write = pair.store.insert if are_new else pair.store.upsert
    per_row = BYTES_PER_NUMBER * int(rows.vectors.shape[1])
    start = 0
    while start < len(rows):
        stop = start + throttle.rows_per_request(len(rows), len(rows))
        part = rows.take(range(len(rows))[start:stop])
        throttle.admit(len(part), per_row * len(part))
        began = time.perf_counter()
        write(pair.copy.collection, part, pair.state.field, partition=partition)
        throttle.took(len(part), time.perf_counter() - began)
        start = stop
    return per_row * len(rows)


MOST_PASSES = 5


def announced(
    store: Store, ledger: Ledger, migration: Migration, origin: str, dual_write: DualWrite
) -> Migration:
    """Have clients that write to `origin` write to the other collection too.
    `MigrationOptions.wait_for_clients` waits until all clients do."""
    if store.info(origin).dual_write != dual_write:
        migration = ledger.write(migration, announced_at=None)
        store.write_property(origin, DUAL_WRITE_PROPERTY, dual_write)
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
    """Run passes until one finds no difference. Return the migration as in the ledger, that pass, and the
    number of rows that earlier passes carried over. Raises NotCaughtUp if every pass finds differences."""
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
    """Run one pass: compare all rows and carry over those that differ."""
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
