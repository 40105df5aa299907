"""The plan of a migration, which is made without a write, and the options of its run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from milvus_hubness.basics.defaults import Engine, OnHub, VerdictMode
from milvus_hubness.basics.notebooks import ShownAsTable
from milvus_hubness.basics.texts import field_words
from milvus_hubness.basics.words import expect_word
from milvus_hubness.correction.banks.bank import BankLike, QueryBank, optional_bank
from milvus_hubness.correction.codec.arrays import BYTES
from milvus_hubness.correction.codec.index_hints import lengths_vary
from milvus_hubness.correction.codec.layout import Layout
from milvus_hubness.correction.estimators import Estimator, to_dict
from milvus_hubness.correction.estimators.base import expect_estimator
from milvus_hubness.correction.kernels.ann import IndexSpec
from milvus_hubness.correction.state import suffix_for
from milvus_hubness.errors import (
    AlreadyCorrected,
    CannotMigrate,
    CollectionExists,
    EmptyCollection,
    InvalidInput,
    InvalidParameter,
)
from milvus_hubness.jobs.common.choice import (
    bank_facts,
    checked_gate,
    choose,
    kind_remarks,
    verdict_remarks,
)
from milvus_hubness.jobs.common.inputs import FitRows, only_field
from milvus_hubness.jobs.common.judging import Judging, judged, stored_verdict
from milvus_hubness.jobs.common.kinds import (
    NO_KINDS,
    KindRequest,
    chosen_kinds,
    with_kind_offsets,
    with_kinds,
)
from milvus_hubness.jobs.common.lease_records import default_client_ttl, expect_client_ttl
from milvus_hubness.jobs.common.priors import (
    NO_PRIOR,
    PriorLike,
    PriorRequest,
    chosen_prior,
    joined_with,
    on_gallery,
)
from milvus_hubness.jobs.common.progress import Events, Throttle
from milvus_hubness.jobs.migration.ledger import Ledger, Migration, chosen_switch
from milvus_hubness.jobs.migration.survey import (
    MEASURED_ROWS,
    SAMPLE_ROWS,
    Fitting,
    Resolution,
    estimates,
    recall_gate,
    recall_words,
    resolution_of,
    sampled_rows,
    survey,
)
from milvus_hubness.jobs.store.ownership import bank_name
from milvus_hubness.jobs.store.protocols import (
    HubGuards,
    SearchGates,
    Store,
    capability,
    expect_store,
    validate_new_names,
)
from milvus_hubness.jobs.store.records import CollectionInfo, TuningRecord
from milvus_hubness.quality.recall import RecallGate


@dataclass(frozen=True)
class MigrationOptions:
    """Options of a run."""

    no_writers: bool = False
    """No client writes to the source, so the run waits for none."""
    client_ttl: float = field(default_factory=default_client_ttl)
    """The longest state_ttl of a HubnessClient that writes, in seconds."""
    throttle: Throttle = field(default_factory=Throttle)
    """Slows the copy down, and pauses it."""
    events: Events = field(default_factory=lambda: Events([]))
    """Passes what happens to listeners."""
    release: threading.Event | None = None
    """If given, the cutover waits until this is set; meanwhile the copy catches up."""
    confirm: Callable[[Migration], bool] | None = None
    """If given, called by `migrate` and `resume` once the copy is verified, before a name moves; if
    it returns False, the run ends with the verified copy, which `cutover` can switch to later."""
    engine: Engine = "local"
    """What computes the biases."""

    def __post_init__(self) -> None:
        expect_word("engine", self.engine, Engine)
        expect_client_ttl(self.client_ttl)


@dataclass(frozen=True, kw_only=True)
class MigrationPlan(Fitting, ShownAsTable):
    """The plan of a migration: copy `source` to `target`, with `field` in augmented form."""

    schema: dict[str, Any]
    """The facts of the source's schema that a further run must find unchanged."""
    target: str
    """The name of the copy."""
    suffix: str
    """The end of the names of the hidden fields, see CollectionState."""
    partitions: tuple[str, ...]
    """The partitions of the source that have names."""
    hidden_fields: tuple[str, ...]
    """The fields that the copy has for its biases."""
    bank_collection: str
    """The collection that holds the bank's generations."""
    strength: float
    """w of searches that name none."""
    alias: str | None
    """The alias that the cutover moves."""
    rename: bool
    """Whether the cutover moves the source's own name instead."""
    gate: int | None
    """The k of a DynamicGate; None for none."""
    restart: bool
    """Whether the run drops an unfinished target first."""
    remarks: tuple[str, ...]
    """What the user should know before the run."""
    server: str
    """The version of the server."""
    seconds: float
    """How long copy and verification take, see `estimates`."""
    memory_bytes: dict[str, int]
    """The memory that the loaded source and target take, see `estimates`."""
    vectors_per_row: float = 1.0
    """The mean number of vectors in a row."""
    waits: float = 0.0
    """Seconds that the run waits for clients."""
    recall: RecallGate | None = None
    """What the index loses with the augmented form, if that was measured."""
    resolution: Resolution | None = None
    """What an exact search loses, if that was measured."""
    index: dict[str, Any] | None = None
    """The copy's index, if it differs from the source's."""
    verdict: TuningRecord | None = None
    """The verdict on the bank; None if it was not judged."""
    judging: Judging
    """What the run does with the verdict."""
    kind: str | None
    """The field of kinds, or AUTO, that the caller names; None for none."""
    on_hub: OnHub = "off"
    """What clients do with new rows that look like planted hubs."""

    @property
    def rows(self) -> int:
        """The number of distinct keys."""
        return self.survey.rows

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments that a further run must repeat, as plain data."""
        return {
            "schema": self.schema,
            "field": self.field,
            "bank_collection": self.bank_collection,
            "bank": self.bank.fingerprint,
            "target_bank": self.target_bank.fingerprint if self.target_bank else None,
            "estimator": to_dict(self.estimator),
            "strength": self.strength,
            "gate": self.gate,
            "prior": self.chosen.arguments,
            "kind": self.kind,
            "on_hub": self.on_hub,
            "slots": self.layout.slots,
            "spread": self.layout.spread,
            "index": self.index,
        }

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain data, for people and for --json."""
        vector = self.vector
        arguments = self.arguments
        return {
            "source": self.source.name,
            "target": self.target,
            "field": self.field,
            "metric": self.layout.metric,
            "index_type": vector.index_type,
            "index_params": vector.index_params,
            "dim": self.layout.dim,
            "dtype": vector.dtype,
            "width": self.form.width,
            "spread": self.layout.spread,
            "rows": self.rows,
            "partitions": list(self.partitions),
            "hidden_fields": list(self.hidden_fields),
            "vector_bytes": {
                name: int(BYTES[vector.dtype] * width * self.vectors_per_row * self.rows)
                for name, width in self.widths.items()
            },
            "vectors_per_row": round(self.vectors_per_row, 1),
            "bank": bank_facts(self.bank, self.target_bank, self.bank_collection),
            **{name: arguments[name] for name in ("estimator", "strength", "gate")},
            "prior": self.chosen.facts,
            "kinds": self.kinds.facts,
            "alias": self.alias,
            "rename": self.rename,
            "verdict": self.verdict.facts if self.verdict else None,
            "on_hub": self.on_hub,
            "remarks": list(self.remarks),
            "server": self.server,
            "memory_bytes": {**self.memory_bytes, "both": sum(self.memory_bytes.values())},
            "estimated_seconds": round(self.seconds + self.waits, 1),
            "waiting_seconds": round(self.waits, 1),
            "resolution": asdict(self.resolution) if self.resolution else None,
            "recall": {**self.recall.to_dict(), "said": recall_words(self.recall)}
            if self.recall
            else None,
        }


