"""Milvus schemas and indexes: read, checked, and built for the corrected copy."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from pymilvus import CollectionSchema, DataType, FunctionType, MilvusClient
from pymilvus.milvus_client.index import IndexParams

from milvus_hubness.correction.codec.arrays import ALIGNMENT, Dtype, StorageFormat
from milvus_hubness.correction.codec.base import EPOCH_FIELD, HIDDEN_FIELDS
from milvus_hubness.correction.codec.beside import SIDE_FIELD, SIDE_WIDTH
from milvus_hubness.correction.codec.quantisation import spread_for
from milvus_hubness.correction.state import (
    REMEDY,
    CollectionState,
    described_property,
    read_states,
)
from milvus_hubness.errors import InvalidInput, StateError
from milvus_hubness.jobs.store.ownership import side_helpers
from milvus_hubness.jobs.store.records import (
    SAMPLINGS_PROPERTY,
    CollectionInfo,
    ColumnNeeds,
    Samplings,
    VectorField,
)

DTYPES: dict[int, Dtype] = {
    DataType.FLOAT_VECTOR: "float32",
    DataType.FLOAT16_VECTOR: "float16",
    DataType.BFLOAT16_VECTOR: "bfloat16",
}
"""The vector types that can be corrected."""

_BYTE_VECTORS = {
    DataType.BINARY_VECTOR,
    DataType.INT8_VECTOR,
    DataType.FLOAT16_VECTOR,
    DataType.BFLOAT16_VECTOR,
}
"""Vectors that a query returns as lists of bytes."""

# What describe_index returns and is no parameter of the index.
_INDEX_IDENTITY = {"field_name", "index_name", "index_type", "metric_type"}
_INDEX_PROGRESS = {"total_rows", "indexed_rows", "pending_index_rows", "state"}


def fields_by_name(schema: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {field["name"]: field for field in schema["fields"]}


TTL_PROPERTY = "collection.ttl.seconds"
"""Milvus's property with the seconds after which rows expire."""


def time_to_live(properties: Mapping[str, Any]) -> int:
    """Return the seconds after which rows expire; 0 if they do not."""
    text = str(properties.get(TTL_PROPERTY) or "")
    return int(text) if text.isdecimal() else 0


def key_field(schema: dict[str, Any]) -> dict[str, Any]:
    return next(field for field in schema["fields"] if field.get("is_primary"))


NUMBERS = {
    DataType.INT8,
    DataType.INT16,
    DataType.INT32,
    DataType.INT64,
    DataType.FLOAT,
    DataType.DOUBLE,
}
"""The types of fields whose values are numbers."""


NAMES = {
    DataType.VARCHAR,
    DataType.BOOL,
    DataType.INT8,
    DataType.INT16,
    DataType.INT32,
    DataType.INT64,
}
"""The types of fields whose values can name a kind of item."""


def expect_values(
    schema: Mapping[str, Any], name: str, collection: str, *, are_numbers: bool
) -> None:
    """Raise InvalidInput unless rows of the collection can have a number in this field, or else a
    name: a text, a whole number or a truth value.
    """
    fields = fields_by_name(schema)
    types = NUMBERS if are_numbers else NAMES
    what = "numbers" if are_numbers else "texts, whole numbers or truth values"
    suitable = [field for field, described in fields.items() if described["type"] in types]
    choice = f"choose a field of {what} ({', '.join(suitable)})"
    if name not in fields:
        # Any key of a row may be a field without a place in the schema.
        if schema.get("enable_dynamic_field"):
            return
        raise InvalidInput(f"{collection!r} has no field {name!r}: {choice}")

    data_type = fields[name]["type"]
    if data_type not in types:
        wanted = "a number" if are_numbers else "a text, a whole number or a truth value"
        raise InvalidInput(
            f"field {name!r} of {collection!r} is {DataType(data_type).name}, not {wanted}: {choice}"
        )


