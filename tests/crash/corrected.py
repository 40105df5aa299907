"""Corrected collections to refresh, whatever their biases lie in, and the application that uses them."""

from __future__ import annotations

import contextlib
import math
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from pymilvus import DataType, MilvusClient
from pymilvus.exceptions import MilvusException

from milvus_hubness import (
    CSLS,
    NNN,
    Blend,
    Correction,
    Estimator,
    HubnessClient,
    HubnessError,
    MilvusStore,
    QueryBank,
    enable,
    migrate,
    plan_enable,
    plan_migration,
    refresh,
)
from milvus_hubness.estimators import to_dict
from milvus_hubness.jobs.lease import LEASES
from milvus_hubness.jobs.renewal import REFRESHES
from milvus_hubness.jobs.restored import restored
from milvus_hubness.jobs.runner import LEDGER
from milvus_hubness.state import BIAS_FIELD, EPOCH_FIELD, SLOT_FIELDS, STORED_FIELD, CollectionState
from milvus_hubness.stores.milvus_rpc import is_one_of
from tests.crash.places import Place
from tests.crash.sources import DIM, Rows, Shape, drawn_change, held, make_source
from tests.galleries import nnn, rich_rows

PLACEMENTS = ("vectors", "fields", "side", "second")
COUNT, PENDING_ROWS, NEW_KEYS = 300, 45, 7_000_000
STORED_WIDTH = 32
_FLOAT, _EPOCH = (
    {"datatype": DataType.FLOAT, "default_value": 0.0},
    {"datatype": DataType.INT64, "default_value": 0},
)
FURTHER_FIELDS: dict[str, dict[str, tuple[dict[str, Any], Any]]] = {
    "fields": {**dict.fromkeys(SLOT_FIELDS, (_FLOAT, 0.0)), EPOCH_FIELD: (_EPOCH, 0)},
    "second": {
        STORED_FIELD: (
            {"datatype": DataType.FLOAT_VECTOR, "dim": STORED_WIDTH},
            np.zeros(STORED_WIDTH, np.float32),
        ),
        BIAS_FIELD: (_FLOAT, 0.0),
        EPOCH_FIELD: (_EPOCH, 0),
    },
}
"""What Milvus Lite cannot add to a collection later."""


