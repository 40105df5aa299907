"""The state of a collection's correction."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from typing import Any

from milvus_hubness.jobs.migration import steering
from milvus_hubness.jobs.placement import bias_location_of
from milvus_hubness.operations import write_intents
from milvus_hubness.operations.lease import leasing
from milvus_hubness.operations.row_writer import open_batches
from milvus_hubness.stores.base import CollectionInfo, Store


@dataclass(frozen=True)
class Status:
    """phase: "ready", or "copying" for a copy that was never verified. pending: rows without a bias. where:
    "vectors", those of the second field `second_vector` where there is one, "fields", or "side" with the
    collection `side`; candidates and missed: see state.CandidateReranking. profiles: the field's sets of
    biases, the active one of which is told of. fields: all corrected ones. age_seconds: since the last
    refresh. write_intents: rows that the log of write intents holds; open_batches: batch records of a job
    that is at work or was killed. Everything but the first four and these is None where nothing is
    corrected."""

    collection: str
    rows: int
    aliases: tuple[str, ...]
    corrected: bool
    phase: str | None = None
    source: str | None = None
    field: str | None = None
    metric: str | None = None
    dim: int | None = None
    width: int | None = None
    estimator: dict[str, Any] | None = None
    strength: float | None = None
    bank: dict[str, Any] | None = None
    where: str | None = None
    second_vector: str | None = None
    side: str | None = None
    candidates: int | None = None
    missed: float | None = None
    pending: int | None = None
    epoch: int | None = None
    refreshed_at: str | None = None
    age_seconds: float | None = None
    profiles: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()
    write_intents: int = 0
    open_batches: int = 0

    def to_dict(self) -> dict[str, Any]:
        """The status as plain data, for people and for --json."""
        return asdict(self)


def status(store: Store, collection: str, *, field: str | None = None) -> Status:
    """Of `field`, or of the first that is corrected. Raises CollectionNotFound, InvalidInput for a field that
    is not there, StateError where the state cannot be read."""
    info = store.info(collection)
    state = info.state_of(field) if field is not None else next(iter(info.states.values()), None)
    left = _left(store, info)
    if state is None:
        return Status(info.name, info.rows, info.aliases, corrected=False, fields=tuple(info.states), **left)
    profile = state.profile
    reranking, bias_location = state.reranking, bias_location_of(store, info, state)
    age = datetime.now(timezone.utc) - profile.refreshed_at
    return Status(
        collection=info.name,
        rows=info.rows,
        aliases=info.aliases,
        corrected=True,
        phase=state.phase,
        source=state.source,
        field=state.field,
        metric=state.metric,
        dim=state.dim,
        width=state.dim if state.reranking else state.layout.width,
        estimator=profile.estimator,
        strength=profile.strength,
        bank=profile.bank.model_dump(),
        where="vectors" if reranking is None else "side" if reranking.side else "fields",
        second_vector=state.second_vector,
        side=reranking.side if reranking else None,
        candidates=reranking.candidates if reranking else None,
        missed=reranking.missed if reranking else None,
        pending=sum(len(bias_location.pending(partition)) for partition in info.partitions),
        epoch=profile.epoch,
        refreshed_at=profile.refreshed_at.isoformat(timespec="seconds"),
        age_seconds=round(age.total_seconds(), 1),
        profiles=tuple(state.profiles),
        fields=tuple(info.states),
        **left,
    )


def repair(store: Store, collection: str, *, client_ttl: float | None = None) -> int:
    """Repair the rows that a killed job may have brought back to an earlier content, and have clients note no
    more. The next refresh does so too. client_ttl: the longest state_ttl of a client that writes. Returns how
    many rows had to be repaired. Raises LeaseHeld if a job is at work, CollectionNotFound.
    """
    ttl = steering.CLIENT_TTL if client_ttl is None else client_ttl
    with leasing(store, collection) as (lease, info):
        return write_intents.repair(lease, info.name, client_ttl=ttl)


def _left(store: Store, info: CollectionInfo) -> dict[str, Any]:
    """What jobs that are at work, or were killed, keep of writes to the collection."""
    if info.intent_log is None:
        return {}
    return {
        "write_intents": store.count_notes(info.intent_log),
        "open_batches": len(open_batches(store, info.name)),
    }
