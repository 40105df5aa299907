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
from pymilvus.exceptions import MilvusException

from milvus_hubness import (
    CSLS,
    NNN,
    Beside,
    Blend,
    Copy,
    Correction,
    Estimator,
    HubnessError,
    QueryBank,
    Recipe,
    enable,
    migrate,
    plan_correction,
    refresh,
)
from milvus_hubness.correction.codec.beside import NUMBER_KEYS, SLOT_KEYS
from milvus_hubness.correction.estimators import to_dict
from milvus_hubness.correction.state import CollectionState
from milvus_hubness.jobs.common.corrections import load_correction
from milvus_hubness.jobs.common.lease import forget_leases
from milvus_hubness.jobs.store.protocols import Store
from milvus_hubness.milvus.filters import is_one_of
from tests.chaos.ports import Application, Database, Place
from tests.chaos.sources import DIM, Rows, Shape, drawn_change
from tests.support.galleries import nnn, rich_rows

COUNT, PENDING_ROWS, NEW_KEYS = 300, 45, 7_000_000


class Biases(NamedTuple):
    """What biases come from. bank: a file."""

    bank: Path
    estimator: Estimator

    @property
    def options(self) -> tuple[str, ...]:
        """Of the command line."""
        result = to_dict(self.estimator)
        params = [
            text
            for name in ("k", "alpha")
            if name in result
            for text in ("--param", f"{name}={result[name]}")
        ]
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

    name: of the collection that is refreshed. bias_location: of its biases. kept: others that are to be there.
    pending: the vectors, as they came, of rows that had no biases then."""

    def __init__(
        self, place: Place, stem: str, shape: Shape, bias_location: str, seed: int
    ) -> None:
        self.place, self.shape, self.bias_location = place, shape, bias_location
        self._stem, self._seed = stem, seed
        self.name = f"{stem}_copy" if bias_location == "vector" else stem
        self.bank = f"{stem}__bank"
        self.kept: set[str] = set()
        self.wanted: Rows = {}
        self.pending: dict[Any, Any] = {}
        self._new = NEW_KEYS
        self._written_until: dict[Any, float] = {}

    def make(self, database: Database, biases: Biases, former: Biases | None = None) -> None:
        """With a bias for each row. former: what these come from at first, before they are refreshed."""
        store, first = database.store, former or biases
        database.make_source(self._stem, self.shape, self._seed, count=COUNT)
        bank = QueryBank.load(str(first.bank))
        if self.bias_location == "vector":
            plan = plan_correction(
                store, self._stem, Recipe(bank, estimator=first.estimator), Copy(target=self.name)
            )
            migrate(store, plan, no_writers=True)
        else:
            enable(
                store,
                plan_correction(
                    store, self.name, Recipe(bank, estimator=first.estimator), Beside()
                ),
                client_ttl=0.0,
            )
        if former is not None:
            new = QueryBank.load(str(biases.bank))
            refresh(
                store,
                self.name,
                Recipe(new, estimator=biases.estimator),
                force=True,
                client_ttl=0.0,
            )
        self.wanted = {
            key: self._as_the_user_sees(row) for key, row in database.held(self._stem).items()
        }

    @staticmethod
    def _as_the_user_sees(row: dict[str, Any]) -> dict[str, Any]:
        ours = {*SLOT_KEYS, *NUMBER_KEYS}
        return {name: value for name, value in row.items() if name not in ours}

    # -- the application ----------------------------------------------------------------------------------

    def insert_pending(self, database: Database, count: int = PENDING_ROWS) -> None:
        """Rows that are to get their biases from the next refresh."""
        self._new += count
        made = rich_rows(np.random.default_rng(self._new), count, self.shape.key, DIM)
        tenant = {"tenant": "tenant 1"} if self.shape.bias_location == "partitions" else {}
        rows = [
            {**row, "pk": self.shape.key_of(self._new + i), "vec": row["vec"].tolist(), **tenant}
            for i, row in enumerate(made)
        ]
        database.put_pending(self.name, rows, partition="north" if tenant else "")
        there = database.shown(self.name)
        self.wanted |= {row["pk"]: there[row["pk"]] for row in rows}
        self.pending |= {row["pk"]: there[row["pk"]]["vec"] for row in rows}

    def write(self, rng: random.Random, application: Application) -> None:
        """Rows changed, added and deleted."""
        self._new += 1_000
        change = drawn_change(self.wanted, self.shape, rng, self._new)
        keys = [*(row["pk"] for row in change.rows), *change.gone]
        self._written_until |= dict.fromkeys(keys, math.inf)
        application.upsert(self.name, change.rows, partition_name=change.partition)
        application.delete(self.name, filter=is_one_of("pk", change.gone))
        self._written_until |= dict.fromkeys(keys, time.monotonic())
        change.made(self.wanted)

    def half_written(self, since: float) -> set[Any]:
        """Keys of rows that may have been seen, since this time.monotonic(), when of vector and bias one was
        written and the other not yet: only in a side collection, which is written by a request of its own."""
        if self.bias_location != "beside":
            return set()
        return {key for key, until in self._written_until.copy().items() if until >= since}

    # -- the end ------------------------------------------------------------------------------------------

    @property
    def collections(self) -> set[str]:
        """Those that are to be there."""
        return {self._stem, self.name, self.bank, *self.kept}

    def ours(self, database: Database) -> set[str]:
        """Those that are."""
        return {name for name in database.collections() if name.startswith(self._stem)}

    def drop(self) -> None:
        """Of a server that did not come back there is nothing to drop."""
        with contextlib.suppress(MilvusException, HubnessError), self.place.open() as database:
            for name in self.ours(database):
                database.drop(name)
            forget_leases(database.store, self.name)


def expected_biases(
    store: Store, state: CollectionState, biases: Biases, items: Sequence[Any]
) -> npt.NDArray[np.float64]:
    """(n,) what the active slot is to hold: freshly computed, or, where the method learns from the gallery,
    by what was fitted on it."""
    if biases.estimator.needs_gallery:
        return np.asarray(
            load_correction(store, state, state.profile).centred(np.float32(items)), np.float64
        )
    found = biases.oracle(state, items)
    return found - state.profile.mean_bias