class Biases(NamedTuple):
    """What biases come from. bank: a file."""

    bank: Path
    estimator: Estimator

    @property
    def options(self) -> tuple[str, ...]:
        """Of the command line."""
        told = to_dict(self.estimator)
        params = [text for name in ("k", "alpha") if name in told for text in (f"--{name}", str(told[name]))]
        return ("--bank", str(self.bank), "--method", _METHODS[type(self.estimator)], *params)

    def oracle(self, state: CollectionState, items: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """(n,) biases of items (n, d), up to one number for all: from the definition, or freshly fitted."""
        bank, rows = np.load(self.bank), np.asarray(items, np.float32)
        if isinstance(self.estimator, NNN):
            return nnn(bank, rows, state.metric, self.estimator.k, self.estimator.alpha)
        correction = Correction.fit(state.layout, self.estimator, QueryBank(bank))
        return np.asarray(correction.centred(rows), np.float64)


_METHODS = {NNN: "nnn", CSLS: "csls", Blend: "blend"}


class Corrected:
    """One collection at a place, and by `wanted` all that the application put into it.

    name: of the collection that is refreshed. placement: of its biases.
    """

    def __init__(self, place: Place, stem: str, shape: Shape, placement: str, seed: int) -> None:
        self.place, self.shape, self.placement = place, shape, placement
        self._stem, self._seed = stem, seed
        self.name = f"{stem}_copy" if placement == "vectors" else stem
        self.bank, self.side = f"{stem}__bank", f"{stem}__bias"
        self.wanted: Rows = {}
        self._new = NEW_KEYS
        self._written_until: dict[Any, float] = {}

    def make(self, client: MilvusClient, biases: Biases, former: Biases | None = None) -> None:
        """With a bias for each row. former: what these come from at first, before they are refreshed."""
        store, first = MilvusStore(client), former or biases
        more = FURTHER_FIELDS.get(self.placement)
        make_source(client, self._stem, self.shape, self._seed, count=COUNT, more=more)
        bank = QueryBank.load(str(first.bank))
        if self.placement == "vectors":
            plan = plan_migration(store, self._stem, bank, estimator=first.estimator, target=self.name)
            migrate(store, plan, frozen=True)
        else:
            where = {"second": "vectors"}.get(self.placement, self.placement)
            options = {"side": self.side} if self.placement == "side" else {}
            enable(
                store,
                plan_enable(store, self.name, bank, estimator=first.estimator, where=where, **options),
                client_ttl=0.0,
            )
        if former is not None:
            new = QueryBank.load(str(biases.bank))
            refresh(store, self.name, bank=new, estimator=biases.estimator, force=True, client_ttl=0.0)
        self.wanted = {key: self._as_the_user_sees(row) for key, row in held(client, self._stem).items()}

    @staticmethod
    def _as_the_user_sees(row: dict[str, Any]) -> dict[str, Any]:
        ours = {*SLOT_FIELDS, EPOCH_FIELD, STORED_FIELD}
        return {name: value for name, value in row.items() if name not in ours}

    # -- the application ----------------------------------------------------------------------------------

    def client(self, state_ttl: float = 0.0) -> HubnessClient:
        return HubnessClient(self.place.uri, state_ttl=state_ttl)

    def insert_pending(self, count: int = PENDING_ROWS) -> None:
        """Rows that are to get their biases from the next refresh."""
        self._new += count
        made = rich_rows(np.random.default_rng(self._new), count, self.shape.key, DIM)
        tenant = {"tenant": "tenant 1"} if self.shape.placement == "partitions" else {}
        rows = [
            {**row, "pk": type(row["pk"])(self._new + i), "vec": row["vec"].tolist(), **tenant}
            for i, row in enumerate(made)
        ]
        partition = "north" if tenant else ""
        self.client().insert(self.name, rows, partition_name=partition, bias="pending")
        keys = [row["pk"] for row in rows]
        found = self.client().query(
            self.name, filter=is_one_of("pk", keys), output_fields=["*"], consistency_level="Strong"
        )
        assert len(found) == count, f"{len(found)} of {count} rows inserted are there"
        self.wanted |= {row["pk"]: dict(row) for row in found}

    def write(self, rng: random.Random, client: HubnessClient | None = None) -> None:
        """Rows changed, added and deleted."""
        self._new += 1_000
        change = drawn_change(self.wanted, self.shape, rng, self._new)
        if client is None:
            client = self.client()
            client.load_collection(self.name)
        keys = [*(row["pk"] for row in change.rows), *change.gone]
        self._written_until |= dict.fromkeys(keys, math.inf)
        client.upsert(self.name, change.rows, partition_name=change.partition)
        client.delete(self.name, filter=is_one_of("pk", change.gone))
        self._written_until |= dict.fromkeys(keys, time.monotonic())
        change.made(self.wanted)

    def half_written(self, since: float) -> set[Any]:
        """Keys of rows that may have been seen, since this time.monotonic(), when of vector and bias one was
        written and the other not yet: only in a side collection, which is written by a request of its own."""
        if self.placement != "side":
            return set()
        return {key for key, until in self._written_until.copy().items() if until >= since}

    # -- the end ------------------------------------------------------------------------------------------

    @property
    def collections(self) -> set[str]:
        """Those that are to be there."""
        return {self._stem, self.name, self.bank, *([self.side] if self.placement == "side" else [])}

    def ours(self, client: MilvusClient) -> set[str]:
        """Those that are."""
        return {name for name in client.list_collections() if name.startswith(self._stem)}

    def drop(self) -> None:
        """Of a server that did not come back there is nothing to drop."""
        with contextlib.suppress(MilvusException, HubnessError), self.place.open() as client:
            for name in self.ours(client):
                client.drop_collection(name)
            store = MilvusStore(client)
            for group in (LEASES, REFRESHES):
                store.drop_records(LEDGER, group, [f"{group}/{self.name}"])


def expected_biases(
    store: MilvusStore, state: CollectionState, biases: Biases, items: Sequence[Any]
) -> npt.NDArray[np.float64]:
    """(n,) what the active slot is to hold: freshly computed, or, where the method learns from the gallery,
    by what was fitted on it."""
    if biases.estimator.needs_gallery:
        return np.asarray(restored(store, state, state.profile).centred(np.float32(items)), np.float64)
    found = biases.oracle(state, items)
    return found - state.profile.centre
