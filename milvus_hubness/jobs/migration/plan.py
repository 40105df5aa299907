"""The plan of a migration, which is made without a write, and the options of its run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from typing import Any

from milvus_hubness.basics.defaults import Engine
from milvus_hubness.basics.notebooks import ShownAsTable
from milvus_hubness.basics.texts import field_words
from milvus_hubness.basics.words import expect_word
from milvus_hubness.correction.banks.bank import BankLike
from milvus_hubness.correction.codec.arrays import BYTES, Floats
from milvus_hubness.correction.codec.index_hints import lengths_vary
from milvus_hubness.correction.codec.layout import Layout
from milvus_hubness.correction.codec.parts import BiasSlots
from milvus_hubness.correction.estimators import to_dict
from milvus_hubness.correction.kernels.ann import IndexSpec
from milvus_hubness.correction.prior import Items
from milvus_hubness.correction.state import suffix_for
from milvus_hubness.errors import (
    AlreadyCorrected,
    CannotMigrate,
    CollectionExists,
    EmptyCollection,
    InvalidInput,
    InvalidParameter,
)
from milvus_hubness.jobs.common.choice import chosen
from milvus_hubness.jobs.common.inputs import only_field
from milvus_hubness.jobs.common.lease_records import default_client_ttl, expect_client_ttl
from milvus_hubness.jobs.common.progress import Events, Throttle
from milvus_hubness.jobs.common.recipe import Recipe
from milvus_hubness.jobs.migration.ledger import Ledger, Migration, chosen_switch
from milvus_hubness.jobs.migration.survey import (
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
from milvus_hubness.jobs.store.protocols import Store, expect_store, validate_new_names
from milvus_hubness.jobs.store.records import CollectionInfo
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
    alias: str | None
    """The alias that the cutover moves."""
    rename: bool
    """Whether the cutover moves the source's own name instead."""
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

    @property
    def rows(self) -> int:
        """The number of distinct keys."""
        return self.survey.rows

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments that a further run must repeat, as plain data."""
        chosen = self.chosen
        return {
            "schema": self.schema,
            "field": self.field,
            "bank_collection": self.bank_collection,
            "bank": chosen.bank.fingerprint,
            "target_bank": chosen.target_bank.fingerprint if chosen.target_bank else None,
            "estimator": to_dict(chosen.estimator),
            "strength": chosen.strength,
            "gate": chosen.gate,
            "prior": chosen.prior.arguments,
            "kind": chosen.kind,
            "on_hub": chosen.on_hub,
            "slots": self.layout.slots.count,
            "spread": self.layout.slots.spread,
            "index": self.index,
        }

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain data, for people and for --json."""
        vector = self.vector
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
            "spread": self.layout.slots.spread,
            "rows": self.rows,
            "partitions": list(self.partitions),
            "hidden_fields": list(self.hidden_fields),
            "vector_bytes": {
                name: int(BYTES[vector.dtype] * width * self.vectors_per_row * self.rows)
                for name, width in self.widths.items()
            },
            "vectors_per_row": round(self.vectors_per_row, 1),
            "bank": self.chosen.bank_facts(self.bank_collection),
            **self.chosen.facts,
            "alias": self.alias,
            "rename": self.rename,
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
    recipe: Recipe | BankLike | str,
    *,
    field: str | None = None,
    target: str | None = None,
    bank_collection: str | None = None,
    alias: str | None = None,
    rename: bool = False,
    measure: bool = False,
    index_type: str | None = None,
    index_params: Mapping[str, Any] | None = None,
    restart: bool = False,
    client_ttl: float = 0.0,
) -> MigrationPlan:
    """Plan a migration of `source`. Read only.

    recipe: which biases the copy gets, or a bank alone, with which the choice of tuning on it, else the
    default, applies. field: the vector field to correct, by default the only one. target,
    bank_collection: names of the copy, and of the collection that holds the bank; by default derived
    from the source's. index_type, index_params: of the copy's index; if the type is unchanged, unnamed
    parameters are the source's. measure: measure the recall that such an index loses with the augmented
    form, in some 10 s. client_ttl: as in MigrationOptions; 0 if no client writes.

    `migrate` raises CorrectionNotRecommended before its first write if the verdict on the bank is
    "leave it alone", unless the recipe goes on all the same.

    Raises CollectionNotFound, AlreadyCorrected, EmptyCollection, CannotMigrate, which names every
    obstacle, CollectionExists, DimensionMismatch, BankTooSmall, InvalidParameter, InvalidInput.
    """
    expect_client_ttl(client_ttl)
    expect_index(index_type, index_params)
    recipe = Recipe.of(recipe)
    expect_store(store)
    recipe = recipe.read(store, source, field)
    present, field = _correctable(store, source, field)

    # From here on, the source is described with the copy's index, which decides on the layout.
    index = _copy_index(present, field, index_type, index_params)
    info = present.with_index(field, **index) if index else present
    store.validate_index(info.vector_fields[field], present.vector_fields[field])
    layout = _layout(store, info, field, recipe)
    if measure and layout.multi_vectors:
        raise InvalidInput(
            f"the recall of {field_words(field)} cannot be measured: the index is built here on single "
            "vectors, and it has several a row; leave the measurement out"
        )
    # Those that are derived from the source's are as good as it.
    validate_new_names(store, target, bank_collection)
    target = target or f"{info.name}_hubness"
    unfinished = _unfinished(store, info, target, restart=restart)
    if alias or rename:
        chosen_switch(store, info.name, target, alias, rename)
    surveyed = survey(store, info, store.chunk_rows(info))

    @cache
    def sample() -> tuple[Floats, Items]:
        return sampled_rows(store, info, field, surveyed, layout, SAMPLE_ROWS)

    fitting = Fitting(
        source=info,
        field=field,
        survey=surveyed,
        # Who continues a migration has decided already.
        chosen=chosen(store, info, field, layout, recipe, sample, is_judged=unfinished is None),
    )
    estimated = estimates(store, fitting)
    remarks = _remarks(store, fitting, alias, estimated.vectors_per_row)
    if index is not None:
        former = present.vector_fields[field]
        remarks.append(
            f"the source's index is {former.index_type} {former.index_params or ''}".rstrip()
        )

    remarks += _duplicate_remarks(store, fitting)
    if not measure and _has_graph_of_products(store, fitting):
        vectors, _ = sample()
        if lengths_vary(fitting.layout, vectors):
            remarks.append(LENGTHS_REMARK)

    resolution = resolution_of(store, fitting)
    if resolution is not None:
        remarks += resolution.remark(fitting.vector.dtype)
    recall = recall_gate(store, fitting) if measure else None

    suffix = suffix_for(field, info.states.values())
    plan = MigrationPlan(
        **vars(fitting),
        schema=store.schema_facts(present),
        target=target,
        suffix=suffix,
        partitions=tuple(store.named_partitions(info)),
        hidden_fields=tuple(store.fields_of_copy(_hidden_fields(fitting.layout, suffix))),
        bank_collection=bank_collection or bank_name(info.name),
        alias=alias,
        rename=rename,
        restart=restart,
        remarks=tuple(remarks),
        server=store.server_version(),
        **estimated._asdict(),
        waits=waits_for_clients(client_ttl, estimated.seconds, alias=alias, rename=rename),
        recall=recall,
        resolution=resolution,
        index=index,
    )
    return _with_resume_remark(plan, unfinished)


