"""Trials: a refresh by a copy that takes over the alias, killed at a random moment and run again, and what
must hold afterwards."""

from __future__ import annotations

import itertools
import os
import random
from dataclasses import dataclass

from milvus_hubness.jobs.migration.ledger import Ledger, Migration
from tests.chaos.checks import assert_refreshed
from tests.chaos.corrected import Corrected
from tests.chaos.draws import drawn_biases
from tests.chaos.moments import Moment
from tests.chaos.places import BACKENDS, Command
from tests.chaos.ports import Database, Place
from tests.chaos.sources import Rows, Shape, assert_same
from tests.chaos.trial import Ended, PlacedRunner

COUNT = 16
"""Trials of each backend."""
SERVER_KILLS = {2, 6, 10, 14}
REQUESTS = {
    "milvus": {
        "looking": 35, "judging": 23, "announcing": 73, "copying": 49, "catching up": 50, "verifying": 49,
        "verified": 39, "switching": 60, "moving": 10, "switched": 12,
    },
    "qdrant": {
        "looking": 16, "judging": 25, "announcing": 60, "copying": 46, "catching up": 52, "verifying": 47,
        "verified": 34, "switching": 63, "moving": 12, "switched": 11,
    },
}  # fmt: skip
"""About how many requests each stage makes. Whoever asks for a later one gets the next stage."""

_numbers = itertools.count()


@dataclass(frozen=True)
class Trial:
    """stage: in which it is killed. again: how it is run again: the "same", or the "plain" one that a
    schedule runs. writes: the application goes on writing between the two runs."""

    seed: int
    backend: str
    number: int
    stage: str
    victim: str
    again: str
    writes: bool
    method: str
    shape: Shape

    @property
    def random(self) -> random.Random:
        return random.Random(f"copy {self.seed} {self.backend} {self.number}")

    def __str__(self) -> str:
        how = [self.again, *(["writes"] if self.writes else []), self.method]
        shape = (
            f"{self.shape.key} {self.shape.metric} {self.shape.index} {self.shape.bias_location}"
        )
        return f"{self.backend} {self.number:2} copy ({', '.join(how)}, {shape})"


def trials(seed: int, backend: str) -> list[Trial]:
    """All of a backend: each stage in turn."""
    there = BACKENDS[backend]
    stages = list(REQUESTS[there.database])
    random.Random(f"copies {seed} {backend}").shuffle(stages)
    made = []
    for number in range(COUNT):
        rng = random.Random(f"copy trial {seed} {backend} {number}")
        killed = not there.is_embedded and number in SERVER_KILLS
        made.append(
            Trial(
                seed,
                backend,
                number,
                stage=stages[number % len(stages)],
                victim=rng.choice(["server", "both"]) if killed else "process",
                again=rng.choice(["same", "plain"]),
                writes=rng.random() < 0.7,
                method=rng.choice(["nnn", "csls", "blend"]),
                shape=there.shape(rng, rng.choice(there.keys)),
            )
        )
    return made


@dataclass
class Outcome(Ended):
    """reached: the phase of the copy when the killed process was dead."""

    @property
    def came_to(self) -> str:
        return f"copy {self.reached!r}"


class Runner(PlacedRunner[Outcome]):
    outcome_of = Outcome

    def attempt(self, place: Place, outcome: Outcome) -> None:
        _Attempt(place, outcome).run()


class _Attempt:
    def __init__(self, place: Place, outcome: Outcome) -> None:
        self._place, self._outcome, self._trial = place, outcome, outcome.trial
        trial = self._trial
        stem = f"copied_{os.getpid()}_{next(_numbers)}"
        self._alias = f"{stem}_live"
        self._corrected = Corrected(place, stem, trial.shape, "vector", trial.number)
        self._former = self._corrected.name
        self._old, self._new, _ = drawn_biases(place.folder, trial.method, "bank")

    def run(self) -> None:
        trial, corrected = self._trial, self._corrected
        try:
            with self._place.open() as database:
                corrected.make(database, self._old)
                database.store.point_alias(self._alias, corrected.name)
            self._kill()
            with self._place.open() as database:
                known = self._known(database)
                self._outcome.reached = known.phase if known else "none"
                leads_to = database.store.alias_target(self._alias) or ""
                before = dict(corrected.wanted)
                if trial.writes:
                    corrected.name = self._alias
                    database.load(leads_to)
                    corrected.write(trial.random, database.application())
            code = self._command(trial.again).run()
            assert code == 0, f"run again, it exited with {code}: {self._command('').told()}"
            with self._place.open() as database:
                self._check(database, leads_to, is_new=trial.again == "same" or known is not None)
                self._check_former(
                    database, corrected.wanted if leads_to == self._former else before
                )
        finally:
            corrected.drop()

    def _kill(self) -> None:
        rng, stage = self._trial.random, self._trial.stage
        most = REQUESTS[BACKENDS[self._trial.backend].database][stage]
        number = rng.randint(1, most if self._trial.victim == "process" else 1)
        moment = Moment(stage, number, edge=rng.choice(["before", "after"]))
        self._outcome.moment = str(moment)
        self._outcome.first_exit = self._command("same").struck(self._trial.victim, moment)

    def _command(self, which: str) -> Command:
        options = (*self._new.options, "--force") if which == "same" else ()
        # All former copies stay: what is in them is looked at.
        common = ("--keep-former", "9", "--uri", self._place.address, "--json")
        return Command(self._place, ("refresh", self._alias, *options, *common), follows="copy")

    def _known(self, database: Database) -> Migration | None:
        """The copy that was begun, in the ledger."""
        found = Ledger(database.store).migrations()
        return next(
            (each for each in found if each.source == self._former and each.is_refresh), None
        )

    def _check(self, database: Database, asked: str, *, is_new: bool) -> None:
        """asked: the collection that was run again."""
        corrected, store = self._corrected, database.store
        leads_to = store.alias_target(self._alias)
        if not is_new:
            assert leads_to == self._former, f"nothing was begun, and the alias leads to {leads_to}"
            corrected.name = self._former
            assert_refreshed(database, corrected, self._old)
            return
        corrected.name = leads_to or ""
        corrected.kept |= self._former_copies(database, corrected.name)
        assert_refreshed(database, corrected, self._new, leased=asked)

    def _former_copies(self, database: Database, copy: str) -> set[str]:
        """All copies before this one; a refresh that is forced again after the cutover makes a further one."""
        by_target = {
            each.target: each for each in Ledger(database.store).migrations() if each.is_refresh
        }
        former: set[str] = set()
        while copy != self._former:
            assert copy in by_target, f"the ledger has no refresh to {copy!r}"
            refresh = by_target[copy]
            assert refresh.phase == "switched", f"the ledger says {refresh.phase!r}"
            copy = refresh.source
            former.add(copy)
            assert database.store.info(copy).dual_write is None, "clients still write to both"
        return former

    def _check_former(self, database: Database, wanted: Rows) -> None:
        """wanted: what was written while the alias led there, and not what was written since."""
        sameness = database.sameness(self._trial.shape.metric, converted=True)
        assert_same(database.shown(self._former), wanted, sameness)
        there = database.counted(self._former)
        assert there == len(wanted), f"{there} rows for {len(wanted)} keys in the former copy"
