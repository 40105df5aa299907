"""Schemas of Qdrant collections: read, checked, and built for the corrected copy. No I/O."""

from __future__ import annotations

from typing import Any

from qdrant_client import models

from milvus_hubness.extending import (
    ALIGNMENT,
    CollectionInfo,
    CollectionState,
    ColumnNeeds,
    Dtype,
    VectorField,
)
from qdrant_hubness.store.properties import PREFIX, of_metadata
from qdrant_hubness.store.rows import UNNAMED, Normalisation, vector_words

METRICS = {
    models.Distance.COSINE: "COSINE",
    models.Distance.DOT: "IP",
    models.Distance.EUCLID: "L2",
}
"""The distances that can be corrected, and the metrics of the layout."""

DTYPES: dict[Any, Dtype] = {
    None: "float32",
    models.Datatype.FLOAT32: "float32",
    models.Datatype.FLOAT16: "float16",
}
"""The types of numbers that can be corrected; None is the server's default."""

COLUMNS_OF_MULTI_VECTORS = 2
"""Columns of a bias behind several vectors that are quantised."""

Described = models.CollectionInfo
Params = models.VectorParams


def dense(described: Described) -> dict[str, Params]:
    """Return the dense vectors of a collection by name; a vector without a name is UNNAMED."""
    vectors = described.config.params.vectors
    if isinstance(vectors, models.VectorParams):
        return {UNNAMED: vectors}
    return dict(vectors or {})


def is_unnamed(described: Described) -> bool:
    return isinstance(described.config.params.vectors, models.VectorParams)


def normalised(described: Described, units: int) -> dict[str, Normalisation]:
    """Return how Qdrant normalises vectors, by their names: those of Cosine.

    It stores uint8 as they come.

    units: units in the last place by which it may change the numbers of such a vector.
    """
    by_name = {}
    for name, params in dense(described).items():
        if params.distance == models.Distance.COSINE and params.datatype in DTYPES:
            by_name[name] = Normalisation(DTYPES[params.datatype], units)
    return by_name


def vector_fields(described: Described) -> dict[str, VectorField]:
    """Return the vectors of float type by name, single ones and multi-vectors, whatever their
    distance.
    """
    fields = {}
    for name, params in dense(described).items():
        if params.datatype not in DTYPES:
            continue

        # A vector's own options come before those of the collection.
        hnsw = {**_set(described.config.hnsw_config), **_set(params.hnsw_config)}
        graph = {"M": hnsw.get("m"), "efConstruction": hnsw.get("ef_construct")}
        fields[name] = VectorField(
            name,
            params.size,
            METRICS.get(params.distance, params.distance.value),
            "HNSW",
            {option: value for option, value in graph.items() if value},
            DTYPES[params.datatype],
            multi_vectors=params.multivector_config is not None,
        )

    return fields


def quantization(source: CollectionInfo, field: str) -> Any:
    """Return the quantization of the vector, its own or the collection's; None without any."""
    described: Described = source.schema["described"]
    of_vector = dense(described)[field].quantization_config
    return of_vector if of_vector is not None else described.config.quantization_config


def bias_spread(source: CollectionInfo, field: str) -> int:
    """Return in how many columns the vector's quantiser needs a bias.

    Scalar quantisation has one range for all columns, and turbo rotates them. Product quantisation
    and binary quantisation of two bits gain a little or nothing, and their owner may choose another
    one tomorrow. Binary quantisation of one bit, which keeps signs, ranks worse the more columns
    have the sign of a bias. Behind several vectors a point, two columns are enough, and more find
    less.
    """
    config = quantization(source, field)
    if config is None or _keeps_signs(config):
        return 1
    if source.vector_fields[field].multi_vectors:
        return COLUMNS_OF_MULTI_VECTORS
    return source.bias_spread(field)


def takes_graph_hint(source: CollectionInfo, field: str) -> bool:
    """Whether the vector is a single one that is not quantised: a scalar quantiser has one range for
    all columns.
    """
    is_single = not source.vector_fields[field].multi_vectors
    return is_single and quantization(source, field) is None


def takes_locality_hints(source: CollectionInfo, field: str) -> bool:
    """Whether the vector is neither quantised nor of
    half precision, in which a hint takes three columns.
    """
    return takes_graph_hint(source, field) and source.vector_fields[field].dtype == "float32"


def column_needs(source: CollectionInfo, field: str) -> ColumnNeeds:
    """Return what the vector's quantiser asks of augmented vectors. Quantisers allow any width."""
    takes_hints = takes_locality_hints(source, field)
    return ColumnNeeds(
        multiple_of=ALIGNMENT,
        spread=bias_spread(source, field),
        graph_hint=takes_graph_hint(source, field),
        length_pull=takes_hints,
        locality_hints=takes_hints,
        # A vector changes without its payload, which would have the text.
        kind_offsets=False,
    )