def has_partition_key(schema: dict[str, Any]) -> bool:
    return any(field.get("is_partition_key") for field in schema["fields"])


def computed_by(schema: Mapping[str, Any]) -> dict[str, str]:
    """Return the fields that the server computes, with a description of the function.

    Clients may not write them. A function that re-ranks has no output field.
    """
    return {
        output: f"function {function['name']!r} ({_function_kind(function)})"
        for function in schema.get("functions") or ()
        for output in function.get("output_field_names") or ()
    }


def _function_kind(function: Mapping[str, Any]) -> str:
    try:
        return str(FunctionType(function["type"]).name)
    except (KeyError, ValueError):
        # A newer server may have further types.
        return "of another type"


def vector_fields(
    schema: dict[str, Any], indexes: Iterable[dict[str, Any]]
) -> dict[str, VectorField]:
    """Return the vector fields of DTYPES with their
    index; metric and type are empty without an index.
    """
    by_field = {index["field_name"]: index for index in indexes}
    computed = computed_by(schema)
    fields = {}
    for field in schema["fields"]:
        if dtype := DTYPES.get(field["type"]):
            index = by_field.get(field["name"], {})
            fields[field["name"]] = VectorField(
                field["name"],
                int(field["params"]["dim"]),
                index.get("metric_type", ""),
                index.get("index_type", ""),
                build_params(index),
                dtype,
                computed.get(field["name"], ""),
            )

    return fields


def expect_side_collections(states: Iterable[CollectionState], collection: str) -> None:
    """Raise StateError for the state of another database, whose biases are in payload keys."""
    for state in states:
        if state.codec.needs_candidates and state.codec.side_prefix is None:
            raise StateError(
                f"{described_property(state.property_name, collection)} names no side collection, "
                f"where Milvus has biases beside vectors: {REMEDY}"
            )


def form_of(schema: dict[str, Any], field: str) -> StorageFormat:
    """Return the storage format of a vector field;
    that of its augmented vectors if it is corrected.
    """
    for state in read_states(schema["properties"], schema["collection_name"]).values():
        if field == state.field:
            return state.codec.form
    described = fields_by_name(schema)[field]
    return StorageFormat(DTYPES[described["type"]], int(described["params"]["dim"]))


def insertable_rows(
    rows: Iterable[dict[str, Any]], schema: dict[str, Any], *, lite: bool
) -> list[dict[str, Any]]:
    """Return rows of a query in the form that pymilvus
    inserts, without fields that the server computes.

    lite: for Milvus Lite, which keeps JSON values in another way.
    """
    computed = computed_by(schema)
    fields = fields_by_name(schema)

    def insertable(name: str, value: Any) -> Any:
        field = fields.get(name)
        if field is not None and field["type"] in _BYTE_VECTORS and value:
            return value[0]
        if field is not None and field["type"] == DataType.JSON:
            return insertable_json(value, nullable=bool(field.get("nullable")), lite=lite)

        return value.tolist() if isinstance(value, np.ndarray) else value

    return [
        {name: insertable(name, value) for name, value in row.items() if name not in computed}
        for row in rows
    ]


def insertable_json(value: Any, *, nullable: bool, lite: bool) -> Any:
    """Return the value of a JSON field, as a query returns it, in the form that pymilvus inserts.

    pymilvus takes a text for JSON that is encoded already: a text of a query must be encoded first,
    or "5" would become 5, and "hello" would be refused. It takes None for the null of a nullable
    field; elsewhere a None was the null of JSON.
    """
    if value is None and nullable:
        return None
    if isinstance(value, dict | list):
        return value

    text = json.dumps(value)
    # Milvus Lite stores objects, lists and texts, and returns a text without its quotes: what is
    # read as 5 was the text "5", and what is read as "5" was a text with quotes in it.
    return json.dumps(text) if lite else text


