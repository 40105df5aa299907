"""QdrantStore: the Store protocol for Qdrant, local or a server."""

from __future__ import annotations

import json
import re
import ssl
from collections.abc import Callable, Sequence
from itertools import filterfalse
from typing import Any, TypeVar

from qdrant_client import models

from milvus_hubness import (
    CannotMigrate,
    CollectionExists,
    CollectionNotFound,
    InvalidParameter,
    MultiVectors,
)
from milvus_hubness.extending import (
    ALIGNMENT,
    NUMBER_KEYS,
    SLOT_KEYS,
    CollectionInfo,
    CollectionState,
    ColumnNeeds,
    Floats,
    FrozenModel,
    Key,
    VectorField,
    did_you_mean,
    is_fence,
    taken_keys,
    wait_until,
)
from qdrant_hubness.store import schema, strict_mode
from qdrant_hubness.store.banks import QdrantBanks
from qdrant_hubness.store.limits import Limits
from qdrant_hubness.store.optimiser import Optimiser
from qdrant_hubness.store.points import (
    PARTITIONS,
    REQUEST_BYTES,
    SURE,
    Scroll,
    create_alias,
    drop_alias,
)
from qdrant_hubness.store.properties import PAYLOAD_KEYS, payload_keys_in
from qdrant_hubness.store.requests import connect, has_formulas
from qdrant_hubness.store.rows import Uncopied, queries_of
from qdrant_hubness.store.sizes import BYTES_PER_NUMBER, json_bytes

T = TypeVar("T")

CHUNK_BYTES = 40_000_000
"""Bytes of a chunk of points, as JSON."""

FEWEST_CHUNK_ROWS = 16
MOST_CHUNK_ROWS = 2_000

SIZED_POINTS = 8
"""Points of each kind of id from which the size of a collection's points is estimated."""

QUERIES_PER_REQUEST = 200

LONGEST_NAME = 255
NOT_IN_NAMES = '< > : " / \\ | ? *'
"""Characters that no name of a collection has; the server refuses them."""
_NO_NAME = re.compile(r"""[<>:"/\\|?*\x00-\x1f]""")

LOCAL = "file://"
"""How the address of a folder of the local mode begins."""

BIAS_METRICS = {"COSINE", "IP"}
"""Metrics from whose score a formula can subtract a bias."""


