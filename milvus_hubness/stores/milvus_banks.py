"""Query banks as Milvus collections: generations of rows, so that a new bank never mixes with the old."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from pymilvus import DataType, MilvusClient

from milvus_hubness.banks import Origins, QueryBank
from milvus_hubness.errors import CollectionExists, DimensionMismatch, EmptyBank
from milvus_hubness.layout import Floats, Metric
from milvus_hubness.state import BankReference, read_states
from milvus_hubness.stores.base import Batch, Key, Made, StoredBank
from milvus_hubness.stores.milvus_requests import ROWS_PER_REQUEST, MilvusRequests
from milvus_hubness.stores.milvus_rpc import translated

BANK_PROPERTY = "hubness_bank"
_GENERATION_STRIDE = 2**32
_TARGETS_FROM = 2**31


def all_targets(reference: BankReference) -> str:
    """The filter that picks a generation's targets."""
    return f"generation == {reference.generation} and id >= {_first_target(reference)}"


def queries_between(reference: BankReference, start: int, end: int) -> str:
    """The filter that picks a generation's queries from number `start` to before number `end`."""
    return _between(reference, reference.generation * _GENERATION_STRIDE, start, end)


def targets_between(reference: BankReference, start: int, end: int) -> str:
    """The filter that picks a generation's targets from number `start` to before number `end`."""
    return _between(reference, _first_target(reference), start, end)


def _between(reference: BankReference, first: int, start: int, end: int) -> str:
    return f"generation == {reference.generation} and id >= {first + start} and id < {first + end}"


def _first_target(reference: BankReference) -> int:
    return reference.generation * _GENERATION_STRIDE + _TARGETS_FROM


def _origins(rows: Sequence[dict[str, Any]]) -> Origins:
    """Of the rows of a generation's queries; those of earlier versions of this package tell the time only."""
    numbers = [row.get("sample", -1 - i) for i, row in enumerate(rows)]
    return Origins(np.array(numbers, np.int64), np.array([row["added_at"] for row in rows], np.int64))


def _after(generations: dict[str, Any]) -> int:
    return 1 + max(map(int, generations), default=0)


