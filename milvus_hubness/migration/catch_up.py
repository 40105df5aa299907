"""Catch-up passes: find and copy inserts, updates and deletes that the copy missed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from milvus_hubness.banks.generations import Batch, Key
from milvus_hubness.errors import NotCaughtUp, VerificationFailed, name_some
from milvus_hubness.job_properties import DualWrite
from milvus_hubness.migration.compare import Corrected, Pair, same_rows
from milvus_hubness.migration.ledger import Ledger, Migration
from milvus_hubness.migration.plan import MigrationOptions
from milvus_hubness.operations.lease_records import now
from milvus_hubness.operations.progress import Events, Throttle
from milvus_hubness.stores.protocols import Store

RECHECK_DELAYS = (0.0, 0.2, 1.0)
"""Seconds to wait before each look at a row that differs: a client may be between its two writes."""

NO_WRITERS_DELAYS = (0.0,)
"""The same where nobody writes."""

REPAIR_ROUNDS = 20
BYTES_PER_NUMBER = 4


@dataclass(frozen=True)
class Pass:
    """rows of the origin and their field values compared. differing: rows that differed, and did still when
    looked at again; none of them does now, or there are none."""

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
    """Compare all rows once, and make those of the copy that differ what they are in the origin.

    number: of the pass, from 1. looks: seconds to wait before each further look at a row that differs. Raises
    NotCaughtUp for a row that changes faster than it can be carried.
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
    """Compare all rows once, and write nothing. Raises VerificationFailed naming rows that differ."""

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
    """Those of the rows that differ at every further look."""
    found: dict[Key, str] = {}
    for seconds in looks:
        time.sleep(seconds)
        found = pair.differences(*pair.fetch(keys, partition))
        keys = list(found)
        if not keys:
            break
    return found


def _repair_rows(pair: Pair, keys: list[Key], partition: str | None, throttle: Throttle) -> None:
    """Carry these rows over, until what was carried is what the origin holds.

    A client may write a row in between, to the origin and then to the copy, and this may then undo the
    latter. Its write to the origin came before, so looking there again, afterwards, shows it; or it comes
    after that look, and then its write to the copy comes after this one, and stays.
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
    """Rows of the origin as the copy is to hold them."""
    if isinstance(pair.origin, Corrected) and isinstance(pair.copy, Corrected):
        return pair.copy.rebiased(pair.origin, wanted)
    return pair.copy.encode_rows(pair.origin.decode_rows(wanted))


def send(pair: Pair, rows: Batch, partition: str | None, throttle: Throttle, *, are_new: bool = False) -> int:
    """Write rows to the copy, in requests that the throttle admits. are_new: it has never held their keys.
    Returns the bytes of their vectors."""
    write = pair.store.insert if are_new else pair.store.upsert
    per_row = BYTES_PER_NUMBER * int(rows.vectors.shape[1])
    start = 0
    while start < len(rows):
        stop = start + throttle.rows_per_request(len(rows), len(rows))
        part = Batch(rows.keys[start:stop], rows.vectors[start:stop], rows.rows[start:stop])
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
