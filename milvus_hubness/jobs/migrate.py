"""A migration in one call: copied, caught up, verified, and the name moved if the plan says which."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from typing import Any

from milvus_hubness.jobs.engines import Engine
from milvus_hubness.jobs.migration.checks import Verification
from milvus_hubness.jobs.migration.cutover import cutover
from milvus_hubness.jobs.migration.run import run
from milvus_hubness.jobs.migration.steering import MigrationOptions, as_events
from milvus_hubness.jobs.plan import MigrationPlan
from milvus_hubness.jobs.progress import Progress, silent
from milvus_hubness.stores.base import Key, Store


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
