"""A plan to make a copy: `Copy`, which a caller chooses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

from milvus_hubness.basics.progress import Progress
from milvus_hubness.basics.texts import field_words
from milvus_hubness.correction.codec.arrays import BYTES, Floats
from milvus_hubness.correction.codec.index_hints import lengths_vary
from milvus_hubness.correction.codec.layout import Layout
from milvus_hubness.correction.codec.parts import BiasSlots
from milvus_hubness.correction.estimators import to_dict
from milvus_hubness.correction.items import Items
from milvus_hubness.correction.kernels.ann import IndexSpec
from milvus_hubness.errors import (
    AlreadyCorrected,
    CannotMigrate,
    CollectionExists,
    EmptyCollection,
    InvalidInput,
    InvalidParameter,
)
from milvus_hubness.jobs.common.choice import Chosen, chosen
from milvus_hubness.jobs.common.lease_records import expect_client_ttl
from milvus_hubness.jobs.common.plan import Body, Draft, Plan, PlannedBody
from milvus_hubness.jobs.common.recipe import Recipe
from milvus_hubness.jobs.migration.estimates import (
    Estimates,
    Resolution,
    estimates,
    recall_gate,
    recall_words,
    resolution_of,
    widths_of,
)
from milvus_hubness.jobs.migration.ledger import RENAMED, Ledger, Migration, chosen_switch
from milvus_hubness.jobs.migration.survey import SAMPLE_ROWS, Survey, sampled_rows, survey
from milvus_hubness.jobs.store.protocols import Store, validate_new_names
from milvus_hubness.jobs.store.records import CollectionInfo, VectorField
from milvus_hubness.quality.recall import RecallGate


@dataclass(frozen=True, eq=False, kw_only=True)
class PlannedCopy(PlannedBody):
    """The copy of a plan, with the field in augmented form."""

    job = "migrate"

    request: Copy
    """What the caller chose."""
    target: str
    """The name of the copy."""
    survey: Survey
    """It fixes the chunks of rows."""
    partitions: tuple[str, ...]
    """The partitions of the source that have names."""
    hidden_fields: tuple[str, ...]
    """The fields that the copy has for its biases."""
    arguments: dict[str, Any]
    """The arguments that a further run must repeat, as plain data."""
    server: str
    """The version of the server."""
    estimates: Estimates
    """How long copy and verification take, and the memory of the loaded source and target."""
    waits: float
    """Seconds that the run waits for clients."""
    recall: RecallGate | None
    """What the index loses with the augmented form, if that was measured."""
    resolution: Resolution | None
    """What an exact search loses, if that was measured."""

    def facts(self, plan: Plan[Any]) -> dict[str, Any]:
        """Return what the plan says of the copy, as plain data."""
        vector = plan.vector
        layout = plan.chosen.layout
        widths = widths_of(layout, vector)
        rows = self.survey.rows
        vectors_per_row = self.estimates.vectors_per_row
        memory_bytes = self.estimates.memory_bytes
        return {
            "target": self.target,
            "index_type": vector.index_type,
            "index_params": vector.index_params,
            "dim": layout.dim,
            "dtype": vector.dtype,
            "width": widths["target"],
            "spread": layout.slots.spread,
            "rows": rows,
            "partitions": list(self.partitions),
            "hidden_fields": list(self.hidden_fields),
            "vector_bytes": {
                name: int(BYTES[vector.dtype] * width * vectors_per_row * rows)
                for name, width in widths.items()
            },
            "vectors_per_row": round(vectors_per_row, 1),
            "alias": self.request.alias,
            "rename": self.request.rename,
            "server": self.server,
            "memory_bytes": {**memory_bytes, "both": sum(memory_bytes.values())},
            "estimated_seconds": round(self.estimates.seconds + self.waits, 1),
            "waiting_seconds": round(self.waits, 1),
            "resolution": asdict(self.resolution) if self.resolution else None,
            "recall": {**self.recall.to_dict(), "said": recall_words(self.recall)}
            if self.recall
            else None,
        }


@dataclass(frozen=True, eq=False, kw_only=True)
class Copy(Body[PlannedCopy]):
    """A copy of the collection has the biases in its vectors; `migrate` makes it.

    Raises InvalidParameter.
    """

    target: str | None = None
    """Name of the copy, by default derived from the source's."""
    alias: str | None = None
    """The alias that the cutover moves."""
    rename: bool = False
    """Whether the cutover moves the source's own name instead."""
    measure: bool = False
    """Measure the recall that the index loses with the augmented form, in some 10 s."""
    index_type: str | None = None
    """Of the copy's index; by default that of the source."""
    index_params: Mapping[str, Any] | None = None
    """Of the copy's index; if the type is unchanged, unnamed parameters are the source's."""
    restart: bool = False
    """Whether the run drops an unfinished target first."""
    client_ttl: float = 0.0
    """As in MigrationOptions; 0 if no client writes."""

    def __post_init__(self) -> None:
        expect_client_ttl(self.client_ttl)
        if self.index_type is not None and not isinstance(self.index_type, str):
            raise InvalidParameter(
                f"index_type must be a text such as 'HNSW', not {self.index_type!r}"
            )
        if self.index_params is not None and not isinstance(self.index_params, Mapping):
            raise InvalidParameter(
                f"index_params must be a dictionary such as {{'M': 16}}, not {self.index_params!r}"
            )

    def expect_correctable(self, store: Store, draft: Draft, recipe: Recipe) -> None:
        """Raise CannotMigrate, AlreadyCorrected, EmptyCollection unless the field can be copied."""
        info = draft.source
        state = info.states.get(draft.field)
        # Biases in a side collection leave the rows as they are, and these can be copied.
        if state is not None and not state.codec.sides:
            words = field_words(draft.field)
            if state.codec.needs_candidates:
                raise AlreadyCorrected(
                    f"{info.name!r} carries biases for {words} in keys that a copy would need itself"
                )

            raise AlreadyCorrected(
                f"{info.name!r} is already corrected in {words} (from {state.source!r}): refresh it "
                "instead"
            )

        if obstacles := store.obstacles(info, draft.field, draft.suffix):
            raise CannotMigrate(f"{info.name!r} cannot be migrated: {'; '.join(obstacles)}")
        if not info.rows:
            raise EmptyCollection(f"{info.name!r} has no rows: insert items first")

    def planned(
        self, store: Store, draft: Draft, recipe: Recipe, progress: Progress
    ) -> Plan[PlannedCopy]:
        """Choose the biases on a sample, and estimate what the copy takes."""
        present = draft.source
        field = draft.field
        # From here on, the source is described with the copy's index, which decides on the layout.
        index = self._index(draft.vector)
        if index is not None:
            draft = replace(draft, source=present.with_index(field, **index))
        info = draft.source
        store.validate_index(draft.vector, present.vector_fields[field])
        layout = _layout(store, info, field, recipe)
        if self.measure and layout.multi_vectors:
            raise InvalidInput(
                f"the recall of {field_words(field)} cannot be measured: the index is built here on "
                "single vectors, and it has several a row; leave the measurement out"
            )

        # One that is derived from the source's is as good as it.
        validate_new_names(store, self.target)
        target = self.target or f"{info.name}_hubness"
        renamed = RENAMED.format(info.name) if self.rename else None
        draft.expect_bank_apart(target, self.alias, renamed)
        unfinished = _unfinished(store, info, target, restart=self.restart)
        if self.alias is not None or self.rename:
            chosen_switch(store, info.name, target, self.alias, self.rename)
        surveyed = survey(store, info, store.chunk_rows(info), progress=progress)

        @cache
        def sample() -> tuple[Floats, Items]:
            return sampled_rows(store, info, field, surveyed, layout, SAMPLE_ROWS)

        biases = chosen(
            store,
            info,
            field,
            layout,
            recipe,
            sample,
            # Who continues a migration has decided already.
            is_judged=unfinished is None,
            progress=progress,
        )
        estimated = estimates(store, draft, surveyed, biases)
        remarks = _remarks(
            store, draft, biases, self.alias, surveyed.rows * estimated.vectors_per_row
        )
        if index is not None:
            former = present.vector_fields[field]
            remarks.append(
                f"the source's index is {former.index_type} {former.index_params or ''}".rstrip()
            )

        remarks += _duplicate_remarks(store, info, surveyed.rows)
        if not self.measure and _has_graph_of_products(store, draft, biases.layout):
            vectors, _ = sample()
            if lengths_vary(biases.layout, vectors):
                remarks.append(LENGTHS_REMARK)

        resolution = resolution_of(store, draft, surveyed, biases)
        if resolution is not None:
            remarks += resolution.remark(draft.vector.dtype)
        arguments = _arguments(draft, biases, store.schema_facts(present), index)
        if unfinished and not self.restart and (changes := unfinished.changes(arguments)):
            remarks.append(f"{changes}: a run needs them again, or --restart, which drops it first")

        body = PlannedCopy(
            request=self,
            target=target,
            survey=surveyed,
            partitions=tuple(store.named_partitions(info)),
            hidden_fields=tuple(store.fields_of_copy(_hidden_fields(biases.layout, draft.suffix))),
            arguments=arguments,
            server=store.server_version(),
            estimates=estimated,
            waits=waits_for_clients(
                self.client_ttl, estimated.seconds, alias=self.alias, rename=self.rename
            ),
            recall=recall_gate(store, draft, surveyed, biases) if self.measure else None,
            resolution=resolution,
        )
        return Plan(**vars(draft), chosen=biases, remarks=tuple(remarks), body=body)

    def _index(self, vector: VectorField) -> dict[str, Any] | None:
        """Return the type and the parameters of the copy's index; None for those of the source."""
        if self.index_type is None and not self.index_params:
            return None

        index_type = self.index_type.upper() if self.index_type else vector.index_type
        inherited = vector.index_params if index_type == vector.index_type else {}
        return {
            "index_type": index_type,
            "index_params": {**inherited, **(self.index_params or {})},
        }


