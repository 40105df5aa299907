"""Two corrected copies of one width and unlike meaning, between which a name moves again and again, and what a client
may answer meanwhile."""

import threading
import time
from dataclasses import replace

import numpy as np

from milvus_hubness import (
    NNN,
    Copy,
    NotCaughtUp,
    QueryBank,
    Recipe,
    migrate,
    plan_correction,
    resume,
    rollback,
)
from milvus_hubness.basics.progress import silent
from milvus_hubness.jobs.migration.ledger import Ledger, Migration
from milvus_hubness.jobs.migration.options import MigrationOptions
from milvus_hubness.jobs.migration.presence import identified
from milvus_hubness.jobs.migration.survey import survey
from tests.support.galleries import nnn, plain_collection, similarity, vectors

DIM, ITEMS, K = 10, 60, 4
WEAK = 0.25
"""w of the second copy: a query for the first one, among its rows, weighs their biases four times too much."""
FIXED = "group < 5"
"""The rows that no writer of a test writes."""
EXACT = 3e-5
"""The largest difference of a score in float32 from the oracle."""


class Switching:
    """The collection `first` behind an alias, and `second`, a copy of it in the ledger.

    `first` searches with w = 1 and biases in its first bias column, `second` with w = 0.25 and biases of another
    bank in columns of its own. Their stored vectors have the same width, so no server refuses a query of the other.
    """

    def __init__(self, backend, fill, client_ttl=0.0, *, rename=False):
        """fill: makes a plain collection with metric IP of items (n, d), and returns its name. rename: the name of
        `first` moves, too.
        """
        rng = np.random.default_rng(23)
        self.backend, self.rng = backend, rng
        self.options = MigrationOptions(client_ttl=client_ttl)
        self.items = dict(enumerate(vectors(rng, ITEMS, DIM)))
        self.queries = vectors(rng, 3, DIM)
        self.banks = {}
        self.store = backend.store()
        self.source = fill(np.array(list(self.items.values())))
        self.alias = f"{self.source}_live"

        self.first = self._corrected("first")
        model = self._corrected("model")
        self.store.point_alias(self.alias, self.first)
        self.second = self._planned(model, rename)

    def _corrected(self, ending):
        bank = vectors(self.rng, 40, DIM)
        target = f"{self.source}_{ending}"
        self.backend.made += [target, f"{target}__bank"]
        plan = plan_correction(
            self.store,
            self.source,
            Recipe(QueryBank(bank), estimator=NNN(K), verdict="skip"),
            Copy(target=target),
        )
        migrate(self.store, plan, no_writers=True)
        self.banks[target] = bank
        return target

    def _planned(self, model, rename):
        """Write the migration of `first` to a copy like `model` to the ledger, and return the copy's name."""
        store = self.store
        ledger = Ledger(store)
        info = store.info(self.first)
        surveyed = survey(store, info, store.chunk_rows(info), progress=silent)
        state = store.info(model).state
        # The biases are in other columns than those of `first`, which are there, too, and hold 0.
        columns = state.layout.slots.count
        layout = replace(state.layout, slots=replace(state.layout.slots, count=2 * columns))
        changed = {"slot": columns, "strength": WEAK}
        profile = state.profile.model_copy(update=changed)
        migration = Migration(
            source=self.first,
            target=f"{self.source}_second",
            field=state.field,
            bank_collection=profile.bank.collection,
            arguments={
                "schema": store.schema_facts(info),
                "rename": rename,
                "profile": state.active,
            },
            phase="copying",
            source_identity=identified(store, store.info(self.first, counted=False)),
            corrected_source=info.state,
            rows=surveyed.rows,
            chunks=len(surveyed.chunks),
        )
        ledger.write_chunks(migration, surveyed.chunks)
        changes = {
            "layout": layout,
            "profiles": {state.active: profile},
            "source": self.first,
            "phase": "copying",
            "migration": migration.id,
        }
        ledger.write(migration, state=state.model_copy(update=changes))
        self.backend.made.append(migration.target)
        self.banks[migration.target] = self.banks[model]
        assert layout.width == info.state.layout.width
        return migration.target

    def forth(self):
        """Let the alias lead to `second`."""
        return resume(self.store, self.second, self.options, alias=self.alias)

    def back(self):
        """Let the alias lead to `first` again."""
        return rollback(self.store, self.alias, options=self.options)

    @property
    def states(self):
        """Those of the two that exist."""
        names = filter(self.store.exists, (self.first, self.second))
        return {name: self.store.info(name).state for name in names}

    def oracle(self, name, state, items):
        """(q, n) float64: the scores of these items in one of the two."""
        biases = nnn(self.banks[name], items, "IP", K, 0.75) - state.profile.mean_bias
        return similarity(self.queries, items, "IP") - state.profile.strength * biases


