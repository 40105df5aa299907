"""Query banks as collections: generations of rows, so that a new bank never mixes with the old."""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from milvus_hubness.banks import Origins, QueryBank
from milvus_hubness.errors import CollectionExists, DimensionMismatch, EmptyBank
from milvus_hubness.layout import Floats, Metric
from milvus_hubness.state import BankReference, CollectionState
from milvus_hubness.stores.base import Made, StoredBank

BANK_PROPERTY = "hubness_bank"
GENERATION_STRIDE = 2**32
TARGETS_FROM = 2**31
LONGEST_SOURCE = 512

Row = dict[str, Any]


def first_target(reference: BankReference) -> int:
    """The id of the first row of a generation's targets."""
    return reference.generation * GENERATION_STRIDE + TARGETS_FROM


def _origins(rows: Sequence[Row]) -> Origins:
    """Of the rows of a generation's queries; those of earlier versions of this package tell the time only."""
    numbers = [row.get("sample", -1 - i) for i, row in enumerate(rows)]
    return Origins(np.array(numbers, np.int64), np.array([row["added_at"] for row in rows], np.int64))


def _after(generations: dict[str, Any]) -> int:
    return 1 + max(map(int, generations), default=0)


class BankGenerations(ABC):
    """The bank methods of a store, but for those that only the database can tell.

    Rows have an integer id, a vector, and the fields generation, source, added_at, sample and, where there
    are some, potentials. What generations there are is told in a property of the collection.
    """

    database = ""
    """What banks that are read from here are told to come from."""

    @abstractmethod
    def exists(self, collection: str) -> bool: ...

    @abstractmethod
    def drop(self, collection: str) -> None: ...

    @abstractmethod
    def _make_bank(self, collection: str, dim: int) -> None:
        """An empty bank collection that tells of no generations."""

    @abstractmethod
    def _serve_bank(self, collection: str, metric: Metric) -> None:
        """A bank collection that is there is ready to be read and written."""

    @abstractmethod
    def _told_of_bank(self, collection: str) -> tuple[int, str | None]:
        """The dimension of the collection's vectors, and its property; None where it has none."""

    @abstractmethod
    def _tell_of_bank(self, collection: str, told: str) -> None:
        """Give the collection this property."""

    @abstractmethod
    def _put_bank_rows(self, collection: str, rows: list[Row]) -> None: ...

    @abstractmethod
    def _bank_whole(self, reference: BankReference) -> tuple[list[int], Floats, list[Row]]:
        """Of all rows of the generation the ids, in ascending order, (n, d) the vectors, and the fields."""

    @abstractmethod
    def _drop_bank_rows(self, reference: BankReference) -> None:
        """All rows of the generation."""

    @abstractmethod
    def _all_states(self) -> Iterable[CollectionState]:
        """Of every corrected field of the database."""

    def save_bank(self, collection: str, bank: StoredBank, metric: Metric) -> tuple[BankReference, Made]:
        """As Store.save_bank."""
        generations: dict[str, Any] = {}
        created = not self.exists(collection)
        if created:
            self._make_bank(collection, bank.queries.dim)
        else:
            generations = self._generations(collection, bank.queries.dim)
        self._serve_bank(collection, metric)
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
            self._drop_bank_rows(reference)
            self._put(reference, bank.queries, bank.potentials, 0)
            if bank.targets:
                self._put(reference, bank.targets, np.empty((len(bank.targets), 0), np.float32), TARGETS_FROM)
            told = {**generations, str(reference.generation): described}
            self._tell_of_bank(collection, json.dumps(told))
        except BaseException:
            if created:
                self.drop(collection)
            raise
        return reference, "collection" if created else "generation"

    def next_generation(self, collection: str) -> BankReference:
        """As Store.next_generation."""
        number = _after(self._generations(collection))
        return BankReference(collection=collection, generation=number, fingerprint="", count=1)

    def load_bank(self, reference: BankReference) -> StoredBank:
        """As Store.load_bank."""
        ids, vectors, rows = self._bank_whole(reference)
        end = bisect_left(ids, first_target(reference))
        return stored_bank(reference, self.database, (vectors[:end], rows[:end]), (vectors[end:], rows[end:]))

    def drop_bank_generation(self, reference: BankReference) -> None:
        """As Store.drop_bank_generation."""
        if self._is_used(reference):
            return
        generations = self._generations(reference.collection)
        generations.pop(str(reference.generation), None)
        self._drop_bank_rows(reference)
        self._tell_of_bank(reference.collection, json.dumps(generations))

    def _is_used(self, reference: BankReference) -> bool:
        """Whether any collection's biases come from this generation, or are about to."""
        return any(
            (bank.collection, bank.generation) == (reference.collection, reference.generation)
            for state in self._all_states()
            for bank in state.banks
        )

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

    def _put(self, reference: BankReference, bank: QueryBank, potentials: Floats, first: int) -> None:
        common = {
            "generation": reference.generation,
            "source": bank.source.encode()[:LONGEST_SOURCE].decode(errors="ignore"),
        }
        origins = bank.origins or Origins.seeds(len(bank), int(time.time()))
        columns = (bank.vectors, origins.numbers.tolist(), origins.at.tolist(), potentials.tolist())
        first += reference.generation * GENERATION_STRIDE
        self._put_bank_rows(
            reference.collection,
            [
                {
                    "id": first + i,
                    "vector": vector,
                    **common,
                    "added_at": at,
                    "sample": number,
                    **({"potentials": own} if own else {}),
                }
                for i, (vector, number, at, own) in enumerate(zip(*columns, strict=True))
            ],
        )

    def _generations(self, collection: str, dim: int | None = None) -> dict[str, Any]:
        stored, told = self._told_of_bank(collection)
        if told is None:
            raise CollectionExists(
                f"{collection!r} is there already and is no query bank: name another with --bank-name"
            )
        if dim is not None and stored != dim:
            raise DimensionMismatch(f"bank {collection!r} holds {stored}-d queries, these have {dim}")
        generations: dict[str, Any] = json.loads(told)
        return generations


def stored_bank(
    reference: BankReference,
    database: str,
    queries: tuple[Floats, Sequence[Row]],
    targets: tuple[Floats, Sequence[Row]],
) -> StoredBank:
    """A generation from the vectors and the fields of its rows, in the order of their ids. Raises EmptyBank
    where there are no queries."""
    (vectors, rows), (target_vectors, target_rows) = queries, targets
    if not len(vectors):
        raise EmptyBank(f"{reference.collection!r} holds no queries of generation {reference.generation}")
    potentials = [row.get("potentials", []) for row in rows]
    whole = len({len(each) for each in potentials}) == 1
    source = f"{database}:{reference.collection}"
    return StoredBank(
        QueryBank(vectors, source=source, origins=_origins(rows)),
        np.asarray(potentials if whole else [[]] * len(rows), np.float32),
        QueryBank(target_vectors, source=source) if len(target_vectors) else None,
        [row.get(reference.nearest, []) for row in (*rows, *target_rows)],
    )
