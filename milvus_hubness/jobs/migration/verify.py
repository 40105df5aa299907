"""Whether a copy holds what its source holds, asked at any time. Writes nothing."""

from __future__ import annotations

from milvus_hubness.jobs.migration.catch_up import compare
from milvus_hubness.jobs.migration.checks import Verification, index_as_planned, verified
from milvus_hubness.jobs.migration.ledger import Ledger
from milvus_hubness.jobs.migration.preparing import forward
from milvus_hubness.jobs.migration.steering import MigrationOptions
from milvus_hubness.stores.base import Store


def verify(store: Store, name: str, *, options: MigrationOptions | None = None) -> Verification:
    """Compare every row and field of a migration's two collections, and what `Verification` names beside.

    name: of the source, the copy or the alias. Vectors must come back bit for bit; under COSINE, where a row
    was not unit, within one unit in the last place of the field's type. Rows that clients are writing in that
    moment are looked at again. Once the application was switched, rows that it changed since differ. Raises
    VerificationFailed naming the first rows that differ, or an index that is not as planned, NoMigration,
    WrongPhase before there is a copy or once the source is dropped.
    """
    options = options or MigrationOptions()
    ledger = Ledger(store)
    migration = ledger.find(name)
    migration.require(
        "copying", "catching up", "verified", "switching", "switched", "rolling back", "rolled back",
        step="verification",
    )  # fmt: skip
    source = store.info(migration.source_now)
    index_as_planned(store, migration, source)
    pair = forward(store, migration)
    equal = compare(
        pair,
        source.partitions,
        rows_per_page=store.chunk_rows(source),
        rows_total=migration.rows,
        throttle=options.throttle,
        events=options.events,
    )
    return verified(pair, source.partitions, ledger.chunks(migration), equal)
