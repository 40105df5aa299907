"""Writes as calls of qdrant-client's methods, and the points that they are about. No I/O."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from qdrant_client import models

from milvus_hubness import InvalidInput, UnsupportedOperation
from milvus_hubness.extending import Key
from qdrant_hubness.store.rows import UNNAMED

SELECTORS = {
    "delete": "points_selector",
    "clear_payload": "points_selector",
    "set_payload": "points",
    "overwrite_payload": "points",
    "delete_payload": "points",
    "delete_vectors": "points",
}
"""The argument that selects the points of a method, by ids or by a filter."""

_ARGUMENTS = {
    "delete_vectors": {"vectors": "vector"},
    "set_payload": {"payload": "payload", "key": "key"},
    "overwrite_payload": {"payload": "payload"},
    "delete_payload": {"keys": "keys"},
}
"""Methods with the arguments that they have beside the points, and the names of these in an operation
of batch_update_points.
"""

_BATCHED = ("upsert", "update_vectors", *_ARGUMENTS, "clear_payload", "delete")
"""The methods of which batch_update_points takes operations."""

_CONDITIONS = ("update_filter", "update_mode")
"""The arguments by which a write leaves some of its points out."""


@dataclass(frozen=True)
class Call:
    """A method of qdrant-client that writes to a collection, with its further arguments."""

    method: str
    options: dict[str, Any]

    def having(self, **changed: Any) -> Call:
        """Return the call with some arguments changed."""
        return replace(self, options={**self.options, **changed})

    @property
    def brings_vectors(self) -> bool:
        return self.method in ("upsert", "update_vectors")

    @property
    def is_conditional(self) -> bool:
        """Whether the call writes only those of its points that fulfil a condition."""
        return any(self.options.get(name) is not None for name in _CONDITIONS)

    @property
    def selector(self) -> Any:
        """The ids, or the filter, of a method that brings no vectors."""
        return self.options[SELECTORS[self.method]]

    @property
    def items(self) -> list[Any]:
        """The points or the ids of the call, which can
        be sent in parts; none for a filter and a Batch.
        """
        if self.brings_vectors:
            points = self.options["points"]
            return list(points) if isinstance(points, list | tuple) else []

        if filter_of(self.selector) is not None:
            return []
        return list(getattr(self.selector, "points", self.selector))

    def about(self, items: list[Any]) -> Call:
        """Return the call about some of its items."""
        if self.brings_vectors:
            return self.having(points=items)
        return self.having(**{SELECTORS[self.method]: models.PointIdsList(points=items)})


def key_of(id: Any) -> Key:
    """Return a point's id as Qdrant returns it. Raises InvalidInput."""
    if isinstance(id, int):
        return id

    try:
        return str(id if isinstance(id, uuid.UUID) else uuid.UUID(id))
    except (ValueError, AttributeError, TypeError):
        raise InvalidInput(f"{id!r} is not the id of a point: pass a number or a UUID") from None


def filter_of(selector: Any) -> models.Filter | None:
    """Return the filter of a selector; None if it names ids."""
    if isinstance(selector, models.FilterSelector):
        return selector.filter
    return selector if isinstance(selector, models.Filter) else None


def ids_of(selector: Any) -> list[Key]:
    """Return the ids that a selector names."""
    return [key_of(id) for id in getattr(selector, "points", selector)]


def structs(points: Any) -> list[models.PointStruct]:
    """Return the points of an argument of `upsert`, a list or a Batch."""
    if not isinstance(points, models.Batch):
        return [_struct(point) for point in points]

    vectors = points.vectors if isinstance(points.vectors, dict) else {UNNAMED: points.vectors}
    payloads: Sequence[Any] = points.payloads or [None] * len(points.ids)
    if {len(points.ids)} != {len(payloads), *map(len, vectors.values())}:
        raise InvalidInput(
            "the batch has unequal numbers of ids, vectors and payloads: pass one of each per point"
        )

    # A batch is by columns, points are rows.
    made = []
    for i, id in enumerate(points.ids):
        vector = merged({name: rows[i] for name, rows in vectors.items()})
        made.append(models.PointStruct.model_construct(id=id, vector=vector, payload=payloads[i]))
    return made


