"""The status of a corrected collection."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from typing import Any

from milvus_hubness.basics.defaults import BiasLocation
from milvus_hubness.basics.notebooks import ShownAsTable
from milvus_hubness.jobs.common.fits import Fit
from milvus_hubness.jobs.common.lease import DROPPED, holder_of
from milvus_hubness.jobs.common.stored_biases import StoredBiases, needs_other_columns
from milvus_hubness.jobs.store.helpers import left_helpers
from milvus_hubness.jobs.store.protocols import Store, expect_store
from milvus_hubness.jobs.store.records import CollectionInfo


@dataclass(frozen=True)
class Status(ShownAsTable):
    """The status of a collection, and of the active one of a field's bias profiles.

    If nothing is corrected, only `collection`, `rows`, `aliases`, `corrected` and, from
    `corrected_fields` on, what concerns the whole collection are set.
    """

    collection: str
    """Its real name, even if an alias was requested."""
    rows: int
    """The database's count."""
    aliases: tuple[str, ...]
    corrected: bool
    """Whether some field is corrected."""
    phase: str | None = None
    """`ready`, or `copying` for a copy that was never verified."""
    source: str | None = None
    """The collection that this one was copied from, or the collection itself."""
    field: str | None = None
    """The field that this is about."""
    metric: str | None = None
    """The metric as users see it."""
    dim: int | None = None
    """The dimension of the user's vectors."""
    width: int | None = None
    """The numbers per vector as stored."""
    estimator: dict[str, Any] | None = None
    """Name and parameters of the method."""
    strength: float | None = None
    """w of searches that name none."""
    bank: dict[str, Any] | None = None
    """The reference to the bank's generation."""
    prior: dict[str, Any] | None = None
    """The prior: source, field, weight (λ in units of the spread of scores), factor (λ in units of
    scores) and added; None without one.
    """
    kinds: dict[str, Any] | None = None
    """The kinds of items: field, None if they follow from the vectors, names, and the shares of the
    items at the last fit; None without kinds.
    """
    where: BiasLocation | None = None
    """The bias location."""
    spread: int | None = None
    """In how many columns of the vectors a bias is; None if the vectors have none."""
    bias_scale: float | None = None
    """The factor by which a bias is multiplied before it is stored in them."""
    needs_other_columns: bool = False
    """Whether the field's quantizer needs more such columns: a refresh makes a copy that has them."""
    side_collection: str | None = None
    """The side collection that searches read, if it holds the biases."""
    candidates: int | None = None
    """How many rows a search reads, see state.CandidateReranking."""
    missed: float | None = None
    """What these miss, see state.CandidateReranking."""
    pending: int | None = None
    """Number of rows without a bias."""
    epoch: int | None = None
    """Counts the refreshes, from 1."""
    refreshed_at: str | None = None
    """When the biases were last up to date, in ISO 8601."""
    age_seconds: float | None = None
    """Seconds since then."""
    fitted_at: str | None = None
    """When the bank was fitted to the rows, in ISO 8601."""
    unfitted_share: float | None = None
    """The share of the rows that are new or changed since then; None if that is not counted yet."""
    new_bank_due: str = ""
    """Why a new bank is due, as the last refresh with `refit_share` noted it."""
    profiles: tuple[str, ...] = ()
    """The names of the field's bias profiles."""
    corrected_fields: tuple[str, ...] = ()
    """The names of all corrected vector fields."""
    sampled_fields: tuple[str, ...] = ()
    """The names of the vector fields whose live queries are sampled."""
    leftovers: tuple[str, ...] = ()
    """Collections that an interrupted job has left: its command, repeated, drops them. None while a
    job runs, which has made some that nothing names yet.
    """
    verdicts: tuple[dict[str, Any], ...] = ()
    """The verdicts on banks, the latest first: field, verdict, reason, choice, strength,
    bank_fingerprint, tuned_at, judged_by, and in_use, whether the biases are of that bank.
    """

    def to_dict(self) -> dict[str, Any]:
        """Return the status as plain data, for people and for --json."""
        return asdict(self)


