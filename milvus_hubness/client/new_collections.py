"""Collections that are corrected from their first row on. No I/O."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pymilvus import CollectionSchema, DataType, MilvusClient
from pymilvus.milvus_client.index import IndexParams

from milvus_hubness.banks.bank import BankLike, QueryBank, optional_bank
from milvus_hubness.banks.generations import Made, StoredBank
from milvus_hubness.codec.arrays import ALIGNMENT, Dtype, as_metric
from milvus_hubness.codec.index_hints import measured_on
from milvus_hubness.codec.layout import Layout
from milvus_hubness.correction import Correction, initial_state
from milvus_hubness.errors import InvalidInput, InvalidParameter
from milvus_hubness.estimators import NNN, Estimator
from milvus_hubness.state import BankReference, CollectionState, slots_for
from milvus_hubness.stores import milvus_schema
from milvus_hubness.stores.protocols import Store


@dataclass(frozen=True)
class CorrectionConfig:
    """The correction of a vector field of a new collection.

    bank: (m, d) reference queries. estimator: one that needs no gallery, since there is none yet; a later
    refresh can use any other. target_bank: reference items. anns_field: by default the only vector field.
    bank_collection: by default <collection>__bank, for a field after the first <collection>__bank_<field>.
    strength: w of searches that name none. profiles: for how many bias profiles there is room.
    """

    bank: BankLike
    estimator: Estimator = field(default_factory=lambda: NNN(16))
    target_bank: BankLike | None = None
    anns_field: str | None = None
    bank_collection: str | None = None
    strength: float = 1.0
    profiles: int = 1


@dataclass(frozen=True, eq=False)
class NewCollection:
    """The arguments of MilvusClient.create_collection that define the schema and the indexes."""

    dimension: int | None
    primary_field_name: str
    id_type: str | DataType
    vector_field_name: str
    metric_type: str
    auto_id: bool
    schema: CollectionSchema | None
    index_params: IndexParams | None

    def as_given(self) -> dict[str, Any]:
        """Return the arguments by name."""
        return dict(vars(self))

    def in_full(self, options: dict[str, Any]) -> tuple[CollectionSchema, IndexParams]:
        """Return the schema and the indexes; for the quick form, those that pymilvus would create.

        Removes from `options` the arguments that go into the schema. Raises InvalidParameter.
        """
        if self.schema is not None:
            return self.schema, self.index_params or IndexParams()
        index = IndexParams()
        index.add_index(self.vector_field_name, index_type="AUTOINDEX", metric_type=self.metric_type)
        return self._quick_schema(options), index

    def _quick_schema(self, options: dict[str, Any]) -> CollectionSchema:
        kinds = {"int": DataType.INT64, "string": DataType.VARCHAR, "str": DataType.VARCHAR}
        kind = kinds.get(self.id_type) if isinstance(self.id_type, str) else self.id_type
        if kind not in (DataType.INT64, DataType.VARCHAR):
            raise InvalidParameter(f'id_type is "int" or "string", got {self.id_type!r}')
        if self.dimension is None:
            raise InvalidParameter("give the dimension, or a schema")
        schema = MilvusClient.create_schema(
            auto_id=self.auto_id, enable_dynamic_field=options.pop("enable_dynamic_field", True)
        )
        length = options.pop("max_length", None)
        limits = {"max_length": length} if length and kind == DataType.VARCHAR else {}
        schema.add_field(self.primary_field_name, kind, is_primary=True, **limits)
        schema.add_field(self.vector_field_name, DataType.FLOAT_VECTOR, dim=self.dimension)
        schema.verify()
        return schema


@dataclass(frozen=True, eq=False)
class Born:
    """One corrected field of a collection to be created."""

    name: str
    suffix: str
    layout: Layout
    dtype: Dtype
    asked: CorrectionConfig
    bank_collection: str
    bank: StoredBank

    def save_bank(self, store: Store) -> tuple[BankReference, Made]:
        """Save the bank; return its reference and what was created for it."""
        return store.save_bank(self.bank_collection, self.bank, self.layout.metric)

    def state(self, collection: str, reference: BankReference) -> CollectionState:
        """Return the state of the field.

        The mean bias is 0 until the first full refresh, because there are no rows yet. Under L2 the layout's
        constants are measured on the target bank's items, or else on the queries, since vectors near each
        other have similar lengths. The constants stay, because every row is stored with them.
        """
        return initial_state(
            self.layout,
            self.asked.estimator,
            reference,
            field=self.name,
            suffix=self.suffix,
            dtype=self.dtype,
            source=collection,
            strength=self.asked.strength,
        )


def planned(
    collection: str,
    hubness: CorrectionConfig | Sequence[CorrectionConfig],
    schema: CollectionSchema,
    index: IndexParams,
) -> list[Born]:
    """Return the fields to correct in a collection of this schema, each with its fitted bank.

    Raises InvalidInput for a field that is missing, named twice or without an index, and if an estimator
    needs a gallery; InvalidParameter, DimensionMismatch, BankTooSmall.
    """
    if obstacles := milvus_schema.kind_obstacles(schema.to_dict()):
        raise InvalidInput(f"collection {collection!r} cannot be corrected: {'; '.join(obstacles)}")
    vectors = {each.name: each for each in schema.fields if each.dtype in milvus_schema.DTYPES}
    dims = {name: int(each.params["dim"]) for name, each in vectors.items()}
    by_field = {each.field_name: each.get_index_configs() for each in index}
    made: list[Born] = []
    for asked in [hubness] if isinstance(hubness, CorrectionConfig) else hubness:
        name = asked.anns_field or (next(iter(dims)) if len(dims) == 1 else None)
        if name is None or name not in dims:
            there = ", ".join(dims) or "none"
            raise InvalidInput(f"name the float vector field to correct, there are: {there}")
        if any(each.name == name for each in made):
            raise InvalidInput(f"field {name!r} is to be corrected twice")
        metric = by_field.get(name, {}).get("metric_type")
        if not metric:
            raise InvalidInput(f"the metric of field {name!r} is unknown: give its index in index_params")
        kind = milvus_schema.DTYPES[vectors[name].dtype]
        made.append(_born(collection, name, asked, dims[name], kind, metric, by_field[name], bool(made)))
    return made


def _born(
    collection: str,
    name: str,
    query_vectors: CorrectionConfig,
    dim: int,
    dtype: Dtype,
    metric: str,
    index: Mapping[str, Any],
    is_further: bool,
) -> Born:
    if query_vectors.estimator.needs_gallery:
        raise InvalidInput(
            f"{type(query_vectors.estimator).__name__} is fitted on a gallery, and {collection!r} has no "
            "rows yet: "
            "begin with another, NNN for one, or one with an absolute tau, and refresh once there are rows"
        )
    parts = index.get("m") if "PQ" in str(index.get("index_type")) else None
    layout = Layout(
        dim,
        as_metric(metric),
        slots_for(query_vectors.profiles),
        math.lcm(ALIGNMENT, int(parts)) if parts else ALIGNMENT,
    )
    bank, targets = QueryBank.of(query_vectors.bank), optional_bank(query_vectors.target_bank)
    bank.expect_dim(dim, "the field")
    layout = measured_on(
        layout,
        (targets or bank).vectors,
        bank.vectors,
        locality_hints=milvus_schema.takes_locality_hints(str(index.get("index_type")), dtype),
        taken_off=query_vectors.target_bank is not None,
    )
    fitted = Correction.fit(layout, query_vectors.estimator, bank, target_bank=targets).fitted
    suffix = f"_{name}" if is_further else ""
    return Born(
        name,
        suffix,
        layout,
        dtype,
        query_vectors,
        query_vectors.bank_collection or f"{collection}__bank{suffix}",
        StoredBank(bank, fitted.potentials, targets),
    )


def stored_schema(schema: CollectionSchema, states: Iterable[CollectionState]) -> CollectionSchema:
    """Return the schema with the stored width of corrected fields, and the hidden fields at the end."""
    stored = CollectionSchema.construct_from_dict(schema.to_dict())
    for state in states:
        milvus_schema.widen(stored, state)
    return stored


def served_indexes(index: IndexParams, states: Mapping[str, CollectionState]) -> IndexParams:
    """Return the indexes that the server builds: corrected fields have the metric IP.

    Raises InvalidParameter if the metric of a field differs from the metric of its correction.
    """
    served = IndexParams()
    for each in index:
        configs = dict(each.get_index_configs())
        kind = configs.pop("index_type", each.index_type)
        state = states.get(each.field_name)
        if state is not None and not state.codec.leaves_vectors:
            asked = str(configs.get("metric_type") or state.metric).upper()
            if asked != state.metric:
                raise InvalidParameter(
                    f"field {each.field_name!r} was corrected for {state.metric}: "
                    f"its index cannot take {asked}"
                )
            configs["metric_type"] = "IP"
        served.add_index(each.field_name, index_type=kind, index_name=each.index_name, **configs)
    return served