def obstacles(source: CollectionInfo, field: str) -> list[str]:
    """Return the reasons why the collection cannot be copied."""
    described: Described = source.schema["described"]
    reasons = []
    if field not in source.vector_fields:
        params = dense(described).get(field)
        why = "missing" if params is None else str(params.datatype)
        reasons.append(
            f"{vector_words(field)} is {why}: only dense vectors of 32 or 16 bits are corrected "
            f"(here: {', '.join(map(vector_words, source.vector_fields)) or 'none'})"
        )
    elif source.vector_fields[field].metric not in METRICS.values():
        reasons.append(
            f"{vector_words(field)} has the distance {source.vector_fields[field].metric}: only Cosine, "
            "Dot and Euclid are corrected"
        )
    elif source.vector_fields[field].multi_vectors and source.vector_fields[field].metric == "L2":
        reasons.append(
            f"{vector_words(field)} is a multivector with the distance Euclid: its scores are sums of "
            "distances, which a bias in the vectors cannot correct: use Cosine or Dot"
        )

    if described.config.params.sharding_method == models.ShardingMethod.CUSTOM:
        reasons.append("custom shard keys cannot be copied yet")
    return reasons


def remarks(source: CollectionInfo, field: str) -> list[str]:
    """Return remarks for the user about changes that a copy brings."""
    texts = []
    if source.aliases:
        texts.append(f"aliases stay on the source unless switched: {', '.join(source.aliases)}")
    texts.append("the copy has one payload index more, by which jobs find points without a bias")
    return texts + quantization_remarks(quantization(source, field), bias_spread(source, field))


def quantization_remarks(config: Any, spread: int) -> list[str]:
    """Return a remark on what a quantiser does to
    biases in `spread` columns, and what to do about it.
    """
    if config is None:
        return []
    if _keeps_signs(config):
        return [
            "1-bit binary quantization keeps only the sign of each number, and little of a bias: "
            "choose two bits or scalar quantization, or search with rescore and an oversampling of "
            "10 or more"
        ]

    stored = f"each bias is stored in {spread} columns, as the vectors are quantized"
    default = "rescores" if _rescores(config) else "does not rescore"
    return [
        f"{stored}; Qdrant {default} by default: for the exact ranking search with rescore and an "
        "oversampling of 2 or more"
    ]


def _keeps_signs(config: Any) -> bool:
    """Whether the quantiser keeps one bit of each number:
    binary quantization that names no other encoding.
    """
    binary = getattr(config, "binary", None)
    return binary is not None and binary.encoding in (
        None,
        models.BinaryQuantizationEncoding.ONE_BIT,
    )


def _rescores(config: Any) -> bool:
    """Whether searches rescore by default: with binary
    quantization, and turbo of fewer than 4 bits.
    """
    turbo = getattr(config, "turbo", None)
    if turbo is not None and turbo.bits is not None:
        return turbo.bits.value in {"bits1", "bits1_5", "bits2"}
    return hasattr(config, "binary")


def facts(source: CollectionInfo) -> dict[str, Any]:
    """Return the facts that a copy is made from, as plain data."""
    described: Described = source.schema["described"]
    params = described.config.params
    return {
        "vectors": {name: _set(item) for name, item in sorted(dense(described).items())},
        "sparse": {
            name: _set(item) for name, item in sorted((params.sparse_vectors or {}).items())
        },
        "indexes": {
            name: str(item.data_type.value)
            for name, item in sorted((described.payload_schema or {}).items())
        },
    }


def copy_config(
    source: CollectionInfo, state: CollectionState, metadata: dict[str, Any] | None
) -> dict[str, Any]:
    """Return the arguments of create_collection for a
    copy: those of the source, with the augmented vector.
    """
    described: Described = source.schema["described"]
    config = described.config
    params = config.params
    vectors: Any = dense(described)
    augmented = {"size": state.codec.form.width, "distance": models.Distance.DOT}
    vectors[state.field] = vectors[state.field].model_copy(update=augmented)

    wal_config = None
    if config.wal_config:
        wal_config = models.WalConfigDiff(**_set(config.wal_config))
    options = {
        "vectors_config": vectors[UNNAMED] if is_unnamed(described) else vectors,
        "sparse_vectors_config": params.sparse_vectors,
        "shard_number": params.shard_number,
        "sharding_method": params.sharding_method,
        "replication_factor": params.replication_factor,
        "write_consistency_factor": params.write_consistency_factor,
        "on_disk_payload": params.on_disk_payload,
        "hnsw_config": models.HnswConfigDiff(**_set(config.hnsw_config)),
        "optimizers_config": models.OptimizersConfigDiff(**_set(config.optimizer_config)),
        "wal_config": wal_config,
        "quantization_config": config.quantization_config,
        "strict_mode_config": _strict(config.strict_mode_config),
        "metadata": metadata,
    }
    return {name: value for name, value in options.items() if value is not None}


def copied_metadata(source: CollectionInfo, state: CollectionState) -> dict[str, Any]:
    """Return the source's metadata with the state of the copy."""
    described: Described = source.schema["described"]
    metadata = described.config.metadata or {}
    of_user = {key: value for key, value in metadata.items() if not key.startswith(PREFIX)}
    return source.properties_of_copy({**of_user, **of_metadata(described)}, state)


def _strict(config: Any) -> Any:
    return models.StrictModeConfig(**_set(config)) if config is not None else None


def _set(model: Any) -> dict[str, Any]:
    """Return the fields of a model that are set, as plain data."""
    return model.model_dump(mode="json", exclude_none=True) if model is not None else {}


def numbered(key: str, number: int) -> models.FieldCondition:
    """Return the condition that an entry is of this generation; those of new points are negative."""
    return models.FieldCondition(key=key, match=models.MatchAny(any=[number, -number]))