@dataclass(frozen=True, kw_only=True)
class MigrationRequest:
    """What the caller of `plan_migration` asks for, with a valid gate."""

    source: str
    """The collection to correct, or an alias of it."""
    bank: QueryBank
    target_bank: QueryBank | None
    estimator: Estimator | None
    """The method to fit; None to follow tuning."""
    gate: int | None
    """The caller's gate, which overrules that of tuning; 0 for none."""
    prior: PriorRequest
    """The caller's prior."""
    kinds: KindRequest
    """The kinds that the caller asks for."""
    field: str | None
    """The vector field to correct; None for the only one."""
    target: str | None
    """The name of the copy; None for one that is derived from the source's."""
    bank_collection: str | None
    """Where to store the bank; None for a name that is derived from the source's."""
    alias: str | None
    rename: bool
    measure: bool
    """Whether to measure the recall that the index loses."""
    index_type: str | None
    index_params: Mapping[str, Any] | None
    restart: bool
    judging: Judging
    client_ttl: float
    on_hub: OnHub

    def __post_init__(self) -> None:
        expect_word("on_hub", self.on_hub, OnHub)
        checked_gate(self.gate)
        expect_client_ttl(self.client_ttl)
        expect_index(self.index_type, self.index_params)
        self.prior.expect_source()
        self.kinds.expect_no_targets(self.target_bank)


