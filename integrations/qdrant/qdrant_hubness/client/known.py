"""What a client knows of a collection, and how its points look to the user. No I/O."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from qdrant_client import models

from milvus_hubness.codec.arrays import Floats
from milvus_hubness.state import CollectionState
from milvus_hubness.stores.records import DualWrite, WriteIntentLog
from qdrant_hubness.store.properties import OURS
from qdrant_hubness.store.rows import UNNAMED, named

DISTANCES = {"COSINE": models.Distance.COSINE, "IP": models.Distance.DOT, "L2": models.Distance.EUCLID}


@dataclass(frozen=True)
class CachedState:
    """name: the real one, where there is a copy. sizes: of the single dense vectors as they are stored, by
    name. states: of those that are corrected. dual_write: where its points are carried to. intent_log: where
    writes are noted first."""

    name: str
    sizes: Mapping[str, int] = field(default_factory=dict)
    states: Mapping[str, CollectionState] = field(default_factory=dict)
    dual_write: DualWrite | None = None
    intent_log: WriteIntentLog | None = None

    def state_of(self, using: str | None) -> CollectionState | None:
        """Of the vector that a query is about."""
        return self.states.get(using or UNNAMED)

    @cached_property
    def hidden(self) -> frozenset[str]:
        """Keys of payloads that are ours."""
        found: set[str] = set()
        for state in self.states.values():
            found.update(state.codec.hidden_fields)
        return frozenset(found)

    @cached_property
    def in_vectors(self) -> Mapping[str, CollectionState]:
        """The states whose biases lie in the vectors."""
        return {name: state for name, state in self.states.items() if not state.codec.leaves_vectors}

    def fits(self, vector: Any) -> bool:
        """Whether a stored vector, or several by name, are as wide as this knows them."""
        found = named(vector)
        return all(len(found[name]) == size for name, size in self.sizes.items() if found.get(name))

    def shown(self, point: Any, asked: Collection[str] = ()) -> Any:
        """A point as the user knows it. asked: hidden keys that the request names."""
        changed: dict[str, Any] = {}
        if point.payload and (ours := self.hidden - set(asked)):
            changed["payload"] = {key: value for key, value in point.payload.items() if key not in ours}
        if point.vector is not None and self.in_vectors:
            changed["vector"] = self.stripped(point.vector)
        return point.model_copy(update=changed) if changed else point

    def stripped(self, vector: Any) -> Any:
        """A stored vector, or several by name, as the user knows them."""
        if not isinstance(vector, dict):
            state = self.in_vectors.get(UNNAMED)
            return users_vector(state, vector).tolist() if state else vector
        return {
            name: users_vector(self.in_vectors[name], each).tolist() if name in self.in_vectors else each
            for name, each in vector.items()
        }

    def described(self, result: Any) -> Any:
        """What get_collection says, as if the vectors had never been changed."""
        if not self.states:
            return result
        params = result.config.params
        vectors = params.vectors
        if isinstance(vectors, models.VectorParams):
            vectors = self._params(UNNAMED, vectors)
        elif vectors:
            vectors = {name: self._params(name, each) for name, each in vectors.items()}
        metadata = {k: v for k, v in (result.config.metadata or {}).items() if not k.startswith(OURS)}
        params = params.model_copy(update={"vectors": vectors})
        config = result.config.model_copy(update={"params": params, "metadata": metadata or None})
        return result.model_copy(update={"config": config})

    def _params(self, name: str, params: Any) -> Any:
        state = self.in_vectors.get(name)
        if state is None:
            return params
        return params.model_copy(update={"size": state.dim, "distance": DISTANCES[state.metric]})


def users_vector(state: CollectionState, vector: Any) -> Floats:
    """(d,) what a stored vector (width,) was made of. Raises DimensionMismatch."""
    codec = state.codec
    stored = codec.form.joined(np.asarray(vector, np.float32)[None])
    return codec.decode_rows({codec.field: stored, **{name: [1.0] for name in codec.decoding_fields}})[0]
