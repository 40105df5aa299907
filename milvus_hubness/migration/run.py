"""Runs a migration from a plan to a verified copy, and resumes one that was stopped."""

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
from milvus_hubness.stores.protocols import Store
from milvus_hubness.stores.records import CollectionInfo


def run(store: Store, plan: MigrationPlan, options: MigrationOptions | None = None) -> Migration:
    """Copy, catch up and verify, from wherever an earlier run of the same plan ended.

    Raises ResumeRefused where the plan or the source's schema is not that of the earlier run, LeaseHeld,
    LeaseLost, NotCaughtUp, VerificationFailed, CannotMigrate where the database cannot import files,
    InvalidParameter where the engine does not know the estimator or the server not the copy's index, and what
    the store raises. Whatever it raises, it can be run again.
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
    """As `run`, of the unfinished migration of this source or to this target, with what it was begun with.

    Raises NoMigration too.
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
    # What a job that was killed has brought back in the source must not reach the copy.
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
    """Before anybody writes to the copy: no import of an earlier run is under way, and where this run will
    import, no rows of chunks that are still to be copied are there."""
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
        store.show_imported(migration.target)
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
    store.write_state(migration.target, state)
    options.events.report("verified", **asdict(found))
    return ledger.write(migration, phase="verified", state=state, rows=equal.rows, verified=asdict(found))


def _invalid(chunks: Sequence[Chunk]) -> dict[str, Any]:
    keys = tuple(key for chunk in chunks for key in chunk.invalid_keys)
    return {"invalid": sum(chunk.invalid for chunk in chunks), "invalid_keys": keys[: 4 * KEYS_NAMED]}


@dataclass(frozen=True)
class MigrationResult:
    """invalid: how many rows hold no usable vector and carry bias 0, invalid_keys: the first of them. alias:
    the name that leads to the copy now, None where none was moved."""

    target: str
    bank: str
    rows: int
    invalid: int
    invalid_keys: tuple[Key, ...]
    alias: str | None
    verification: Verification
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """The result as plain data, for people and for --json."""
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
    """`run`, and `cutover` where the plan names what to move.

    no_writers: nobody writes to the source meanwhile, which saves waiting for clients to notice. client_ttl:
    the longest state_ttl of a HubnessClient that writes, in seconds, None for its default. engine: what tells
    the biases of the rows, "server" for the database's own search over the bank (NNN and CSLS), "ray" for a
    Ray cluster. What fails or is interrupted can be called again, and carries on; `clean` takes it back.
    Raises what those raise."""
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