def expect_index(index_type: object, index_params: object) -> None:
    """Raise InvalidParameter unless these can be the type and the parameters of an index."""
    if index_type is not None and not isinstance(index_type, str):
        raise InvalidParameter(f"index_type must be a text such as 'HNSW', not {index_type!r}")
    if index_params is not None and not isinstance(index_params, Mapping):
        raise InvalidParameter(
            f"index_params must be a dictionary such as {{'M': 16}}, not {index_params!r}"
        )


def plan_migration(
    store: Store,
    source: str,
    bank: BankLike,
    *,
    estimator: Estimator | None = None,
    target_bank: BankLike | None = None,
    field: str | None = None,
    target: str | None = None,
    bank_collection: str | None = None,
    alias: str | None = None,
    rename: bool = False,
    measure: bool = False,
    gate: int | None = None,
    prior: PriorLike | None = None,
    prior_weight: float | None = None,
    kind: str | None = None,
    index_type: str | None = None,
    index_params: Mapping[str, Any] | None = None,
    restart: bool = False,
    queries: BankLike | None = None,
    verdict: VerdictMode | None = None,
    client_ttl: float = 0.0,
    on_hub: OnHub = "off",
) -> MigrationPlan:
    """Plan a migration of `source`. Read only.

    estimator: by default the one that tuning on this bank chose, with its strength; else
        the default.
    queries: real ones, apart from the bank, on which it is judged; by default half of the bank.
    verdict: see VerdictMode; by default that of $MILVUS_HUBNESS_VERDICT, else "require", so that
    `migrate` raises CorrectionNotRecommended before its first write if the verdict on this bank is
    "leave it alone". gate: the k of a DynamicGate; by
    default that of the choice of tuning, if that is followed, else none; 0 for none. prior: a
    field of the rows, or clicks by key, that says how often each row is wanted. prior_weight: λ in
    units of the spread of scores; by default the one that tuning chose, else 0. kind: a field of the
    rows that says of which kind each is, such as its modality or language, with at most 16 values;
    or "auto" for the two kinds that the vectors themselves show, if they do. index_type, index_params: of the
    copy's index; if the type is unchanged, unnamed parameters are the source's. measure: measure
    the recall that such an index loses with the augmented form, in some 10 s. client_ttl: as in
    MigrationOptions; 0 if no client writes. on_hub: what clients do with new rows that look like
    planted hubs, see OnHub.

    Raises CollectionNotFound, AlreadyCorrected, EmptyCollection, CannotMigrate, which names every
    obstacle, CollectionExists, DimensionMismatch, BankTooSmall, InvalidParameter, InvalidInput.
    """
    expect_store(store)
    expect_estimator(estimator)
    request = MigrationRequest(
        source=source,
        bank=QueryBank.of(bank),
        target_bank=optional_bank(target_bank),
        estimator=estimator,
        gate=gate,
        prior=PriorRequest.of(prior, prior_weight),
        kinds=KindRequest.of(kind),
        field=field,
        target=target,
        bank_collection=bank_collection,
        alias=alias,
        rename=rename,
        measure=measure,
        index_type=index_type,
        index_params=index_params,
        restart=restart,
        judging=Judging.of(verdict, queries),
        client_ttl=client_ttl,
        on_hub=on_hub,
    )
    return _planned(store, request)


