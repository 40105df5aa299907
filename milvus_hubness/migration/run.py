"""The run of a migration: from a plan to a verified copy, with resume after an interruption."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from milvus_hubness.banks.generations import Key
from milvus_hubness.errors import ResumeRefused
from milvus_hubness.job_properties import DualWrite
from milvus_hubness.migration.catch_up import announced, until_equal
from milvus_hubness.migration.copy import (
    KEYS_NAMED,
    Recorder,
    copy_chunks,
    half_imported,
    import_chunks,
    wait_for_imports,
)
from milvus_hubness.migration.cutover import cutover, drop_copy
from milvus_hubness.migration.ledger import Ledger, Migration, leased
from milvus_hubness.migration.plan import MigrationOptions, MigrationPlan, as_events
from milvus_hubness.migration.prepare import begun, forward, prepared
from milvus_hubness.migration.survey import Chunk
from milvus_hubness.migration.verify import Verification, index_as_planned, verified
from milvus_hubness.operations import write_intents
from milvus_hubness.operations.engines import Engine, require_engine
from milvus_hubness.operations.lease import Lease
from milvus_hubness.operations.progress import Progress, silent
from milvus_hubness.operations.reading import keep_nearest
from milvus_hubness.stores.protocols import BulkImport, Store, capability
from milvus_hubness.stores.records import CollectionInfo


def run(store: Store, plan: MigrationPlan, options: MigrationOptions | None = None) -> Migration:
    """Copy, catch up and verify; continue an earlier run of the same plan where it stopped.

    Raises ResumeRefused if the plan or the source's schema differs from that of the earlier run, LeaseHeld,
    LeaseLost, NotCaughtUp, VerificationFailed, CannotMigrate if the database cannot import files,
    InvalidParameter if the engine does not support the estimator or the server does not support the copy's
    index, and the exceptions of the store. It can be run again after any of these.
    """
    options = options or MigrationOptions()
    require_engine(options.engine, plan.estimator)
    if options.bulk:
        options.bulk.require(store, plan.source)
    names = (plan.source.name, plan.target)
    with options.reporting_failures(), leased(store, names, options.lease, options.throttle) as lease:
        store, ledger = lease.store, Ledger(lease.store)
        known = ledger.of_target(plan.target)
        if plan.restart and known is not None:
            drop_copy(lease, ledger, known)
        migration = begun(ledger, plan)
        if migration.phase == "preparing":
            migration = prepared(store, ledger, plan, ledger.write(migration))
        options.throttle.check()
        return _carry_on(lease, ledger, migration, options)


def resume(store: Store, name: str, options: MigrationOptions | None = None) -> Migration:
    """Resume the unfinished migration of this source or to this target, with its original arguments.

    Raises NoMigration, and the exceptions of `run`.
    """
    options = options or MigrationOptions()
    found = Ledger(store).find(name)
    names = (found.source_now, found.target)
    with options.reporting_failures(), leased(store, names, options.lease, options.throttle) as lease:
        store, ledger = lease.store, Ledger(lease.store)
        migration = ledger.again(found)
        if migration.phase == "preparing":
            raise ResumeRefused(
                f"the migration of {migration.source!r} ended before anything was copied: give its bank again"
            )
        if migration.phase in {"copying", "catching up", "rolled back"}:
            info = store.info(migration.source_now)
            if migration.arguments["schema"] != store.schema_facts(info):
                raise ResumeRefused(
                    f"the schema of {info.name!r} is not what it was when this began: --restart"
                )
            if options.bulk and migration.phase == "copying":
                options.bulk.require(store, info)
        return _carry_on(lease, ledger, migration, options)


def _carry_on(lease: Lease, ledger: Ledger, migration: Migration, options: MigrationOptions) -> Migration:
    if migration.phase not in {"copying", "catching up", "rolled back"}:
        return migration
    store = lease.store
    # The rows that a killed job has changed in the source must be repaired before they reach the copy.
    write_intents.repair(lease, migration.source, client_ttl=options.client_ttl)
    source = store.info(migration.source)
    if migration.phase == "copying":
        planned = migration.indexed(source)
        field = migration.field
        store.validate_index(planned.vector_fields[field], source.vector_fields[field])
        store.create_copy(planned, migration.target, migration.corrected())
        lease.fence(migration.target)
        migration = _settled(store, ledger, migration, options)
    if not options.no_writers:
        dual_write = DualWrite(collection=migration.target)
        migration = announced(store, ledger, migration, source.name, dual_write)
    if migration.phase == "copying":
        migration = _copied(store, ledger, migration, source, options)
    if not options.no_writers:
        options.wait_for_clients(migration.announced_at)
    return _verified(store, ledger, migration, source, options)


def _settled(store: Store, ledger: Ledger, migration: Migration, options: MigrationOptions) -> Migration:
    """Complete the imports of an earlier run before clients write to the copy. If this run imports files too,
    also remove the copy's rows of chunks that are not copied yet."""
    chunks = ledger.chunks(migration)
    if not half_imported(chunks) and not (options.bulk and store.count(migration.target)):
        return migration
    recorder = Recorder(migration, chunks, ledger, options.events)
    wait_for_imports(store, migration.target, chunks, ledger, recorder, options.throttle)
    return recorder.migration