def build_params(index: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters of describe_index other than status, type and metric."""
    params = {
        name: value
        for name, value in index.items()
        if name not in _INDEX_IDENTITY | _INDEX_PROGRESS
    }
    nested = params.pop("params", None)
    return {**params, **nested} if isinstance(nested, dict) else params


CELLED = {"IVF_FLAT", "IVF_SQ8", "GPU_IVF_FLAT", "HNSW", "HNSW_SQ", "AUTOINDEX"}
"""Indexes that divide rows into cells, or link them, and do not mix columns."""


def width_multiple(field: VectorField) -> int:
    """Return 16, or lcm(16, m) for product quantisation with m sub-vectors, 32 by default."""
    if "PQ" not in field.index_type:
        return ALIGNMENT
    return math.lcm(ALIGNMENT, int(field.index_params.get("m", 32)))


def bias_spread(field: VectorField, dim: int, metric: str) -> int:
    """Return in how many columns the index of a field needs a bias.

    dim, metric: of the user's vectors.

    RaBitQ rotates a vector before it rounds it. SQ6 and SQ8 have a range for each column, and keep
    a bias as well in one column of any scale as in several; so does SQ4U. Product quantisation
    gains 0.01 to 0.02 of recall by a spread.
    """
    return spread_for(dim, metric.upper()) if "RABITQ" in field.index_type.upper() else 1


def takes_graph_hint(field: VectorField) -> bool:
    """Whether an index keeps columns apart, so that the far numbers of a graph hint column make no
    other column coarser.

    RaBitQ does not, and SQ4U has one range for all columns.
    """
    has_one_range = str(field.index_params.get("sq_type")).upper() == "SQ4U"
    return not has_one_range and "RABITQ" not in field.index_type.upper()


def takes_length_pull(field: VectorField) -> bool:
    """Whether the index links rows, or compares them all, in float32.

    In half precision a graph hint column is too far to the right to be stored, and cells (IVF) by
    length would be those of rows that fewer raw searches find.
    """
    has_cells = any(name in field.index_type.upper() for name in ("IVF", "SCANN"))
    return takes_graph_hint(field) and field.dtype == "float32" and not has_cells


def takes_locality_hints(field: VectorField) -> bool:
    """Whether an index takes locality hint columns: it
    keeps columns apart and the hints take one column each.
    """
    return field.index_type in CELLED and field.dtype == "float32" and takes_graph_hint(field)


def column_needs(field: VectorField, dim: int, metric: str) -> ColumnNeeds:
    """Return what the index of a field asks of augmented vectors. dim, metric: as in `bias_spread`."""
    return ColumnNeeds(
        multiple_of=width_multiple(field),
        spread=bias_spread(field, dim, metric),
        graph_hint=takes_graph_hint(field),
        length_pull=takes_length_pull(field),
        locality_hints=takes_locality_hints(field),
        # Half precision would round the difference once more.
        kind_offsets=field.dtype == "float32",
    )


WITHOUT_COPY = "milvus-hubness enable corrects without a copy"


def kind_obstacles(schema: Mapping[str, Any]) -> list[str]:
    """Return the reasons why a collection of this kind cannot be corrected."""
    reasons = []
    if external := schema.get("external_source"):
        reasons.append(
            f"it is external, its rows are read from {external!r} and cannot be rewritten"
        )
    if schema.get("enable_namespace"):
        reasons.append(
            "it has namespaces: rows with one key in several namespaces cannot be distinguished"
        )
    return reasons


def struct_obstacles(schema: Mapping[str, Any]) -> list[str]:
    """Return the reasons why rows cannot be written again: those with arrays of structs.

    A query returns them in another form than an insert takes, and may change their numbers.
    """
    return [
        f"field {field['name']!r} has arrays of structs, which are not supported"
        for field in schema["fields"]
        if field.get("struct_fields")
    ]


def obstacles(source: CollectionInfo, field: str, suffix: str, *, lite: bool) -> list[str]:
    """Return the reasons why the collection cannot be copied, each with a remedy.

    The field may be corrected already, in its vectors: the copy then gets other biases.
    """
    reasons = kind_obstacles(source.schema)
    reasons += _field_obstacles(source, field)

    # A copy must have the keys of the source: a row is compared and repaired by its key.
    if key_field(source.schema).get("auto_id") and not lite:
        reasons.append(
            "auto_id: on this server no upsert keeps the key of its row, and a copy is repaired by "
            f"upserts: {WITHOUT_COPY}"
        )

    others = [state for state in source.states.values() if state.field != field]
    if sides := side_helpers(others):
        reasons.append(
            f"it has biases in the side collection {sides[0].collection!r}, which belongs to one "
            "collection only: disable that correction first"
        )

    fields = fields_by_name(source.schema)
    hidden_fields = {name + suffix for name in HIDDEN_FIELDS}
    present = source.states.get(field)
    if present is not None and not present.codec.leaves_vectors:
        # They are those of its own correction.
        hidden_fields -= {*present.codec.hidden_fields}
    if taken := sorted(hidden_fields & fields.keys()):
        reasons.append(f"fields of these names exist already: {', '.join(taken)}")
    reasons += [f"{reason}: {WITHOUT_COPY}" for reason in struct_obstacles(source.schema)]
    return reasons


def _field_obstacles(source: CollectionInfo, field: str) -> list[str]:
    """Return the reasons why a field cannot be corrected in a copy."""
    fields = fields_by_name(source.schema)
    if field not in source.vector_fields:
        field_type = DataType(fields[field]["type"]).name if field in fields else "missing"
        dense = ", ".join(source.vector_fields) or "none"
        corrected = ", ".join(DataType(dtype).name for dtype in DTYPES)
        return [f"field {field!r} is {field_type}: only {corrected} are corrected (here: {dense})"]

    vector = source.vector_fields[field]
    reasons = list(vector.obstacles)
    if fields[field].get("nullable"):
        reasons.append(f"field {field!r} is nullable: rows without a vector cannot carry a bias")
    return reasons


def remarks(source: CollectionInfo, field: str) -> list[str]:
    """Return remarks for the user about changes that a copy brings.

    source: with the copy's planned index.
    """
    remarks = []
    if source.time_to_live:
        remarks.append(
            f"rows live for {source.time_to_live:,} s after their last write, and those of the "
            "copy are written now: they expire later than in the source, once by up to that time; "
            "a full refresh of the copy restarts it again, and is refused without --restart-ttl"
        )

    if computed := computed_by(source.schema):
        remarks.append(f"computed by the server again, not copied: {', '.join(sorted(computed))}")
    if source.aliases:
        remarks.append(f"aliases stay on the source unless switched: {', '.join(source.aliases)}")
    remarks.append("grants on the source do not carry over to the copy")

    vector = source.vector_fields[field]
    nlist = int(vector.index_params.get("nlist", 0))
    advised = advised_cells(source.rows, vector.dim)
    if 0 < 2 * nlist <= advised:
        remarks.append(
            f"{vector.index_type} has nlist {nlist}, Milvus advises {advised} for these rows: "
            "corrected searches visit more cells, and smaller cells compensate for that "
            f"(--index-param nlist={advised})"
        )

    return remarks


def advised_cells(rows: int, dim: int) -> int:
    """Return nlist by the rule of Milvus' performance
    FAQ: 4·√n, with n the rows of a segment of 512 MB.
    """
    return round(4 * math.sqrt(min(rows, 512 * 2**20 / (4 * dim))))


def side_schema(source: CollectionInfo) -> CollectionSchema:
    """Return the schema of a side collection: the keys of the source, biases as a vector field, and
    the numbers of their generations.
    """
    key = key_field(source.schema)
    schema = MilvusClient.create_schema(
        description=f"biases of {source.name}", enable_dynamic_field=False
    )
    schema.add_field(
        key["name"],
        DataType(key["type"]),
        is_primary=True,
        **{**key.get("params", {}), "auto_id": False},
    )
    schema.add_field(SIDE_FIELD, DataType.FLOAT_VECTOR, dim=SIDE_WIDTH)
    schema.add_field(EPOCH_FIELD, DataType.INT64)
    return schema


def _digest(names: list[str]) -> str:
    """Return a digest of names, of which a record has no room for thousands; empty without any."""
    return hashlib.sha256(json.dumps(names).encode()).hexdigest() if names else ""


def facts(source: CollectionInfo) -> dict[str, Any]:
    """Return the facts that a copy is made from, sorted: servers describe fields in any order."""
    compared = (
        "name",
        "type",
        "params",
        "is_primary",
        "auto_id",
        "is_partition_key",
        "nullable",
        "default_value",
    )
    functions = [str(function["name"]) for function in source.schema.get("functions", [])]
    fields = [
        {name: str(field[name]) for name in compared if field.get(name)}
        for field in source.schema["fields"]
    ]

    return {
        "fields": sorted(fields, key=lambda field: field["name"]),
        "functions": sorted(functions),
        "dynamic": bool(source.schema.get("enable_dynamic_field")),
        "partitions": _digest(sorted(name for name in source.partitions if name)),
        "time_to_live": source.time_to_live,
        "indexes": {
            name: [field.metric, field.index_type, sorted(map(str, field.index_params.items()))]
            for name, field in sorted(source.vector_fields.items())
        },
    }


def copy_schema(source: CollectionInfo, state: CollectionState) -> CollectionSchema:
    """Return the source's schema with its vector field
    in the width of the state, and with hidden fields.
    """
    schema = CollectionSchema.construct_from_dict(source.schema)
    present = source.states.get(state.field)
    if present is None or present.codec.leaves_vectors:
        widen(schema, state)
    else:
        _set_width(schema, state)
    return schema


def _set_width(schema: CollectionSchema, state: CollectionState) -> None:
    for field in schema.fields:
        if field.name == state.field:
            field.params["dim"] = state.codec.form.width


def widen(schema: CollectionSchema, state: CollectionState) -> None:
    """Give a vector field the width of augmented vectors, and add the hidden fields, in place."""
    _set_width(schema, state)
    codec = state.codec
    schema.add_field(codec.bias_field, DataType.FLOAT)
    schema.add_field(codec.epoch_field, DataType.INT64)
    for name in codec.decoding_fields:
        schema.add_field(name, DataType.DOUBLE)


def copy_properties(
    source: CollectionInfo, state: CollectionState, samplings: Samplings
) -> dict[str, str]:
    """Return the properties of a copy.

    samplings: with collections of samples of the copy's own.
    """
    properties = source.properties_of_copy(source.schema.get("properties", {}), state)
    if samplings.fields:
        properties[SAMPLINGS_PROPERTY] = samplings.model_dump_json()
    return properties


def flat_index(field: str, metric: str) -> IndexParams:
    return MilvusClient.prepare_index_params(field, index_type="FLAT", metric_type=metric)


def copy_indexes(indexes: Iterable[dict[str, Any]], corrected: VectorField) -> IndexParams:
    """Return the source's indexes, with that of the
    corrected field from `corrected` and the metric IP.
    """
    params = MilvusClient.prepare_index_params()
    for index in indexes:
        is_corrected = index["field_name"] == corrected.name
        metric = "IP" if is_corrected else index.get("metric_type", "")
        params.add_index(
            index["field_name"],
            index_type=corrected.index_type if is_corrected else index["index_type"],
            index_name=index["index_name"],
            **({"metric_type": metric} if metric else {}),
            params=corrected.index_params if is_corrected else build_params(index),
        )

    return params
