"""Trials: a refresh that is killed at a random moment and run again, and what must hold afterwards."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass

from milvus_hubness.correction.state import CollectionState
from tests.chaos.checks import assert_refreshed
from tests.chaos.corrected import Biases, Corrected
from tests.chaos.draws import KINDS, REQUESTS, SURE_REQUESTS, drawn_biases, trials
from tests.chaos.moments import Moment
from tests.chaos.places import BACKENDS, Command
from tests.chaos.ports import Database, Place
from tests.chaos.refresh_clients import Reader, Writer
from tests.chaos.trial import Ended, PlacedRunner

__all__ = ["COUNT", "Runner", "trials"]

COUNT = len(KINDS)
"""Trials of each backend."""

_numbers = itertools.count()


@dataclass
class Outcome(Ended):
    """reached: how far the killed process had come."""

    @property
    def came_to(self) -> str:
        return f"{self.reached}, answers {dict(self.answers)}" if self.trial.reads else self.reached


class Runner(PlacedRunner[Outcome]):
    outcome_of = Outcome

    def attempt(self, place: Place, outcome: Outcome) -> None:
        is_shared = outcome.trial.ttl > 0 and not place.is_served
        with place.hosted() if is_shared else contextlib.nullcontext(place) as at:
            _Attempt(at, outcome).run()


class _Attempt:
    def __init__(self, place: Place, outcome: Outcome) -> None:
        self._place, self._outcome, self._trial = place, outcome, outcome.trial
        trial = self._trial
        stem = f"refreshed_{os.getpid()}_{next(_numbers)}"
        self._corrected = Corrected(place, stem, trial.shape, trial.bias_location, trial.number)
        self._old, self._new, self._other = drawn_biases(place.folder, trial.method, trial.changes)
        if trial.kind == "rollback":
            self._old, self._new = self._new, self._old

    def run(self) -> None:
        trial, corrected = self._trial, self._corrected
        try:
            with self._place.open() as database:
                corrected.make(database, self._old, self._new if trial.kind == "rollback" else None)
                if trial.kind == "pending" or trial.writes:
                    corrected.insert_pending(database)
                before = self._state(database)
            with contextlib.ExitStack() as stack:
                reranking = [stack.enter_context(each) for each in self._beside()]
                self._kill()
                with self._place.open() as database:
                    wanted = self._expected(before, self._state(database))
                    if trial.writes == "between":
                        database.load(corrected.name)
                        corrected.write(trial.random, database.application())
                code = self._command(trial.again).run()
                assert code == 0, (
                    f"run again, it exited with {code}: {self._command('same').told()}"
                )
                for each in reranking:
                    if isinstance(each, Reader):
                        each.wait_for(wanted)
            for each in reranking:
                assert not each.problem, each.problem
            with self._place.open() as database:
                assert_refreshed(
                    database,
                    corrected,
                    wanted,
                    wrote_on=trial.writes == "throughout",
                )
        finally:
            corrected.drop()

    def _kill(self) -> None:
        rng, stage = self._trial.random, self._trial.stage
        most = REQUESTS[BACKENDS[self._trial.backend].database][self._trial.kind][stage]
        number = rng.randint(1, most if self._trial.victim == "process" else SURE_REQUESTS)
        moment = Moment(stage, number, edge=rng.choice(["before", "after"]))
        self._outcome.moment = str(moment)
        self._outcome.first_exit = self._command("same").struck(self._trial.victim, moment)

    def _command(self, which: str) -> Command:
        trial = self._trial
        words: tuple[str, ...] = ("refresh",)
        options: tuple[str, ...] = ()
        if which == "other":
            options = (*self._other.options, "--force")
        elif which == "same" and trial.kind == "rollback":
            words = ("migrate", "rollback")
        elif which == "same" and trial.kind == "full":
            options = (*self._new.options, "--force")
        common = ("--uri", self._place.address, "--json")
        argv = (*words, self._corrected.name, *options, *common)
        return Command(self._place, argv, follows="refresh", client_ttl=trial.ttl)

    def _beside(self) -> Iterator[Reader | Writer]:
        """The clients that go on throughout."""
        trial, ttl, sure = self._trial, 0.9 * self._trial.ttl, self._trial.victim == "process"
        if trial.reads:
            reader = Reader(self._corrected, ttl, (self._old, self._new, self._other), sure=sure)
            self._outcome.answers = reader.answers
            yield reader
        if trial.writes == "throughout":
            yield Writer(self._corrected, ttl, trial.random, sure=sure)

    def _state(self, database: Database) -> CollectionState:
        state = database.store.info(self._corrected.name).state
        assert state is not None
        return state

    def _expected(self, before: CollectionState, now: CollectionState) -> Biases:
        """What all biases are to come from once it was run again."""
        # Going back, the number of the former generation is lower.
        flipped, announced = now.profile.epoch != before.profile.epoch, now.filling is not None
        self._outcome.reached = (
            "all done" if flipped else "announced" if announced else "nothing announced"
        )
        trial = self._trial
        if trial.kind == "pending":
            return self._old
        if trial.again == "other":
            return self._other
        if trial.again == "plain":
            return self._new if flipped or announced else self._old
        return self._old if flipped and trial.kind == "rollback" else self._new
