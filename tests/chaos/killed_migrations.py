"""Trials: a migration that is killed at a random moment and run again, and what must hold afterwards."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from pymilvus.exceptions import MilvusException

from milvus_hubness import Copy, HubnessError, QueryBank, Recipe, migrate, plan_correction
from milvus_hubness.correction.estimators import NNN
from milvus_hubness.jobs.migration.catch_up import verify
from milvus_hubness.jobs.migration.ledger import Ledger
from milvus_hubness.jobs.store.ownership import LEDGER
from milvus_hubness.milvus.filters import is_one_of
from tests.chaos.moments import Moment
from tests.chaos.places import BACKENDS, Command
from tests.chaos.ports import Database, Place
from tests.chaos.sources import DIM, ROWS, Rows, Shape, assert_same, drawn_change
from tests.chaos.trial import Ended, PlacedRunner
from tests.support.galleries import nnn, vectors

K, ALPHA, QUERIES = 8, 0.75, 64
CONSOLE_LINES = 12
KINDS = ["run"] * 20 + ["rollback"] * 7 + ["plan"] * 3
COUNT = len(KINDS)
"""Trials of each backend."""
REQUESTS = {
    "milvus": {
        "run": {
            "planning": 24, "preparing": 70, "creating": 26, "copying": 120, "catching up": 96,
            "verifying": 170, "verified": 28, "switching": 100, "moving": 11,
        },
        "rollback": {"planning": 31, "rolling back": 300, "moving back": 9},
        "plan": {"planning": 24},
    },
    "qdrant": {
        "run": {
            "planning": 14, "preparing": 53, "creating": 25, "copying": 126, "catching up": 94,
            "verifying": 167, "verified": 34, "switching": 103, "moving": 12,
        },
        "rollback": {"planning": 13, "rolling back": 340, "moving back": 11},
        "plan": {"planning": 15},
    },
}  # fmt: skip
"""About how many requests each stage of a command makes. Whoever asks for a later one gets the next stage."""
SERVER_KILLS = {0, 1, 5, 8, 11, 14, 17, 20, 22, 24}
CONSOLE = {3, 9, 15, 25}

_numbers = itertools.count()


@dataclass(frozen=True)
class Trial:
    """kind: the command that is killed. how: at a request, at a time, or, run as a user would, after a line
    that it printed. victim: the process, the server, or both. app_writes: the application goes on writing
    between the two runs. rows: of the collection."""

    seed: int
    backend: str
    number: int
    kind: str
    how: str
    victim: str
    no_writers: bool
    rename: bool
    app_writes: bool
    method: str
    shape: Shape
    rows: int = ROWS

    @property
    def random(self) -> random.Random:
        return random.Random(f"{self.seed} {self.backend} {self.number}")

    @property
    def course(self) -> tuple[str, bool]:
        """What decides how long the command takes, by and large."""
        return self.kind, self.no_writers

    def __str__(self) -> str:
        how = ["frozen" if self.no_writers else "mirrored", *(["rename"] if self.rename else [])]
        shape = (
            f"{self.shape.key} {self.shape.metric} {self.shape.index} {self.shape.bias_location}"
        )
        return (
            f"{self.backend} {self.number:2} {self.kind} ({' '.join(how)}, {self.method}, {shape})"
        )


def trials(seed: int, backend: str) -> list[Trial]:
    """The thirty of a backend."""
    there = BACKENDS[backend]
    made = []
    for number, kind in enumerate(KINDS):
        rng = random.Random(f"trial {seed} {backend} {number}")
        victim = "process"
        if not there.is_embedded and number in SERVER_KILLS:
            victim = rng.choice(["server", "both"])
        how = (
            "console"
            if number in CONSOLE
            else rng.choice(["request", "request", "request", "time"])
        )
        no_writers = number % 2 == 0
        made.append(
            Trial(
                seed,
                backend,
                number,
                kind,
                "request" if victim != "process" else how,
                victim,
                no_writers,
                rename=rng.random() < 0.3 and there.renames,
                app_writes=not no_writers and kind == "run",
                method=rng.choice(["nnn", "nnn", "blend"]),
                shape=there.shape(rng, there.keys[number // 2 % len(there.keys)]),
            )
        )
    return made


@dataclass
class Outcome(Ended):
    """reached: the migration's phase in the ledger when the killed process was dead."""

    @property
    def came_to(self) -> str:
        return f"ledger {self.reached!r}"