def _correctable(store: Store, source: str, field: str | None) -> tuple[CollectionInfo, str]:
    """Return the source and its field, by default the only one, if a migration can correct them.

    Raises CannotMigrate, AlreadyCorrected, EmptyCollection, CollectionNotFound, InvalidInput.
    """
    info = store.info(source)
    if info.is_bank:
        raise CannotMigrate(f"{info.name!r} is a query bank: name the collection of the items")

    field = field or only_field(info)
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
    info: CollectionInfo, field: str, index_type: str | None, index_params: Mapping[str, Any] | None
) -> dict[str, Any] | None:
    """Return the type and the parameters of the copy's index; None for those of the source."""
    if index_type is None and not index_params:
        return None

    vector = info.vector_fields[field]
    chosen_type = index_type.upper() if index_type else vector.index_type
    inherited = vector.index_params if chosen_type == vector.index_type else {}
    return {"index_type": chosen_type, "index_params": {**inherited, **(index_params or {})}}


def _layout(store: Store, info: CollectionInfo, field: str, recipe: Recipe) -> Layout:
    """Return the columns of the copy's vectors, without kinds. Raises DimensionMismatch,
    InvalidParameter.
    """
    vector = info.vector_fields[field]
    needs = store.column_needs(info, field)
    layout = replace(
        vector.plain_layout, slots=BiasSlots(spread=needs.spread), multiple_of=needs.multiple_of
    )
    bank = recipe.required_bank(info.name)
    bank.expect_rows(layout.multi_vectors, field_words(field))
    bank.expect_dim(layout.dim, "the field")
    recipe.kind_request.expect_possible(layout, field)
    return layout


def _remarks(
    store: Store, fitting: Fitting, alias: str | None, vectors_per_row: float
) -> list[str]:
    """Return what the database, the verdict on the bank and the method say of the plan."""
    info = fitting.source
    chosen = fitting.chosen

    # The cutover moves the caller's alias, so it is not one of those that stay at the source.
    other_aliases = tuple(name for name in info.aliases if name != alias)
    remarks = store.remarks(replace(info, aliases=other_aliases), fitting.field)
    remarks += chosen.remarks
    if chosen.estimator.needs_gallery:
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
    if not alias and not rename:
        # Clients write to the copy too one state_ttl after the announcement, and the copy takes
        # part of that time.
        return max(0.0, client_ttl - copy_seconds)

    # Before the name moves all writes must reach both; after it, some clients have not heard yet. If
    # the source gets a new name, clients send their requests to it before its own leads to the copy.
    return client_ttl * (3 if rename else 2)


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