def _copied(
    store: Store, ledger: Ledger, migration: Migration, source: CollectionInfo, options: MigrationOptions
) -> Migration:
    facts = {"source": source.name, "target": migration.target}
    options.events.report("before-copy", **facts, rows_total=migration.rows)
    store.count(source.name)
    pair = forward(store, migration, options.engine)
    chunks = ledger.chunks(migration)
    recorder = Recorder(migration, chunks, ledger, options.events)
    if options.bulk:
        import_chunks(pair, chunks, ledger, recorder, options.bulk, options.throttle)
        capability(store, BulkImport).show_imported(migration.target)
    else:
        alone = options.no_writers and migration.announced_at is None
        copy_chunks(pair, chunks, recorder, options.throttle, alone=alone)
        store.flush(migration.target)
    migration = recorder.migration
    options.events.report("after-copy", **facts, rows=migration.rows)
    found = _invalid(ledger.chunks(migration))
    return ledger.write(migration, phase="catching up", **found)


def _verified(
    store: Store, ledger: Ledger, migration: Migration, source: CollectionInfo, options: MigrationOptions
) -> Migration:
    index_as_planned(store, migration, source)
    pair = forward(store, migration, options.engine)
    migration, equal, _ = until_equal(ledger, migration, pair, source.partitions, options)
    options.events.report(
        "before-verify", source=source.name, target=migration.target, rows_total=migration.rows
    )
    found = verified(pair, source.partitions, ledger.chunks(migration), equal)
    state = keep_nearest(store, migration.target, migration.corrected()).model_copy(update={"phase": "ready"})
    store.write_property(migration.target, state.property_name, state)
    options.events.report("verified", **asdict(found))
    return ledger.write(migration, phase="verified", state=state, rows=equal.rows, verified=asdict(found))


def _invalid(chunks: Sequence[Chunk]) -> dict[str, Any]:
    keys = tuple(key for chunk in chunks for key in chunk.invalid_keys)
    return {"invalid": sum(chunk.invalid for chunk in chunks), "invalid_keys": keys[: 4 * KEYS_NAMED]}


@dataclass(frozen=True)
class MigrationResult:
    """The result of a migration.

    invalid: number of rows without a usable vector, which get bias 0. invalid_keys: the first of them. alias:
    the name that now leads to the copy; None if no name was moved.
    """

    target: str
    bank: str
    rows: int
    invalid: int
    invalid_keys: tuple[Key, ...]
    alias: str | None
    verification: Verification
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain data, for people and for --json."""
        return {**asdict(self), "invalid_keys": list(self.invalid_keys)}


def migrate(
    store: Store,
    plan: MigrationPlan,
    *,
    progress: Progress = silent,
    no_writers: bool = False,
    client_ttl: float | None = None,
    engine: Engine = "local",
) -> MigrationResult:
    """Run a migration, and cut over if the plan names an alias or a rename.

    no_writers: no client writes to the source during the migration, which saves the wait for clients.
    client_ttl: the longest state_ttl of a HubnessClient that writes, in seconds; None for the client's
    default. engine: computes the biases of the rows: "server" uses the database's own search over the bank
    (NNN and CSLS), "ray" uses a Ray cluster. After a failure or an interruption, call it again to continue,
    or use `clean` to undo it. Raises as `run` and `cutover` do.
    """
    began = time.perf_counter()
    options = MigrationOptions(no_writers=no_writers, events=as_events(progress), engine=engine)
    if client_ttl is not None:
        options = replace(options, client_ttl=client_ttl)
    migration = run(store, plan, options)
    if plan.alias or plan.rename:
        migration = cutover(store, plan.target, alias=plan.alias, rename=plan.rename, options=options)
    return MigrationResult(
        target=plan.target,
        bank=migration.bank_collection,
        rows=(migration.verified or {}).get("rows", 0),
        invalid=migration.invalid,
        invalid_keys=migration.invalid_keys,
        alias=migration.switch.name if migration.switch else None,
        verification=Verification(**(migration.verified or {})),
        seconds=round(time.perf_counter() - began, 2),
    )
