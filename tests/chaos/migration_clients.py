"""An application that writes and reads while its collection is migrated and migrated back."""

from __future__ import annotations

import itertools
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from milvus_hubness import (
    NNN,
    MigrationOptions,
    QueryBank,
    Recipe,
    cutover,
    migrate,
    plan_correction,
    rollback,
)
from milvus_hubness.jobs.common.progress import Throttle
from tests.chaos.places import BACKENDS
from tests.chaos.ports import Application as Client
from tests.chaos.ports import Database
from tests.chaos.processes import be_quiet, problem_of
from tests.support.galleries import vectors

DIM, STEADY, RANGE = 16, 300, 1_200
BATCH = 10
STATE_TTL, CLIENT_TTL = 1.0, 1.2
ENDLESS = 10**6

Reference = dict[int, tuple[int, bytes]]
Step = Callable[[], None]

ROWS_PER_QUERY = 8_000


class Application:
    """Three writers, each with keys of its own, and a reader. uses: the name of what it writes and reads.
    rows_per_second: of all writers together."""

    def __init__(
        self, client: Callable[[], Client], uses: str, items: np.ndarray, rows_per_second: float
    ) -> None:
        self.uses, self._client, self._items = uses, client, items
        self.failures: list[str] = []
        self.written = dict.fromkeys(("insert", "update", "delete"), 0)
        self.reads = 0
        self._stop = threading.Event()
        self._versions = itertools.count(ENDLESS)
        self.steady = range(STEADY)
        everything = {i: (i % 5, vector.tobytes()) for i, vector in enumerate(items)}
        self.reference: Reference = everything
        self._acknowledged: list[int] = []
        pause = 3 * BATCH / rows_per_second
        self._threads = [
            threading.Thread(target=self._repeat, args=(make, every), name=make.__name__)
            for make, every in (
                (self._inserts, pause),
                (self._updates, pause),
                (self._deletes, pause),
                (self._reads, 0.02),
            )
        ]

    def __enter__(self) -> Application:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)
        stuck = [thread.name for thread in self._threads if thread.is_alive()]
        self.failures += [f"{name} did not end" for name in stuck]

    def _repeat(self, make: Callable[[Client], Iterator[None]], pause: float) -> None:
        try:
            due = time.monotonic()
            for _ in make(self._client()):
                due = max(due + pause, time.monotonic() - 1)
                if self._stop.wait(max(0.0, due - time.monotonic())):
                    return
        except Exception:
            self.failures.append(f"{make.__name__}: {traceback.format_exc()}")

    def _rows(self, keys: list[int], rng: np.random.Generator) -> list[dict[str, Any]]:
        return [
            {"id": key, "vector": vector, "group": next(self._versions), "note": f"n{key}"}
            for key, vector in zip(keys, vectors(rng, len(keys), DIM), strict=True)
        ]

    def _take(self, rows: list[dict[str, Any]]) -> None:
        self.reference.update({row["id"]: (row["group"], row["vector"].tobytes()) for row in rows})

    def _inserts(self, client: Client) -> Iterator[None]:
        rng = np.random.default_rng(1)
        for first in itertools.count(ENDLESS, BATCH):
            rows = self._rows(list(range(first, first + BATCH)), rng)
            client.insert(self.uses, rows)
            self._take(rows)
            self._acknowledged += [row["id"] for row in rows]
            self.written["insert"] += BATCH
            yield

    def _updates(self, client: Client) -> Iterator[None]:
        rng = np.random.default_rng(2)
        while True:
            keys = rng.choice(np.arange(STEADY, STEADY + RANGE), BATCH, replace=False).tolist()
            rows = self._rows(keys, rng)
            client.upsert(self.uses, rows)
            self._take(rows)
            self.written["update"] += BATCH
            yield

    def _deletes(self, client: Client) -> Iterator[None]:
        """By key or by filter, and some of what was deleted comes back."""
        rng = np.random.default_rng(3)
        mine = np.arange(STEADY + RANGE, STEADY + 2 * RANGE)
        for turn in itertools.count():
            keys = rng.choice(mine, BATCH, replace=False).tolist()
            there = [key for key in keys if key in self.reference]
            if turn % 3 == 2:
                rows = self._rows([key for key in keys if key not in self.reference], rng)
                if rows:
                    client.insert(self.uses, rows)
                self._take(rows)
                self.written["delete"] += len(rows)
            else:
                how = {"ids": there} if turn % 3 else {"filter": f"id in {there}"}
                if there:
                    client.delete(self.uses, **how)
                for key in there:
                    self.reference.pop(key)
                self.written["delete"] += len(there)
            yield

    def _reads(self, client: Client) -> Iterator[None]:
        rng = np.random.default_rng(4)
        while True:
            found = client.search(self.uses, data=[self._items[rng.integers(STEADY)]], limit=10)
            assert len(found[0]) == 10, f"a search found {len(found[0])} rows"
            wanted = [*rng.choice(STEADY, 5, replace=False).tolist(), *self._acknowledged[-5:]]
            got = {row["id"] for row in client.get(self.uses, wanted, output_fields=["id"])}
            assert got == set(wanted), f"{sorted(set(wanted) - got)} were not there"
            self.reads += 1
            yield