def _struct(point: Any) -> models.PointStruct:
    """Return a point as a PointStruct, which it may be already."""
    if isinstance(point, models.PointStruct):
        return point

    # Uploads take records as well, as `scroll` returns them.
    if hasattr(point, "vector"):
        return models.PointStruct(id=point.id, vector=point.vector or {}, payload=point.payload)
    return models.PointStruct.model_validate(point)


def by_name(vector: Any) -> dict[str, Any]:
    """Return a point's vectors by name."""
    if vector is None:
        return {}
    return dict(vector) if isinstance(vector, dict) else {UNNAMED: vector}


def merged(vectors: dict[str, Any]) -> Any:
    """Return vectors by name as Qdrant accepts them."""
    return vectors[UNNAMED] if vectors.keys() == {UNNAMED} else vectors


def calls_of(operations: Iterable[Any], options: dict[str, Any]) -> list[Call]:
    """Return the operations of batch_update_points as calls."""
    calls = map(_call_of, operations)
    return [Call(method, {**arguments, **options}) for method, arguments in calls]


def _call_of(operation: Any) -> tuple[str, dict[str, Any]]:
    """Return the method that does as an operation of batch_update_points, and its arguments."""
    # An operation has one field, with the name of its method.
    method = next((name for name in _BATCHED if hasattr(operation, name)), "")
    if not method:
        raise UnsupportedOperation(
            f"corrected collections do not support {type(operation).__name__}: use the methods "
            f"{', '.join(_BATCHED[:-1])} and {_BATCHED[-1]}"
        )

    request = getattr(operation, method)
    if method in ("clear_payload", "delete"):
        return method, {SELECTORS[method]: request}
    if method == "upsert":
        points = request.batch if isinstance(request, models.PointsBatch) else request.points
        return method, {"points": points, **_further(request, *_CONDITIONS)}
    if method == "update_vectors":
        return method, {"points": request.points, **_further(request, "update_filter")}

    arguments = {argument: getattr(request, name) for argument, name in _ARGUMENTS[method].items()}
    selector = request.filter if request.points is None else list(request.points)
    return method, {**arguments, "points": selector, **_further(request)}


def _further(request: Any, *names: str) -> dict[str, Any]:
    """Return those of the named arguments that are set, and the shard key."""
    options = {name: getattr(request, name, None) for name in names}
    options["shard_key_selector"] = getattr(request, "shard_key", None)
    return {name: value for name, value in options.items() if value is not None}


def parts(items: Sequence[Any], size: int) -> Iterable[list[Any]]:
    """Yield the items in lists of at most `size`."""
    return (list(items[start : start + size]) for start in range(0, len(items), size))


def points_of(
    vectors: Any, payloads: Iterable[dict[str, Any]] | None, ids: Iterable[Any] | None
) -> Iterator[models.PointStruct]:
    """Yield the points of upload_collection.

    vectors: rows, or rows by vector name; without ids they get new UUIDs. Raises InvalidInput, as
    QdrantClient raises ValueError, if there are fewer payloads or ids.
    """
    if isinstance(vectors, dict):
        rows: Iterable[Any] = (
            dict(zip(vectors, row, strict=True)) for row in zip(*vectors.values(), strict=True)
        )
    else:
        rows = vectors

    own_ids = (str(uuid.uuid4()) for _ in itertools.count())
    remaining_ids = iter(own_ids if ids is None else ids)
    remaining_payloads = iter(itertools.repeat({}) if payloads is None else payloads)
    for vector in rows:
        payload = _next_of(remaining_payloads, "payload")
        id = _next_of(remaining_ids, "ids")
        yield models.PointStruct(id=id, vector=_listed(vector), payload=payload)


def _next_of(values: Iterator[Any], name: str) -> Any:
    """Return the value for the next vector. Raises InvalidInput if there is none."""
    for value in values:
        return value
    raise InvalidInput(
        f"{name} iterable is shorter than vectors iterable: pass one for each vector"
    )


def _listed(vector: Any) -> Any:
    if isinstance(vector, dict):
        return {name: _listed(value) for name, value in vector.items()}
    return vector.tolist() if isinstance(vector, np.ndarray) else vector