def on_milvus(backend, client_ttl=0.0, **options):
    """The same on Milvus, with a plain client."""

    def fill(items):
        name = backend.name("switching")
        plain_collection(backend.client(), name, items, "IP")
        return name

    world = Switching(backend, fill, client_ttl, **options)
    world.plain = backend.client()
    return world


def oracles(world, states):
    """The scores of the rows that nobody writes, by collection, (q, n) float64."""
    items = np.array(list(world.items.values()))
    return {name: world.oracle(name, state, items) for name, state in states.items()}


def answered_by(expected, found):
    """The collections whose oracle equals this answer; none if rows of one were scored for the other."""
    return {
        name
        for name, wanted in expected.items()
        if all(
            {hit["id"] for hit in hits} == set(range(len(scores)))
            and max(abs(hit["distance"] - scores[hit["id"]]) for hit in hits) < EXACT
            for hits, scores in zip(found, wanted, strict=True)
        )
    }


PAUSE = 0.1
"""Seconds between the calls of a thread: the machine is to switch, not only to search."""
KEYS = 40
"""Of one writer; nobody else writes them."""


class Threaded(threading.Thread):
    """Repeats `once` until it is told to end, and keeps what was wrong."""

    def __init__(self, world, client):
        super().__init__(daemon=True)
        self.world, self.client = world, client
        self.wrong, self.ended = [], threading.Event()

    def run(self):
        while not self.ended.is_set() and not self.wrong:
            try:
                self.once()
            except Exception as error:
                self.wrong.append(error)
            time.sleep(PAUSE)


class Searcher(Threaded):
    """Searches the rows that nobody writes, and counts whose oracle each answer equals."""

    def __init__(self, world, client, expected):
        super().__init__(world, client)
        self.expected = expected
        self.counts = dict.fromkeys(expected, 0)

    def once(self):
        found = self.client.search(
            self.world.alias,
            list(self.world.queries),
            filter=FIXED,
            limit=ITEMS,
            consistency_level="Strong",
        )
        answering = answered_by(self.expected, found)
        if len(answering) != 1:
            self.wrong.append(f"an answer of {sorted(answering) or 'neither'}: {found}")
            return

        self.counts[answering.pop()] += 1


class Writer(Threaded):
    """Writes rows of its own, and reads each back, also by another client."""

    def __init__(self, world, client, reader, number):
        super().__init__(world, client)
        self.reader = reader
        self.rng = np.random.default_rng(number)
        self.keys = range(10_000 + number * KEYS, 10_000 + (number + 1) * KEYS)
        self.rows, self.count = {}, 0

    def once(self):
        key = int(self.rng.choice(self.keys))
        kind = self.rng.integers(5)
        if kind < 3:
            vector = vectors(self.rng, 1, DIM)[0]
            method = "upsert" if key in self.rows or kind else "insert"
            row = {"id": key, "vector": vector, "group": 7}
            getattr(self.client, method)(self.world.alias, [row])
            self.rows[key] = vector
        else:
            which = {"ids": [key]} if kind == 3 else {"filter": f"id == {key}"}
            self.client.delete(self.world.alias, **which)
            self.rows.pop(key, None)
        self.count += 1

        for client in (self.client, self.reader):
            found = client.query(
                self.world.alias, f"id == {key}", ["vector"], consistency_level="Strong"
            )
            wanted = [self.rows[key]] if key in self.rows else []
            got = [row["vector"] for row in found]
            if len(got) != len(wanted) or not np.allclose(got, wanted, rtol=1e-5):
                self.wrong.append(f"row {key} after write {self.count}: {got} for {wanted}")


def assert_switches_under(world, searchers, writers, switches):
    """Let the alias move so often under these threads: each answer is right, and both copies have answered."""
    threads = [*searchers, *writers]
    for thread in threads:
        thread.start()

    done, late = 0, 0
    try:
        while done < switches and not any(thread.wrong for thread in threads):
            try:
                leads_to = world.store.alias_target(world.alias)
                world.forth() if leads_to == world.first else world.back()
                done += 1
            except NotCaughtUp:
                # Held clients write longer after an announcement than `client_ttl` allows.
                late += 1
    finally:
        for thread in threads:
            thread.ended.set()
        for thread in threads:
            thread.join(60)

    assert [thread.wrong for thread in threads if thread.wrong] == []
    assert done == switches
    assert late < switches / 10
    for searcher in searchers:
        assert min(searcher.counts.values()) > switches / 20, searcher.counts


def assert_read_by(client, world, writers):
    """The rows of all writers are there, as they wrote them last, and no others of theirs."""
    wanted = {key: row for writer in writers for key, row in writer.rows.items()}
    found = client.query(world.alias, "group == 7", ["vector"], consistency_level="Strong")
    got = {row["id"]: row["vector"] for row in found}
    assert sorted(got) == sorted(wanted)
    for key, vector in wanted.items():
        np.testing.assert_allclose(got[key], vector, rtol=1e-5)