class QdrantStore(QdrantBanks):
    """The Store of a QdrantClient, see `connect`. The protocol documents the methods."""

    @classmethod
    def open(cls, address: str, token: str, tls: ssl.SSLContext | None = None) -> QdrantStore:
        """Return the store of an address, as commands and jobs take it after `qdrant+`.

        address: of a server, or file://FOLDER of the local mode. token: the API key. tls: as in
        `connect`. Raises as `connect` does.
        """
        return cls(connect(address.removeprefix(LOCAL), token or None, tls=tls))

    def close(self) -> None:
        self.client.close()

    # -- descriptions ------------------------------------------------------------------------------

    def info(
        self, collection: str, *, counted: bool = True, checked: bool = True
    ) -> CollectionInfo:
        aliases = self._aliases(collection)
        name = aliases.get(collection, collection)
        try:
            described = self._described(name)
        except CollectionNotFound as error:
            names = filterfalse(is_fence, [*aliases, *self.collection_names()])
            meant = did_you_mean(collection, names)
            raise CollectionNotFound(f"{error}{meant}") from error
        info = CollectionInfo.of_properties(
            self.properties.of(name, described),
            name=name,
            key_field="id",
            vector_fields=schema.vector_fields(described),
            rows=self._count(name, Limits.of(described)) if counted else 0,
            partitions=PARTITIONS,
            aliases=[alias for alias, behind in aliases.items() if behind == name],
            schema={"described": described},
        )
        if checked:
            self.expect_own_helpers(info)
        return info

    def obstacles(self, source: CollectionInfo, field: str, suffix: str) -> list[str]:
        described = source.schema["described"]
        vector = source.vector_fields.get(field)
        present = source.states.get(field)
        copy_width = 0
        if vector is not None and vector.metric in schema.METRICS.values():
            copy_width = (
                vector.width_of_copy(ALIGNMENT) if present is None else present.codec.form.width
            )

        reasons = schema.obstacles(source, field)
        reasons += strict_mode.obstacles(
            described,
            field,
            points=source.rows,
            width=copy_width,
            keys=1,
            conditions=strict_mode.COPY_CONDITIONS,
        )

        if present is not None and not present.codec.leaves_vectors:
            # Its points have the keys of a copy already.
            return reasons

        # Keys of payloads that a copy needs for itself.
        counts = {}
        for name in (SLOT_KEYS[0] + suffix, NUMBER_KEYS[0] + suffix):
            count = self._count_with(source.name, described, name)
            if count:
                counts[name] = count

        if not counts:
            return reasons

        left_by_corrections = set(payload_keys_in(self.properties_of(source.name)))
        if left_by_corrections.issuperset(counts):
            keys = ", ".join(counts)
            return [
                *reasons,
                f"an earlier correction has left keys in payloads ({keys}): milvus-hubness sweep "
                f"{source.name} --yes removes them",
            ]

        return reasons + taken_keys(counts)

    def _count_with(self, collection: str, described: Any, key: str) -> int:
        """Return the number of points with this key in their payloads.

        Where strict mode forbids the filter, this reads the key of all points.
        """
        limits = Limits.of(described)
        is_forbidden = limits.needs_indexes and key not in (described.payload_schema or {})
        if limits.conditions and not is_forbidden:
            lacking = models.IsEmptyCondition(is_empty=models.PayloadField(key=key))
            return self._count(collection, limits, models.Filter(must_not=[lacking]))

        scroll = Scroll(with_payload=models.PayloadSelectorInclude(include=[key]))
        count = 0
        for partition in PARTITIONS:
            for record in self._records(collection, partition, limits, scroll):
                count += not _is_empty((record.payload or {}).get(key))
        return count

    def remarks(self, source: CollectionInfo, field: str) -> list[str]:
        described: Any = source.schema["described"]
        return [*schema.remarks(source, field), *strict_mode.remarks(described, source.rows)]

    def most_candidates(self, source: CollectionInfo) -> int:
        """As Store.most_candidates."""
        return Limits.of(source.schema["described"]).hits

    def validate_index(self, planned: VectorField, source: VectorField) -> None:
        if planned != source:
            raise InvalidParameter(
                "this database builds the index of a copy as in the source: omit the index options"
            )

    def column_needs(self, source: CollectionInfo, field: str) -> ColumnNeeds:
        return schema.column_needs(source, field)

    def named_partitions(self, source: CollectionInfo) -> list[str]:
        # The two types of ids, in whose order jobs read points, are no partitions of the user's.
        return []

    def fields_of_copy(self, hidden_fields: Sequence[str]) -> list[str]:
        # The vector has the bias: the payload of a point that has one is the user's.
        return []

    def units_moved(self) -> int:
        return self.units

    def schema_facts(self, source: CollectionInfo) -> dict[str, Any]:
        return schema.facts(source)

    def chunk_rows(self, source: CollectionInfo) -> int:
        """As Store.chunk_rows, from the true sizes of some points: payloads and multivectors may be
        of any size.
        """
        described: Any = source.schema["described"]
        limits = Limits.of(described)
        scroll = Scroll(most=SIZED_POINTS, with_payload=True, with_vectors=True)
        sample: list[Any] = []
        for partition in PARTITIONS:
            sample += self._records(source.name, partition, limits, scroll)

        mean_bytes = sum(map(json_bytes, sample)) // max(1, len(sample))
        rows = CHUNK_BYTES // max(1, mean_bytes)
        rows = max(FEWEST_CHUNK_ROWS, min(MOST_CHUNK_ROWS, rows))
        return min(rows, limits.rows_per_read)

    def nearest(
        self, collection: str, field: str, query_vectors: Floats, k: int
    ) -> list[list[Key]]:
        form = self.form(collection, field)
        queries = queries_of(form.form, form.form.encode_queries(query_vectors))
        requests = [
            models.QueryRequest(
                query=models.NearestQuery.model_construct(nearest=Uncopied(query)),
                using=field or None,
                limit=min(k, form.limits.hits),
                with_payload=False,
            )
            for query in queries
        ]

        bytes_per_query = BYTES_PER_NUMBER * form.form.width
        if isinstance(query_vectors, MultiVectors):
            bytes_per_query *= int(query_vectors.lengths.max(initial=1))
        size = min(
            QUERIES_PER_REQUEST,
            form.limits.searches,
            max(1, REQUEST_BYTES // bytes_per_query),
        )
        keys: list[list[Key]] = []
        for start in range(0, len(requests), size):
            some_requests = requests[start : start + size]
            answers = self.ask(
                "query_batch_points", collection, requests=some_requests, **self._reads
            )
            keys += [[point.id for point in answer.points] for answer in answers]

        return keys

    # -- the corrected copy ------------------------------------------------------------------------

    def create_copy(self, source: CollectionInfo, target: str, state: CollectionState) -> None:
        if self.exists(target):
            self._expect_unfinished_copy(target, state)
        else:
            self._create_empty_copy(source, target, state)

        for name, index in (source.schema["described"].payload_schema or {}).items():
            field_schema = index.params if index.params is not None else index.data_type
            self.ask("create_payload_index", target, field_name=name, field_schema=field_schema)
        # Jobs look for points without a bias.
        self.index_payload(target, state.codec.epoch_field, models.PayloadSchemaType.INTEGER)

    def _expect_unfinished_copy(self, target: str, state: CollectionState) -> None:
        """Raise CollectionExists unless an interrupted run of this migration created `target`."""
        described = self.ask("get_collection", target)
        present = self._states(target, described).get(state.field)
        is_ours = (
            present is not None
            and present.migration == state.migration
            and present.phase == "copying"
        )
        if not is_ours:
            raise CollectionExists(f"the name {target!r} is taken: choose another with --target")

    def _create_empty_copy(
        self, source: CollectionInfo, target: str, state: CollectionState
    ) -> None:
        if self.properties.in_metadata:
            metadata = schema.copied_metadata(source, state)
            self.ask("create_collection", target, **schema.copy_config(source, state, metadata))
            return

        # The properties come first, so that no client sees the collection without them.
        properties = self.properties.of(source.name, source.schema["described"])
        self.properties.alter(target, source.properties_of_copy(properties, state))
        self.ask("create_collection", target, **schema.copy_config(source, state, None))

    # -- biases in payloads ----------------------------------------------------------------------

    def beside_remarks(self, source: CollectionInfo) -> list[str]:
        """As Store.beside_remarks: payloads accept any key, but a score of Euclid is a root."""
        version = self.server_version()
        if not has_formulas(version.rpartition(" ")[2]):
            raise CannotMigrate(
                f"{source.name!r} cannot be enabled: {version} has no formulas in queries: upgrade "
                "it to 1.14 or newer, or migrate the collection"
            )

        metrics = {field.metric for field in source.vector_fields.values()}
        if not metrics & BIAS_METRICS:
            raise CannotMigrate(
                f"{source.name!r} cannot be enabled: a formula subtracts a bias from scores of "
                f"Cosine and Dot only, not of {', '.join(sorted(metrics))}: migrate the collection"
            )

        reasons = strict_mode.obstacles(
            source.schema["described"],
            "",
            points=source.rows,
            width=0,
            keys=len(SLOT_KEYS) + len(NUMBER_KEYS),
            conditions=strict_mode.ENABLED_CONDITIONS,
        )
        if reasons:
            raise CannotMigrate(f"{source.name!r} cannot be enabled: {'; '.join(reasons)}")

        return [
            *strict_mode.remarks(source.schema["described"], source.rows),
            "points that clients other than HubnessQdrantClient write have no bias until a refresh, and "
            "vectors that they update keep the former bias until one of all rows (--refit)",
        ]

    def add_bias_keys(self, collection: str, suffix: str) -> None:
        """As BiasKeys.add_bias_keys."""
        keys = [name + suffix for name in SLOT_KEYS]
        number_keys = [name + suffix for name in NUMBER_KEYS]
        self._announce_keys(collection, [*keys, *number_keys])
        # Formulas of clients read the biases of a generation, and jobs look for points without one.
        for key in keys:
            self.index_payload(collection, key, models.PayloadSchemaType.FLOAT)
        for key in number_keys:
            self.index_payload(collection, key, models.PayloadSchemaType.INTEGER)

    def _announce_keys(self, collection: str, keys: Sequence[str]) -> None:
        """Add keys to those that clients hide in payloads."""
        name = self._real_name(collection)
        listed = payload_keys_in(self.properties_of(name))
        new_keys = [key for key in keys if key not in listed]
        if new_keys:
            self._alter(name, {PAYLOAD_KEYS: json.dumps([*listed, *new_keys])})

    # -- what a correction leaves behind ---------------------------------------------------------

    def left_keys(self, collection: str) -> dict[str, int]:
        """As BiasKeys.left_keys."""
        described = self.ask("get_collection", collection)
        keys = payload_keys_in(self._properties(collection, described))
        counts = {key: self._count_with(collection, described, key) for key in keys}
        return {key: count for key, count in counts.items() if count}

    def delete_keys(self, collection: str) -> None:
        """As BiasKeys.delete_keys.

        The list of the keys goes last, so that clients hide them until then.
        """
        keys = payload_keys_in(self.properties_of(collection))
        for key in keys:
            lacking = models.IsEmptyCondition(is_empty=models.PayloadField(key=key))
            holders = models.FilterSelector(filter=models.Filter(must_not=[lacking]))
            self.ask("delete_payload", collection, keys=[key], points=holders, **SURE)

        indexed = self.ask("get_collection", collection).payload_schema or {}
        for key in keys:
            if key in indexed:
                self.ask("delete_payload_index", collection, field_name=key)
        if keys:
            self._alter(collection, {PAYLOAD_KEYS: ""})

    # -- whole collections -------------------------------------------------------------

    def validate_name(self, name: str) -> None:
        if _NO_NAME.search(name) or not 0 < len(name) <= LONGEST_NAME:
            raise InvalidParameter(
                f"{name!r} is no name for a collection or alias: leave out {NOT_IN_NAMES} and control "
                f"characters, and use at most {LONGEST_NAME} characters"
            )

    def flush(self, collection: str) -> None:
        self.load(collection)

    def load(self, collection: str) -> None:
        """As Store.load, but if writes of others keep
        the optimiser busy, this goes on with a warning.
        """
        optimiser = Optimiser(collection)
        described = self.ask("get_collection", collection)
        if described.status == models.CollectionStatus.GREY:
            # After a restart the optimiser waits for a change.
            self.ask(
                "update_collection", collection, optimizers_config=models.OptimizersConfigDiff()
            )
        elif optimiser.standing(described) is None:
            return

        wait_until(
            f"Qdrant to optimise {collection!r}",
            lambda: optimiser.standing(self.ask("get_collection", collection)),
        )

    def wait_visible(self, collection: str) -> None:
        """Every write of this store is visible when it returns."""

    def read_back(self, collection: str, read: Callable[[], T], is_whole: Callable[[T], bool]) -> T:
        """As Store.read_back: Qdrant shows what it acknowledged."""
        return read()

    def write_property(self, collection: str, name: str, record: FrozenModel | None) -> None:
        self._alter(collection, {name: record.to_json() if record else ""})

    def _drop(self, collection: str) -> None:
        # Its properties go last: without them, a collection would look like an ordinary one.
        self.ask("delete_collection", collection)
        self.properties.forget(collection)

    def alias_target(self, alias: str) -> str | None:
        return self._behind(alias)

    def point_alias(self, alias: str, collection: str) -> None:
        # Both changes go in one request, which the server carries out in one step.
        changes: list[models.AliasOperations] = [create_alias(alias, collection)]
        if self._behind(alias):
            changes.insert(0, drop_alias(alias))
        self._expect_lease()
        self.change_aliases(changes, collection)

    def drop_alias(self, alias: str) -> None:
        self._expect_lease()
        self.change_aliases([drop_alias(alias)], alias)


def _is_empty(value: Any) -> bool:
    """Whether Qdrant counts the value of a key as empty."""
    return value is None or value == []