class MilvusBanks(MilvusRequests):
    """The bank methods of the store."""

    def save_bank(self, collection: str, bank: StoredBank, metric: Metric) -> tuple[BankReference, Made]:
        generations: dict[str, Any] = {}
        created = not self.exists(collection)
        if created:
            self._create_bank(collection, bank.queries.dim)
        else:
            generations = self._generations(collection, bank.queries.dim)
        with translated(collection):
            self._serve_flat(collection, metric)
        if kept := self._same_generation(collection, generations, bank):
            return kept, "nothing"
        reference = BankReference(
            collection=collection,
            generation=_after(generations),
            fingerprint=bank.fingerprint,
            count=len(bank.queries),
        )
        described = {
            "fingerprint": bank.fingerprint,
            "count": len(bank.queries),
            "targets": len(bank.targets) if bank.targets else 0,
            "source": bank.queries.source,
        }
        try:
            self._delete_generation(reference)
            self._insert(reference, bank.queries, bank.potentials, 0)
            if bank.targets:
                self._insert(
                    reference, bank.targets, np.empty((len(bank.targets), 0), np.float32), _TARGETS_FROM
                )
            self._write_generations(collection, {**generations, str(reference.generation): described})
        except BaseException:
            if created:
                with translated(collection):
                    self.client.drop_collection(collection)
            raise
        return reference, "collection" if created else "generation"

    def next_generation(self, collection: str) -> BankReference:
        number = _after(self._generations(collection))
        return BankReference(collection=collection, generation=number, fingerprint="", count=1)

    def load_bank(self, reference: BankReference) -> StoredBank:
        found = self._keys(reference.collection, f"generation == {reference.generation}")
        keys = [int(key) for key in found]
        from_targets = _first_target(reference)
        queries, rows = self._whole(
            reference.collection, "vector", [key for key in keys if key < from_targets]
        )
        targets, target_rows = self._whole(
            reference.collection, "vector", [key for key in keys if key >= from_targets]
        )
        if not len(queries):
            raise EmptyBank(f"{reference.collection!r} holds no queries of generation {reference.generation}")
        potentials = [row.get("potentials", []) for row in rows]
        whole = len({len(each) for each in potentials}) == 1
        source = f"milvus:{reference.collection}"
        return StoredBank(
            QueryBank(queries, source=source, origins=_origins(rows)),
            np.asarray(potentials if whole else [[]] * len(rows), np.float32),
            QueryBank(targets, source=source) if len(targets) else None,
            [row.get(reference.nearest, []) for row in rows + target_rows],
        )

    def save_nearest(
        self, reference: BankReference, collection: str, nearest: Sequence[Sequence[Key]]
    ) -> BankReference:
        first, second = (f"nearest_{collection}_{place}" for place in (0, 1))
        renewed = reference.model_copy(update={"nearest": second if reference.nearest == first else first})
        found = self._keys(reference.collection, f"generation == {reference.generation}")
        by_row = dict(zip(found, nearest, strict=False))
        for start in range(0, len(found), ROWS_PER_REQUEST):
            batch = self.fetch(reference.collection, found[start : start + ROWS_PER_REQUEST], "vector")
            rows = [
                {**row, renewed.nearest: list(by_row.get(key, []))}
                for key, row in zip(batch.keys, batch.rows, strict=True)
            ]
            self.write(reference.collection, Batch(batch.keys, batch.vectors, rows), "vector")
        return renewed

    def drop_bank_generation(self, reference: BankReference) -> None:
        if self._is_used(reference):
            return
        generations = self._generations(reference.collection)
        generations.pop(str(reference.generation), None)
        self._delete_generation(reference)
        self._write_generations(reference.collection, generations)

    def _is_used(self, reference: BankReference) -> bool:
        """Whether any collection's biases come from this generation, or are about to."""
        with translated(reference.collection):
            for name in self.client.list_collections():
                if not self.client.has_collection(name):
                    continue  # dropped meanwhile
                states = read_states(self.client.describe_collection(name)["properties"]).values()
                if any(
                    (bank.collection, bank.generation) == (reference.collection, reference.generation)
                    for state in states
                    for bank in state.banks
                ):
                    return True
        return False

    def _same_generation(
        self, collection: str, generations: dict[str, Any], bank: StoredBank
    ) -> BankReference | None:
        """Where this very bank lies already, whatever its own description claims."""
        for number, known in generations.items():
            if known["fingerprint"] != bank.fingerprint:
                continue
            reference = BankReference(
                collection=collection,
                generation=int(number),
                fingerprint=known["fingerprint"],
                count=known["count"],
            )
            kept = self.load_bank(reference)
            if kept.fingerprint == bank.fingerprint and np.array_equal(kept.potentials, bank.potentials):
                return reference
        return None

    def _create_bank(self, collection: str, dim: int) -> None:
        schema = MilvusClient.create_schema(
            description="query bank of milvus_hubness", enable_dynamic_field=True
        )
        schema.add_field("id", DataType.INT64, is_primary=True)
        schema.add_field("vector", DataType.FLOAT_VECTOR, dim=dim)
        schema.add_field("generation", DataType.INT64)
        schema.add_field("source", DataType.VARCHAR, max_length=512)
        schema.add_field("added_at", DataType.INT64, description="Unix time, seconds")
        with translated(collection):
            self.client.create_collection(
                collection, schema=schema, properties={BANK_PROPERTY: "{}"}, consistency_level="Strong"
            )

    def _insert(self, reference: BankReference, bank: QueryBank, potentials: Floats, first: int) -> None:
        common = {
            "generation": reference.generation,
            "source": bank.source.encode()[:512].decode(errors="ignore"),
        }
        origins = bank.origins or Origins.seeds(len(bank), int(time.time()))
        first += reference.generation * _GENERATION_STRIDE
        rows = [
            {
                "id": first + i,
                "vector": vector,
                **common,
                "added_at": at,
                "sample": number,
                **({"potentials": own} if own else {}),
            }
            for i, (vector, number, at, own) in enumerate(
                zip(
                    bank.vectors,
                    origins.numbers.tolist(),
                    origins.at.tolist(),
                    potentials.tolist(),
                    strict=True,
                )
            )
        ]
        for start in range(0, len(rows), ROWS_PER_REQUEST):
            self._upsert(reference.collection, rows[start : start + ROWS_PER_REQUEST])

    def _delete_generation(self, reference: BankReference) -> None:
        with translated(reference.collection):
            self.client.delete(reference.collection, filter=f"generation == {reference.generation}")

    def _generations(self, collection: str, dim: int | None = None) -> dict[str, Any]:
        with translated(collection):
            schema = self.client.describe_collection(collection)
        if BANK_PROPERTY not in schema["properties"]:
            raise CollectionExists(
                f"{collection!r} is there already and is no query bank: name another with --bank-name"
            )
        [stored] = [field["params"]["dim"] for field in schema["fields"] if field["name"] == "vector"]
        if dim is not None and int(stored) != dim:
            raise DimensionMismatch(f"bank {collection!r} holds {stored}-d queries, these have {dim}")
        generations: dict[str, Any] = json.loads(schema["properties"][BANK_PROPERTY])
        return generations

    def _write_generations(self, collection: str, generations: dict[str, Any]) -> None:
        with translated(collection):
            self._alter_properties(collection, {BANK_PROPERTY: json.dumps(generations)})
