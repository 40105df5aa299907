"""A collection that stores vectors and carries out requests as a server does."""

from __future__ import annotations

import random
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from typing import Any

import numpy as np
from qdrant_client import models
from qdrant_client.local.local_collection import LocalCollection

from tests.qdrant.strict.answers import Refused, as_decimals

PART = 32
"""Points of a request that a server changes together."""
UNIT_TOLERANCE = np.float32(1e-6)
"""Distance of a squared length from 1 up to which a server leaves a Cosine vector alone."""
TINY = np.finfo(np.float32).eps


def stored_form(vector: Any, params: models.VectorParams) -> np.ndarray:
    """Return what a server keeps of a dense vector (d,), or of a multivector (n, d), as float32."""
    numbers = np.array(vector, np.float32)
    if params.datatype == models.Datatype.UINT8:
        # Cosine vectors of this type are not normalised: the search divides by both lengths.
        return np.clip(np.trunc(numbers), 0, 255)
    if params.distance == models.Distance.COSINE:
        squared = np.sum(numbers * numbers, axis=-1, dtype=np.float32, keepdims=True)
        is_kept = (squared < TINY) | (np.abs(squared - np.float32(1)) <= UNIT_TOLERANCE)
        numbers = numbers / np.where(is_kept, np.float32(1), np.sqrt(squared))
    if params.datatype == models.Datatype.FLOAT16:
        numbers = numbers.astype(np.float16).astype(np.float32)
    return numbers