def _planned(store: Store, request: MigrationRequest) -> MigrationPlan:
    """Validate, choose, measure, and assemble the plan."""
    if request.on_hub != "off":
        capability(store, HubGuards).expect_hub_guard()
    if request.gate:
        capability(store, SearchGates).expect_gates()
    present, field = _correctable(store, request)

    # From here on, the source is described with the copy's index, which decides on the layout.
    index = _copy_index(present, field, request)
    info = present.with_index(field, **index) if index else present
    store.validate_index(info.vector_fields[field], present.vector_fields[field])
    layout = _layout(store, info, field, request)
    target, unfinished = _chosen_target(store, info, request)
    surveyed = survey(store, info, store.chunk_rows(info))

    # Who continues a migration has decided already.
    judging = request.judging if unfinished is None else Judging("skip")
    kinds = NO_KINDS
    sample = None
    if request.kinds.name is not None:
        sample = sampled_rows(store, info, field, surveyed, layout, SAMPLE_ROWS)
        kinds = chosen_kinds(store, info, request.kinds, layout, sample[0], request.bank)
        layout = with_kinds(layout, kinds.rule, sample[0])
        if store.column_needs(info, field).kind_offsets:
            layout = with_kind_offsets(layout, kinds.rule, *sample)
    verdict = stored_verdict(info, field, request.bank, judging, kinds.source)
    if verdict is None and judging.mode != "skip":
        sample = sample or sampled_rows(store, info, field, surveyed, layout, SAMPLE_ROWS)
        rows = FitRows.of(*sample, NO_PRIOR, kinds.rule)
        verdict = judged(layout, rows, field, request.bank, judging, kinds.rule)
    choice = choose(
        verdict,
        request.estimator,
        request.gate,
        by_kind=kinds.rule is not None,
        are_gated=isinstance(store, SearchGates),
    )

    chosen = chosen_prior(request.prior, verdict, is_followed=request.estimator is None)
    fitting = Fitting(
        source=info,
        field=field,
        survey=surveyed,
        layout=layout,
        estimator=joined_with(choice.estimator, request.prior, chosen),
        bank=request.bank,
        target_bank=request.target_bank,
        chosen=on_gallery(store, info, chosen),
        kinds=kinds,
    )
    estimated = estimates(store, fitting)
    remarks = _remarks(store, fitting, request, verdict, estimated.vectors_per_row)
    if index is not None:
        former = present.vector_fields[field]
        remarks.append(
            f"the source's index is {former.index_type} {former.index_params or ''}".rstrip()
        )

    remarks += _duplicate_remarks(store, fitting)
    if not request.measure and _has_graph_of_products(store, fitting):
        sample = sample or sampled_rows(store, info, field, surveyed, layout, MEASURED_ROWS)
        if lengths_vary(layout, sample[0]):
            remarks.append(LENGTHS_REMARK)

    resolution = resolution_of(store, fitting)
    if resolution is not None:
        remarks += resolution.remark(fitting.vector.dtype)
    recall = recall_gate(store, fitting) if request.measure else None

    suffix = suffix_for(field, info.states.values())
    plan = MigrationPlan(
        **vars(fitting),
        schema=store.schema_facts(present),
        target=target,
        suffix=suffix,
        partitions=tuple(store.named_partitions(info)),
        hidden_fields=tuple(store.fields_of_copy(_hidden_fields(fitting.layout, suffix))),
        bank_collection=request.bank_collection or bank_name(info.name),
        strength=choice.strength,
        alias=request.alias,
        rename=request.rename,
        gate=choice.gate,
        restart=request.restart,
        remarks=tuple(remarks),
        server=store.server_version(),
        **estimated._asdict(),
        waits=waits_for_clients(
            request.client_ttl, estimated.seconds, alias=request.alias, rename=request.rename
        ),
        recall=recall,
        resolution=resolution,
        index=index,
        verdict=verdict,
        judging=judging,
        kind=request.kinds.name,
        on_hub=request.on_hub,
    )
    return _with_resume_remark(plan, unfinished)


