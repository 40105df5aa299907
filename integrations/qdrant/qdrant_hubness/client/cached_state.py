"""The cached state of a collection, and its points decoded. No I/O."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from qdrant_client import models

from milvus_hubness import MultiVectors
from milvus_hubness.extending import CachedCollection, CollectionState, Floats
from qdrant_hubness.store.limits import NO_LIMITS, Limits
from qdrant_hubness.store.properties import PREFIX
from qdrant_hubness.store.rows import UNNAMED, named, vector_words, width_of

DISTANCES = {
    "COSINE": models.Distance.COSINE,
    "IP": models.Distance.DOT,
    "L2": models.Distance.EUCLID,
}
"""The user's distances. The corrected copy has Dot, whichever it is."""


@dataclass(frozen=True)
class CachedState(CachedCollection):
    """The cached state of a collection of Qdrant."""

    sizes: Mapping[str, int] = field(default_factory=dict)
    """The stored dimensions of dense vectors, by name."""

    payload_keys: tuple[str, ...] = ()
    """Keys that jobs have written, or are about to write, into payloads, see PAYLOAD_KEYS."""

    limits: Limits = NO_LIMITS
    """What strict mode of the collection allows."""

    @property
    def name(self) -> str:
        """The name of the collection, see `collection_id`."""
        return self.collection_id.name

    @property
    def former(self) -> str:
        """The collection that gets every write first, until all clients have heard that names have
        moved from it to this one; empty if there is none.
        """
        dual_write = self.dual_write
        return dual_write.collection if dual_write is not None and dual_write.former else ""

    @cached_property
    def generations(self) -> tuple[Any, ...]:
        """The generations of biases in payloads that points get, by vector."""
        return tuple(
            (name, state.generations, state.profile.fitted_at)
            for name, state in self.states.items()
            if state.codec.leaves_vectors
        )

    def state_of(self, using: str | None) -> CollectionState | None:
        """Return the state of the vector that a query searches; None if it is not corrected."""
        return self.states.get(using or UNNAMED)

    @cached_property
    def hidden(self) -> frozenset[str]:
        """The keys of payloads that users do not see."""
        names = set(self.payload_keys)
        for state in self.states.values():
            names.update(state.codec.hidden_fields)
        return frozenset(names)

    @cached_property
    def in_vectors(self) -> Mapping[str, CollectionState]:
        """The states whose biases are in the vectors."""
        return {
            name: state for name, state in self.states.items() if not state.codec.leaves_vectors
        }

    def fits(self, vector: Any) -> bool:
        """Whether a stored vector, or several by name, have the widths of this state."""
        vectors = named(vector)
        return all(
            width_of(vectors[name]) == size
            for name, size in self.sizes.items()
            if vectors.get(name)
        )

    def shown(self, point: Any, requested: Collection[str] = ()) -> Any:
        """Return a point as the user sees it. requested: hidden keys that the request names."""
        changed: dict[str, Any] = {}
        # Most points have no hidden key, and then there is nothing to copy.
        if point.payload and not self.hidden.isdisjoint(point.payload):
            hidden = self.hidden - set(requested)
            if hidden:
                changed["payload"] = {
                    key: value for key, value in point.payload.items() if key not in hidden
                }

        if point.vector is not None and self.in_vectors:
            changed["vector"] = self.decoded(point.vector)
        return point.model_copy(update=changed) if changed else point

    def decoded(self, vector: Any) -> Any:
        """Return a stored vector, or several by name, as the user sees them."""
        if not isinstance(vector, dict):
            state = self.in_vectors.get(UNNAMED)
            return _decoded_vector(state, vector).tolist() if state else vector

        decoded = dict(vector)
        for name, state in self.in_vectors.items():
            if name in vector:
                decoded[name] = _decoded_vector(state, vector[name]).tolist()
        return decoded

    def described(self, result: Any) -> Any:
        """Return the result of get_collection as it was before the correction."""
        params = result.config.params
        vectors = params.vectors
        if isinstance(vectors, models.VectorParams):
            vectors = self._params(UNNAMED, vectors)
        elif vectors:
            vectors = {name: self._params(name, stored) for name, stored in vectors.items()}
        params = params.model_copy(update={"vectors": vectors})
        config = result.config.model_copy(update={"params": params})
        changed: dict[str, Any] = {"config": config}

        stored = result.config.metadata or {}
        metadata = {key: value for key, value in stored.items() if not key.startswith(PREFIX)}
        if len(metadata) < len(stored):
            changed["config"] = config.model_copy(update={"metadata": metadata or None})

        indexes = result.payload_schema or {}
        if not self.hidden.isdisjoint(indexes):
            changed["payload_schema"] = {
                key: index for key, index in indexes.items() if key not in self.hidden
            }
        return result.model_copy(update=changed)

    def _params(self, name: str, params: Any) -> Any:
        state = self.in_vectors.get(name)
        if state is None:
            return params
        return params.model_copy(update={"size": state.dim, "distance": DISTANCES[state.metric]})


def _decoded_vector(state: CollectionState, vector: Any) -> Floats:
    """Return the user's vector (d,), or several (t, d), of stored ones. Raises DimensionMismatch."""
    codec = state.codec
    lengths: dict[str, Any] = {}
    if state.layout.multi_vectors:
        rows: Any = MultiVectors.stored([vector], codec.form.width, what=vector_words(state.field))
    else:
        rows = np.asarray(vector, np.float32)[None]
        # Qdrant normalises Cosine vectors.
        lengths = {name: [1.0] for name in codec.decoding_fields}
    decoded: Floats = codec.decode_rows({codec.field: codec.form.joined(rows), **lengths})[0]
    return decoded