class StrictCollection(LocalCollection):
    """settings: with which it was created; a server shows them. shards: their number. part: see StrictServer."""

    def __init__(
        self, settings: models.CreateCollection, shards: int, seed: str, part: int | None
    ) -> None:
        kept = models.CreateCollection(
            vectors=settings.vectors,
            sparse_vectors=settings.sparse_vectors,
            metadata=settings.metadata,
        )
        self.settings = settings
        self.shards = settings.shard_number or shards
        self._part = part
        self.indexes: dict[str, Any] = {}
        self.last_write = 0.0
        self._stored: dict[tuple[str, int], Any] = {}
        self._random = random.Random(seed)
        super().__init__(kept)

    # -- what is stored ---------------------------------------------------------------------

    def _add_point(self, point: models.PointStruct) -> None:
        super()._add_point(point)
        self._keep(self.ids[point.id], _by_name(point.vector))

    def _update_point(self, point: models.PointStruct) -> None:
        super()._update_point(point)
        self._keep(self.ids[point.id], _by_name(point.vector))

    def _validate_named_vectors(self, vectors: dict[str, Any]) -> list[tuple[str, Any]]:
        super()._validate_named_vectors(vectors)
        return [
            (name, vector if isinstance(vector, models.SparseVector) else np.float32(vector))
            for name, vector in vectors.items()
        ]

    def _apply_named_vectors(self, idx: int, validated: list[tuple[str, Any]]) -> None:
        super()._apply_named_vectors(idx, validated)
        self._keep(idx, dict(validated))

    def _keep(self, idx: int, vectors: dict[str, Any]) -> None:
        """Keep what a server would. The local mode moves its own vectors in searches."""
        for name, vector in vectors.items():
            if name in self.sparse_vectors:
                continue
            numbers = stored_form(vector, self.get_vector_params(name))
            self._stored[name, idx] = as_decimals(numbers).tolist()
            (self.vectors if name in self.vectors else self.multivectors)[name][idx] = numbers

    def _get_vectors(self, idx: int, with_vectors: Any = False) -> Any:
        vectors = super()._get_vectors(idx, with_vectors)
        if isinstance(vectors, dict):
            return {name: self._stored.get((name, idx), vector) for name, vector in vectors.items()}
        return vectors if vectors is None else self._stored["", idx]

    def upsert(
        self,
        points: Any,
        update_filter: models.Filter | None = None,
        update_mode: models.UpdateMode | None = None,
    ) -> None:
        structs = self._materialize_points(points)
        # Points with equal scores come in another order in each collection.
        if len({str(point.id) for point in structs}) == len(structs):
            self._random.shuffle(structs)
        super().upsert(structs, update_filter, update_mode)

    # -- requests about points by id -------------------------------------------------------

    def update_vectors(
        self, points: Sequence[models.PointVectors], update_filter: models.Filter | None = None
    ) -> None:
        by_id = {point.id: point for point in points}
        for point in points:
            self._validate_named_vectors(_by_name(point.vector))

        def apply(ids: list[Any]) -> None:
            LocalCollection.update_vectors(self, [by_id[key] for key in ids], update_filter)

        # A server takes them from a hash table: another order in each run.
        ids = list(by_id)
        self._random.shuffle(ids)
        self._carry_out(ids, apply)

    def delete_vectors(self, vectors: Sequence[str], selector: Any) -> None:
        apply = super().delete_vectors
        self._validate_vector_names(vectors)
        self._carry_out(self._selector_to_ids(selector), lambda ids: apply(vectors, ids))

    def set_payload(self, payload: Any, selector: Any, key: str | None = None) -> None:
        apply = super().set_payload
        self._carry_out(self._selector_to_ids(selector), lambda ids: apply(payload, ids, key))

    def overwrite_payload(self, payload: Any, selector: Any) -> None:
        apply = super().overwrite_payload
        self._carry_out(self._selector_to_ids(selector), lambda ids: apply(payload, ids))

    def delete_payload(self, keys: Sequence[str], selector: Any) -> None:
        apply = super().delete_payload
        self._carry_out(self._selector_to_ids(selector), lambda ids: apply(keys, ids))

    def clear_payload(self, selector: Any) -> None:
        self._carry_out(self._selector_to_ids(selector), super().clear_payload)

    def _carry_out(self, ids: Sequence[Any], apply: Callable[[list[Any]], None]) -> None:
        """Change points part by part. A shard stops at the first part with a missing point."""
        missing = []
        if self._part is None:
            apply(list(ids))
            return
        for own in self._by_shard(ids):
            for start in range(0, len(own), self._part):
                part = own[start : start + self._part]
                lacking = [key for key in part if self._existing_idx(key) is None]
                if lacking:
                    missing.append(lacking[0])
                    break
                apply(part)
        if not missing:
            return
        text = f"No point with id {missing[0]} found"
        if len(missing) < self.shards:
            failed = f"{len(missing)} out of {self.shards} shards failed to apply operation."
            text = text if self.shards == 1 else f"{failed} First error captured: {text}"
        raise Refused(404, f"Not found: {text}")

    def _by_shard(self, ids: Sequence[Any]) -> Iterator[list[Any]]:
        for shard in range(self.shards):
            yield [key for key in ids if zlib.crc32(str(key).encode()) % self.shards == shard]

    # -- settings ----------------------------------------------------------------------------

    def create_payload_index(self, field_name: str, field_schema: Any) -> None:
        super().create_payload_index(field_name, field_schema)
        self.indexes[field_name] = field_schema

    def delete_payload_index(self, field_name: str) -> None:
        super().delete_payload_index(field_name)
        self.indexes.pop(field_name, None)

    def change_settings(self, change: models.UpdateCollection) -> None:
        """Change what is given; the rest stays."""
        merged = {}
        for name in ("hnsw_config", "optimizers_config", "strict_mode_config"):
            changed = getattr(change, name)
            if changed is not None:
                before = getattr(self.settings, name)
                update = changed.model_dump(exclude_none=True)
                merged[name] = before.model_copy(update=update) if before else changed
        if change.quantization_config is not None:
            is_off = change.quantization_config == models.Disabled.DISABLED
            merged["quantization_config"] = None if is_off else change.quantization_config
        if change.params is not None:
            merged |= change.params.model_dump(exclude_none=True)
        self.settings = self.settings.model_copy(update=merged)

    def index_type(self, key: str) -> str | None:
        """Return the type of the payload index of a key; None without one."""
        schema = self.indexes.get(key)
        if schema is None:
            return None
        return str(models.PayloadSchemaType(getattr(schema, "type", schema)).value)

    def described(self, yellow_seconds: float) -> models.CollectionInfo:
        """As get_collection. yellow_seconds: for how long writes keep the optimiser busy."""
        info = self.info()
        given = self.settings
        params = {
            "shard_number": self.shards,
            "sharding_method": given.sharding_method,
            "replication_factor": given.replication_factor or 1,
            "write_consistency_factor": given.write_consistency_factor or 1,
            "on_disk_payload": given.on_disk_payload if given.on_disk_payload is not None else True,
        }
        config = {
            "params": info.config.params.model_copy(update=params),
            "quantization_config": given.quantization_config,
            "strict_mode_config": _strict_output(given.strict_mode_config),
        }
        for name, part in (
            ("hnsw_config", given.hnsw_config),
            ("wal_config", given.wal_config),
            ("optimizer_config", given.optimizers_config),
        ):
            changed = part.model_dump(exclude_none=True) if part else {}
            config[name] = getattr(info.config, name).model_copy(update=changed)
        is_busy = time.monotonic() < self.last_write + yellow_seconds
        status = models.CollectionStatus.YELLOW if is_busy else models.CollectionStatus.GREEN
        points = info.points_count or 0
        return info.model_copy(
            update={
                "config": info.config.model_copy(update=config),
                "status": status,
                "indexed_vectors_count": 0 if is_busy else points,
                "payload_schema": {
                    name: self._described_index(name, schema)
                    for name, schema in self.indexes.items()
                },
            }
        )

    def _described_index(self, name: str, schema: Any) -> models.PayloadIndexInfo:
        lacking = models.IsEmptyCondition(is_empty=models.PayloadField(key=name))
        return models.PayloadIndexInfo(
            data_type=self.index_type(name),
            params=deepcopy(schema) if hasattr(schema, "type") else None,
            points=self.count(models.Filter(must_not=[lacking])).count,
        )


def _strict_output(config: models.StrictModeConfig | None) -> Any:
    return models.StrictModeConfigOutput(**config.model_dump()) if config else None


def _by_name(vector: Any) -> dict[str, Any]:
    return dict(vector) if isinstance(vector, dict) else {"": vector}