def _correctable(store: Store, request: MigrationRequest) -> tuple[CollectionInfo, str]:
    """Return the source and its field, if a migration can correct them.

    Raises CannotMigrate, AlreadyCorrected, EmptyCollection, CollectionNotFound, InvalidInput.
    """
    info = store.info(request.source)
    if info.is_bank:
        raise CannotMigrate(f"{info.name!r} is a query bank: name the collection of the items")

    field = request.field or only_field(info)
    state = info.states.get(field)
    # Biases in a side collection leave the rows as they are, and these can be copied.
    if state is not None and not state.codec.sides:
        if state.codec.needs_candidates:
            raise AlreadyCorrected(
                f"{info.name!r} carries biases for {field_words(field)} in keys that a copy would "
                "need itself"
            )

        raise AlreadyCorrected(
            f"{info.name!r} is already corrected in {field_words(field)} (from {state.source!r}): refresh it "
            "instead"
        )

    suffix = suffix_for(field, info.states.values())
    if obstacles := store.obstacles(info, field, suffix):
        raise CannotMigrate(f"{info.name!r} cannot be migrated: {'; '.join(obstacles)}")
    if not info.rows:
        raise EmptyCollection(f"{info.name!r} has no rows: insert items first")

    return info, field


def _copy_index(
    info: CollectionInfo, field: str, request: MigrationRequest
) -> dict[str, Any] | None:
    """Return the type and the parameters of the copy's index; None for those of the source."""
    if request.index_type is None and not request.index_params:
        return None

    vector = info.vector_fields[field]
    index_type = request.index_type.upper() if request.index_type else vector.index_type
    inherited = vector.index_params if index_type == vector.index_type else {}
    return {
        "index_type": index_type,
        "index_params": {**inherited, **(request.index_params or {})},
    }


def _layout(store: Store, info: CollectionInfo, field: str, request: MigrationRequest) -> Layout:
    """Return the columns of the copy's vectors. Raises DimensionMismatch, InvalidParameter."""
    vector = info.vector_fields[field]
    needs = store.column_needs(info, field)
    layout = Layout(
        vector.dim,
        vector.known_metric,
        multiple_of=needs.multiple_of,
        spread=needs.spread,
        multi_vectors=vector.multi_vectors,
    )
    request.bank.expect_rows(layout.multi_vectors, field_words(field))
    request.bank.expect_dim(layout.dim, "the field")
    request.kinds.expect_possible(layout, field)
    if request.measure and layout.multi_vectors:
        raise InvalidInput(
            f"the recall of {field_words(field)} cannot be measured: the index is built here on single "
            "vectors, and it has several a row; leave the measurement out"
        )
    return layout


def _chosen_target(
    store: Store, info: CollectionInfo, request: MigrationRequest
) -> tuple[str, Migration | None]:
    """Return the name of the copy, and the unfinished migration to it that a run would continue.

    Raises CollectionExists, AlreadyCorrected, and as `chosen_switch` does.
    """
    target = request.target or f"{info.name}_hubness"
    # Those that are derived from the source's are as good as it.
    validate_new_names(store, request.target, request.bank_collection)
    unfinished = _unfinished(store, info, target, restart=request.restart)
    if request.alias or request.rename:
        chosen_switch(store, info.name, target, request.alias, request.rename)
    return target, unfinished