def _layout(store: Store, info: CollectionInfo, field: str, recipe: Recipe) -> Layout:
    """Return the columns of the copy's vectors, without kinds. Raises CannotMigrate for kinds
    that are not possible, InvalidParameter.
    """
    vector = info.vector_fields[field]
    needs = store.column_needs(info, field)
    layout = replace(
        vector.plain_layout, slots=BiasSlots(spread=needs.spread), multiple_of=needs.multiple_of
    )
    recipe.kind_request.expect_possible(layout, field)
    return layout


def _remarks(
    store: Store, draft: Draft, biases: Chosen, alias: str | None, vectors: float
) -> list[str]:
    """Return what the database, the verdict on the bank and the method say of the plan.

    vectors: about how many vectors all rows have.
    """
    info = draft.source

    # The cutover moves the caller's alias, so it is not one of those that stay at the source.
    staying = replace(info, aliases=tuple(name for name in info.aliases if name != alias))
    remarks = store.remarks(staying, draft.field)
    remarks += biases.remarks
    if biases.estimator.needs_gallery:
        size = 4 * biases.layout.dim * vectors / 2**20
        remarks.append(
            f"the estimator is fitted on the whole gallery, {size:,.0f} MiB of vectors in memory"
        )

    return remarks


def _arguments(
    draft: Draft, biases: Chosen, schema: dict[str, Any], index: dict[str, Any] | None
) -> dict[str, Any]:
    """Return the arguments that a further run must repeat, as plain data.

    schema: the facts of the source's schema that it must find unchanged. index: of the copy, if it
    differs from the source's.
    """
    return {
        "schema": schema,
        "field": draft.field,
        "bank_collection": draft.bank_collection,
        "bank": biases.bank.fingerprint,
        "target_bank": biases.target_bank.fingerprint if biases.target_bank else None,
        "estimator": to_dict(biases.estimator),
        "strength": biases.strength,
        "gate": biases.gate,
        "prior": biases.prior.arguments,
        "kind": biases.kind,
        "on_hub": biases.on_hub,
        "slots": biases.layout.slots.count,
        "spread": biases.layout.slots.spread,
        "index": index,
    }


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


def _has_graph_of_products(store: Store, draft: Draft, layout: Layout) -> bool:
    """Whether the copy's index is a graph of single vectors by inner products, in float32."""
    return (
        layout.metric == "IP"
        and not layout.multi_vectors
        and IndexSpec.of(draft.vector.index_type, {}).search_parameter == "ef"
        and store.column_needs(draft.source, draft.field).length_pull
    )


def _duplicate_remarks(store: Store, info: CollectionInfo, distinct: int) -> list[str]:
    """Return a remark if several rows have one key; the copy gets one of them."""
    if distinct >= info.rows:
        return []

    # Clients may have inserted and deleted rows while the keys were read.
    counted = store.count(info.name)
    if distinct >= counted:
        return []

    return [
        f"{min(info.rows, counted)} rows but {distinct} distinct keys: one row of each key is copied"
    ]


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