@dataclass
class _Names:
    source: str
    target: str
    alias: str
    application: str
    kept_as: str
    bank: str
    ours: set[str] = field(default_factory=set)


class Runner(PlacedRunner[Outcome]):
    outcome_of = Outcome

    def __init__(self, folder: Path, **server: Any) -> None:
        super().__init__(folder, **server)
        self._seconds: dict[tuple[str, bool], float] = {}
        self.bank = folder / "bank.npy"
        np.save(self.bank, vectors(np.random.default_rng(99), QUERIES, DIM))

    def attempt(self, place: Place, outcome: Outcome) -> None:
        _Attempt(self, place, outcome).run()

    def seconds(self, trial: Trial) -> float:
        """How long the trial's command takes from its first request on, if nothing disturbs it."""
        if trial.course not in self._seconds:
            attempt = _Attempt(self, self.place_of(trial), Outcome(trial))
            self._seconds[trial.course] = attempt.undisturbed()
        return self._seconds[trial.course]


class _Attempt:
    def __init__(self, runner: Runner, place: Place, outcome: Outcome) -> None:
        self._runner, self._place, self._outcome = runner, place, outcome
        self._trial = trial = outcome.trial
        stem = f"crash_{os.getpid()}_{next(_numbers)}"
        application = stem if trial.rename else f"{stem}_live"
        self._names = _Names(
            source=stem,
            target=f"{stem}_copy",
            alias=f"{stem}_live",
            application=application,
            kept_as=f"{stem}__before_hubness" if trial.rename else stem,
            bank=f"{stem}__bank",
        )
        self._source: Rows = {}
        self._wanted: Rows = {}
        self._before: dict[str, Any] = {}
        self._others: set[str] = set()

    # -- the course of a trial --------------------------------------------------------------------------

    def run(self) -> None:
        seconds = self._runner.seconds(self._trial) if self._trial.how == "time" else 0.0
        try:
            self._prepare()
            self._outcome.first_exit = self._killed(seconds)
            with self._place.open() as database:
                self._outcome.reached = self._phase(database)
                if self._trial.app_writes:
                    self._write_as_the_application(database, 9_000_000)
            self._run_again()
            self._check()
        finally:
            self._clean()

    def undisturbed(self) -> float:
        """The seconds from the first request to the end."""
        timing = self._place.folder / "seconds"
        try:
            self._prepare()
            code = self._command.run(timing=timing)
            assert code == 0, (
                f"an undisturbed {self._trial.kind} exited with {code}: {self._told()}"
            )
            return float(timing.read_text())
        finally:
            self._clean()

    def _prepare(self) -> None:
        trial, names = self._trial, self._names
        with self._place.open() as database:
            store = database.store
            self._others = database.collections() | {LEDGER}
            seed = trial.seed * 100 + trial.number
            database.make_source(names.source, trial.shape, seed, count=trial.rows)
            if not trial.rename:
                store.point_alias(names.alias, names.source)
            self._source = database.held(names.source)
            self._wanted = dict(self._source)
            self._before = database.described(names.source)
            if trial.kind == "rollback":
                plan = plan_correction(
                    store,
                    names.source,
                    Recipe(
                        QueryBank.load(str(self._runner.bank)),
                        estimator=NNN(K, ALPHA) if trial.method == "nnn" else None,
                    ),
                    Copy(target=names.target, **self._switch),
                )
                migrate(store, plan, no_writers=True)
                self._write_as_the_application(database, 8_000_000)

    def _killed(self, seconds: float) -> int | None:
        """Run the command and kill it. Its exit code."""
        trial, rng = self._trial, self._trial.random
        if trial.how == "console":
            return self._console(rng)
        moment = self._moment(seconds, rng)
        self._outcome.moment = str(moment)
        return self._command.struck(trial.victim, moment)

    def _moment(self, seconds: float, rng: random.Random) -> Moment:
        if self._trial.how == "time":
            return Moment(None, seconds=rng.uniform(0, seconds))
        requests = REQUESTS[BACKENDS[self._trial.backend].database][self._trial.kind]
        stage = rng.choice(list(requests))
        return Moment(stage, rng.randint(1, requests[stage]), rng.choice(["before", "after"]))

    def _run_again(self) -> None:
        code = self._command.run()
        assert code == 0, f"run again, it exited with {code}: {self._told()}"

    # -- the process --------------------------------------------------------------------------------------

    @property
    def _switch(self) -> dict[str, Any]:
        return {"rename": True} if self._trial.rename else {"alias": self._names.alias}

    @property
    def _argv(self) -> tuple[str, ...]:
        trial, names = self._trial, self._names
        writers = ("--no-writers",) if trial.no_writers else ()
        common = ("--uri", self._place.address, "--json")
        if trial.kind == "rollback":
            return ("migrate", "rollback", names.application, *writers, *common)
        method = (
            ("--param", f"k={K}", "--param", f"alpha={ALPHA}")
            if trial.method == "nnn"
            else ("--method", "blend")
        )
        planned = ("--bank", str(self._runner.bank), "--target", names.target, *method)
        switch = ("--rename",) if trial.rename else ("--alias", names.alias)
        if trial.kind == "plan":
            return ("migrate", "run", "--plan", names.source, *planned, *switch, *common)
        return ("migrate", "run", names.source, *planned, *switch, *writers, *common)

    @property
    def _command(self) -> Command:
        return Command(self._place, self._argv)

    def _told(self) -> str:
        return self._command.told()

    def _console(self, rng: random.Random) -> int:
        """Run the command as it is installed, and kill it a moment after it has printed some lines."""
        lines, seconds = rng.randint(1, CONSOLE_LINES), rng.uniform(0, 0.2)
        self._outcome.moment = f"{seconds:.2f} s after line {lines}"
        command = [str(Path(sys.executable).with_name("milvus-hubness")), *self._argv]
        with self._command.log.open("w") as log:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
            with process:
                for _ in zip(range(lines), process.stdout, strict=False):
                    pass
                time.sleep(seconds)
                process.kill()
        return process.returncode

    # -- what the application does, and what must hold ------------------------------------------------------

    def _write_as_the_application(self, database: Database, new: int) -> None:
        """Insert, update and delete some rows through the name that the application uses."""
        names, trial, store = self._names, self._trial, database.store
        if not store.exists(names.application):
            return  # in the middle of a renaming, when a client of ours waits
        leads_to = store.info(names.application, counted=False).name
        reads_source = leads_to in {names.source, names.kept_as}
        change = drawn_change(self._wanted, trial.shape, trial.random, new)
        database.load(leads_to)
        application = database.application()
        application.upsert(names.application, change.rows, partition_name=change.partition)
        application.delete(names.application, filter=is_one_of("pk", change.gone))
        for reference in (self._wanted, *([self._source] if reads_source else [])):
            change.made(reference)

    def _phase(self, database: Database) -> str:
        known = Ledger(database.store).of_target(self._names.target)
        return known.phase if known else "none"

    def _check(self) -> None:
        with self._place.open() as database:
            if self._trial.kind == "plan":
                self._check_plan(database)
            elif self._trial.kind == "run":
                self._check_switched(database)
            else:
                self._check_rolled_back(database)

    def _check_plan(self, database: Database) -> None:
        names = self._names
        made = database.collections() - self._others
        assert made == {names.source}, f"a plan left {made - {names.source}}"
        assert self._phase(database) == "none", "a plan is in the ledger"
        self._check_source(database, names.source, self._source, converted=False)
        if not self._trial.rename:
            assert self._behind(database) == {names.source}

    def _check_switched(self, database: Database) -> None:
        names, trial, store = self._names, self._trial, database.store
        self._check_collections(database, names.kept_as)
        self._check_source(database, names.kept_as, self._source, converted=False)
        self._check_copy(database)
        assert self._behind(database) == {names.target}, (
            f"the alias leads to {self._behind(database)}"
        )
        known = Ledger(store).of_target(names.target)
        assert known is not None
        assert known.phase == "switched", f"the ledger says {known.phase!r}"
        state = store.info(names.target).state
        assert state is not None
        assert (state.phase, state.source) == ("ready", names.kept_as)
        if self._source == self._wanted:
            verify(store, names.target)
        if trial.method == "nnn":
            self._check_biases(database)

    def _check_rolled_back(self, database: Database) -> None:
        names = self._names
        self._check_collections(database, names.source)
        self._check_source(database, names.source, self._wanted, converted=True)
        there = database.counted(names.source)
        assert there == len(self._wanted), "rows of the source are doubled"
        self._check_copy(database)
        wanted = set() if self._trial.rename else {names.source}
        assert self._behind(database) == wanted, f"the alias leads to {self._behind(database)}"
        assert self._phase(database) == "rolled back", f"the ledger says {self._phase(database)!r}"
        info = database.store.info(names.target)
        assert info.dual_write is None, (
            "clients are still told to write from the copy to the source"
        )
        assert info.state is not None
        assert info.state.source == names.source

    def _check_source(
        self, database: Database, name: str, wanted: Rows, *, converted: bool
    ) -> None:
        sameness = database.sameness(self._trial.shape.metric, converted=converted)
        assert_same(database.held(name), wanted, sameness)
        described = database.described(name)
        assert described == self._before, (
            f"the source was changed from {self._before} to {described}"
        )

    def _check_collections(self, database: Database, source: str) -> None:
        names = self._names
        made = database.collections() - self._others
        assert made == {source, names.target, names.bank}, f"there are {sorted(made)}"
        assert database.counted(names.bank) == QUERIES, "the bank is there twice, or not whole"

    def _check_copy(self, database: Database) -> None:
        names = self._names
        sameness = database.sameness(self._trial.shape.metric, converted=True)
        assert_same(database.shown(names.target), self._wanted, sameness)
        there = database.counted(names.target)
        assert there == len(self._wanted), f"{there} rows for {len(self._wanted)} keys"

    def _check_biases(self, database: Database) -> None:
        found = database.biases(self._names.target)
        got = np.array(list(found.values()))
        items = np.float32([self._wanted[key]["vec"] for key in found])
        wanted = nnn(np.load(self._runner.bank), items, self._trial.shape.metric, K, ALPHA)
        off = (got - wanted) - np.median(got - wanted)
        assert np.abs(off).max() < 1e-4, f"biases are off by up to {np.abs(off).max()}"

    def _behind(self, database: Database) -> set[str]:
        """The collections that the application's name is an alias of."""
        there = database.collections() - self._others
        return {name for name in there if self._names.application in database.aliases(name)}

    def _clean(self) -> None:
        """Of a server that did not come back there is nothing to clean."""
        with contextlib.suppress(MilvusException, HubnessError):
            if self._place.is_served:
                self._drop_collections()
        shutil.rmtree(self._place.folder, ignore_errors=True)

    def _drop_collections(self) -> None:
        names = self._names
        with self._place.open() as database:
            for name in {
                names.source,
                names.target,
                names.kept_as,
                names.bank,
            } & database.collections():
                database.drop(name)
            ledger = Ledger(database.store)
            for migration in ledger.migrations():
                if migration.target == names.target:
                    ledger.forget(migration)