def _remarks(
    store: Store,
    fitting: Fitting,
    request: MigrationRequest,
    verdict: TuningRecord | None,
    vectors_per_row: float,
) -> list[str]:
    """Return what the database, the verdict on the bank and the estimator say of the plan."""
    info = fitting.source
    field = fitting.field

    # The cutover moves the caller's alias, so it is not one of those that stay at the source.
    other_aliases = tuple(name for name in info.aliases if name != request.alias)
    remarks = store.remarks(replace(info, aliases=other_aliases), field)

    remarks += verdict_remarks(
        verdict, info, request.judging, is_followed=request.estimator is None
    )

    remarks += filter(None, [fitting.chosen.remark])
    remarks += fitting.kinds.remarks
    remarks += kind_remarks(info, field, request.bank, request.kinds.name, fitting.kinds.rule)
    if fitting.estimator.needs_gallery:
        size = 4 * fitting.layout.dim * fitting.survey.rows * vectors_per_row / 2**20
        remarks.append(
            f"the estimator is fitted on the whole gallery, {size:,.0f} MiB of vectors in memory"
        )

    return remarks


def _hidden_fields(layout: Layout, suffix: str) -> list[str]:
    """Return the names of the hidden fields of rows with augmented vectors."""
    names = ["bias", "epoch"]
    if layout.metric == "COSINE" and not layout.multi_vectors:
        names.append("norm")
    return [f"hubness_{name}{suffix}" for name in names]


LENGTHS_REMARK = (
    "the lengths of the vectors vary, under which the graph of the copy may find less of the corrected "
    "ranking at the same ef: plan with --measure, which says how much, and the ef that restores it"
)


def _has_graph_of_products(store: Store, fitting: Fitting) -> bool:
    """Whether the copy's index is a graph of single vectors by inner products, in float32."""
    if fitting.layout.metric != "IP" or fitting.layout.multi_vectors:
        return False
    has_graph = IndexSpec.of(fitting.vector.index_type, {}).search_parameter == "ef"
    return has_graph and store.column_needs(fitting.source, fitting.field).length_pull


def _duplicate_remarks(store: Store, fitting: Fitting) -> list[str]:
    """Return a remark if several rows have one key; the copy gets one of them."""
    info = fitting.source
    distinct = fitting.survey.rows
    if distinct >= info.rows:
        return []

    # Clients may have inserted and deleted rows while the keys were read.
    counted = store.count(info.name)
    if distinct >= counted:
        return []

    rows = min(info.rows, counted)
    return [f"{rows} rows but {distinct} distinct keys: one row of each key is copied"]


def waits_for_clients(
    client_ttl: float, copy_seconds: float, *, alias: object, rename: object
) -> float:
    """Return how long a run waits until clients have read the states that it writes, in seconds.

    alias, rename: whether one moves, and whether the source gets another name for it.
    """
    # Clients write to the copy too one state_ttl after the announcement, and the copy takes
    # part of that time.
    before_the_end = max(0.0, client_ttl - copy_seconds)
    # Before the name moves all writes must reach both; after it, some clients have not heard yet. If
    # the source gets a new name, clients send their requests to it before its own leads to the copy.
    waits = 3 if rename else 2 if alias else 0
    return before_the_end + waits * client_ttl


def _with_resume_remark(plan: MigrationPlan, unfinished: Migration | None) -> MigrationPlan:
    """Return the plan with a remark if it differs from an unfinished run, which refuses it then."""
    if unfinished is None or plan.restart:
        return plan

    changes = unfinished.changes(plan.arguments)
    if not changes:
        return plan

    remark = f"{changes}: a run needs them again, or --restart, which drops it first"
    return replace(plan, remarks=(*plan.remarks, remark))


def _unfinished(
    store: Store, info: CollectionInfo, target: str, *, restart: bool
) -> Migration | None:
    """Return the unfinished migration that a run would continue.

    Raises CollectionExists, AlreadyCorrected.
    """
    migration = Ledger(store).of_target(target)
    if restart and migration is not None and not store.exists(target):
        # Its copy is gone, in whatever phase that happened.
        return None

    if migration is not None and migration.source == info.name:
        if migration.phase in {"switching", "switched", "rolling back"}:
            raise AlreadyCorrected(
                f"the application was switched from {info.name!r} to {target!r}: roll back, or "
                "refresh that"
            )

        if migration.state is not None and migration.phase != "finished":
            return migration

    if store.exists(target):
        raise CollectionExists(
            f"{target!r} exists already as another collection: choose another target"
        )

    return None