def migrate_beside_writers(
    database: Database, name: str, seconds: float, *, rename: bool, rows_per_second: float
) -> Application:
    """There and back while the application goes on, for so many seconds at least, through its own name or an
    alias. Raises AssertionError for what the application would notice."""
    items = vectors(np.random.default_rng(5), STEADY + 2 * RANGE, DIM)
    database.make_plain(name, items)
    uses = name if rename else f"{name}_live"
    store = database.store
    if not rename:
        store.point_alias(uses, name)
    bank = QueryBank(vectors(np.random.default_rng(6), 64, DIM))
    copying = Throttle(rows_per_second=4 * len(items) / seconds)
    options = MigrationOptions(client_ttl=CLIENT_TTL, throttle=copying)
    ends = time.monotonic() + seconds

    def client(state_ttl: float) -> Client:
        return database.application(state_ttl, plain=True)

    with Application(lambda: client(STATE_TTL), uses, items, rows_per_second) as application:
        time.sleep(min(1.0, seconds / 10))
        plan = plan_correction(store, name, Recipe(bank, estimator=NNN(8)))
        migrate(store, plan, options)
        cutover(
            store, plan.body.target, alias=None if rename else uses, rename=rename, options=options
        )
        assert store.info(uses).name == plan.body.target
        _go_on(application, min(seconds / 4, ends - time.monotonic()))
        assert_nothing_lost(client(0.0), application, sure=False)
        copying.set_rate(rows_per_second=None)
        rollback(store, plan.body.target, options=options)
        assert store.info(uses).name == name
        _go_on(application, ends - time.monotonic())
    assert not application.failures, application.failures[0]
    assert_nothing_lost(client(0.0), application, sure=True)
    assert database.counted(uses) == len(application.reference), "rows are there twice"
    return application


def run_writers(backend: str, seconds: float, *, rename: bool) -> dict[str, Any]:
    """What the application did and noticed; prints a line."""
    be_quiet()
    began = time.monotonic()
    facts: dict[str, Any] = {"backend": backend, "moves": "its own name" if rename else "an alias"}
    there = BACKENDS[backend]
    with there.folder("writers-") as folder, there.server() as server:
        try:
            with there.place.within(Path(folder), server).open() as database:
                done = migrate_beside_writers(
                    database,
                    "written",
                    seconds,
                    rename=rename,
                    rows_per_second=there.rows_per_second,
                )
            facts |= {"written": done.written, "reads": done.reads, "problem": ""}
        except Exception as error:
            facts["problem"] = problem_of(error)
    facts["seconds"] = round(time.monotonic() - began, 1)
    print(f"writers: {facts}", flush=True)
    return facts


def _go_on(application: Application, seconds: float) -> None:
    ends = time.monotonic() + max(seconds, 1.0)
    while time.monotonic() < ends:
        assert not application.failures, application.failures[0]
        time.sleep(0.05)


def assert_nothing_lost(client: Client, application: Application, *, sure: bool) -> None:
    """What the application's name leads to holds what was acknowledged; while it writes, only the rows that
    it never writes are sure."""
    ends = [
        ENDLESS,
        *range(
            ENDLESS + ROWS_PER_QUERY, max(application.reference) + ROWS_PER_QUERY, ROWS_PER_QUERY
        ),
    ]
    found = [
        row
        for first, end in itertools.pairwise([0, *ends])
        for row in client.query(
            application.uses,
            filter=f"id >= {first} and id < {end}",
            output_fields=["*"],
            limit=2 * ROWS_PER_QUERY,
            consistency_level="Strong",
        )
    ]
    got = {row["id"]: (row["group"], np.float32(row["vector"]).tobytes()) for row in found}
    wanted = dict(application.reference)
    if not sure:
        wanted, got = ({key: held[key] for key in application.steady} for held in (wanted, got))
    lost, risen = wanted.keys() - got.keys(), got.keys() - wanted.keys()
    stale = [key for key in wanted.keys() & got.keys() if wanted[key] != got[key]]
    assert not lost, f"{len(lost)} rows are lost: {sorted(lost)[:5]}"
    assert not risen, f"{len(risen)} deleted rows are there again: {sorted(risen)[:5]}"
    assert not stale, f"{len(stale)} rows are not as they were last written: {sorted(stale)[:5]}"