def status(store: Store, collection: str, *, field: str | None = None) -> Status:
    """Return the status of `field`, or of the first corrected field.

    Raises CollectionNotFound, InvalidInput for an unknown
    field, and StateError if the state cannot be read.
    """
    expect_store(store)
    info = store.info(collection)
    state = info.state_of(field) if field is not None else next(iter(info.states.values()), None)

    # What a collection has whether its field is corrected or not.
    whole: dict[str, Any] = {
        "collection": info.name,
        "rows": info.rows,
        "aliases": info.aliases,
        "corrected_fields": tuple(info.states),
        "sampled_fields": tuple(sampling.field for sampling in info.samplings.fields),
        "leftovers": _leftovers(store, info),
        "verdicts": _verdicts(info, field),
    }
    if state is None:
        return Status(**whole, corrected=False)

    profile = state.profile
    codec = state.codec
    stored = StoredBiases(store, info, state)
    age = datetime.now(timezone.utc) - profile.refreshed_at
    kinds = state.kinds_of(profile)
    fit = Fit(store, info, state)
    share = None if fit.note is None else fit.unfitted_share(fit.note, info.rows)
    return Status(
        **whole,
        corrected=True,
        phase=state.phase,
        source=state.source,
        field=state.field,
        metric=state.metric,
        dim=state.dim,
        width=state.dim if codec.needs_candidates else state.layout.width,
        estimator=profile.estimator,
        strength=profile.strength,
        bank=profile.bank.model_dump(),
        prior=profile.prior.facts() if profile.prior else None,
        kinds=kinds.facts if kinds else None,
        where=codec.location,
        spread=None if codec.needs_candidates else state.layout.slots.spread,
        bias_scale=None if codec.needs_candidates else state.layout.slots.scale,
        needs_other_columns=needs_other_columns(store, info, state),
        side_collection=codec.sides[profile.slot] if codec.sides else None,
        candidates=codec.candidates or None,
        missed=state.miss_rate,
        pending=stored.count_pending(),
        epoch=profile.epoch,
        refreshed_at=profile.refreshed_at.isoformat(timespec="seconds"),
        age_seconds=round(age.total_seconds(), 1),
        fitted_at=profile.fitted_at.isoformat(timespec="seconds"),
        unfitted_share=None if share is None else round(share, 4),
        new_bank_due=fit.due,
        profiles=tuple(state.profiles),
    )


def _leftovers(store: Store, info: CollectionInfo) -> tuple[str, ...]:
    """Return the collections that an interrupted job on this one has left."""
    if holder_of(store, info.name) is not None:
        return ()

    # A copy or a source that is about to be dropped has another name already.
    half_dropped = re.compile(re.escape(info.name) + r"_.*" + DROPPED + r"\d+_[0-9a-f]{8}")
    dropping = {name for name in store.collection_names() if half_dropped.fullmatch(name)}
    return tuple(sorted(dropping | {*left_helpers(store, info)}))


def _verdicts(info: CollectionInfo, field: str | None) -> tuple[dict[str, Any], ...]:
    """Return the verdicts on banks as plain data: those of this field, or of all if none is named."""
    shown = {
        "field",
        "verdict",
        "choice",
        "strength",
        "bank_fingerprint",
        "kind",
        "tuned_at",
        "reason",
    }
    verdicts = []
    for record in info.verdicts.records:
        if field not in (None, record.field):
            continue
        state = info.states.get(record.field)
        in_use = (
            state is not None
            and state.profile.bank.queries_fingerprint == record.bank_fingerprint
            and state.kind == record.kind
        )
        facts = record.model_dump(mode="json", include=shown)
        verdicts.append({**facts, "judged_by": record.judged_by, "in_use": in_use})

    return tuple(verdicts)
