"""Trials one after the other."""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Generic, TypeVar

from tests.chaos.places import BACKENDS
from tests.chaos.ports import Place
from tests.chaos.processes import be_quiet, problem_of
from tests.support.servers import MilvusServer


@dataclass
class Ended:
    """How a trial ended. answers: of searches meanwhile, by the biases that they were by: those at first, those
    after, and the others. seconds: of the whole trial."""

    trial: Any
    moment: str = ""
    reached: str = ""
    first_exit: int | None = None
    answers: Counter[int] = field(default_factory=Counter)
    problem: str = ""
    seconds: float = 0.0

    @property
    def line(self) -> str:
        ended = f"FAILED: {self.problem}" if self.problem else "ok"
        return (
            f"seed {self.trial.seed} {self.trial}: killed {self.trial.victim} {self.moment}, {self.came_to}, "
            f"{self.seconds:.1f} s: {ended}"
        )

    @property
    def came_to(self) -> str:
        """How far the killed process had come, as a line says it."""
        return self.reached

    def to_dict(self) -> dict[str, Any]:
        facts = vars(self.trial) | {"shape": vars(self.trial.shape)}
        mine = {name: value for name, value in vars(self).items() if name != "trial"}
        return {**facts, **mine, "seconds": round(self.seconds, 1)}


EndedOf = TypeVar("EndedOf", bound=Ended)


class PlacedRunner(ABC, Generic[EndedOf]):
    """Runs the trials of one backend, one after the other, each at a place of its own. folder: for banks,
    logs and Milvus Lite's files. uri: of a server that is not killed, and that others may use."""

    outcome_of: Callable[[Any], EndedOf]

    def __init__(self, folder: Path, *, server: MilvusServer | None = None, uri: str = "") -> None:
        self._folder, self._server, self._uri = folder, server, uri

    @property
    def is_served(self) -> bool:
        """Whether its server, if it has one, came back after it was killed."""
        return self._server is None or self._server.is_running

    def run(self, trial: Any) -> EndedOf:
        """What happened. Its `problem` is empty where all that must hold does."""
        outcome, began = type(self).outcome_of(trial), time.monotonic()
        try:
            self.attempt(self.place_of(trial), outcome)
        except Exception as error:
            outcome.problem = problem_of(error)
        outcome.seconds = time.monotonic() - began
        return outcome

    def place_of(self, trial: Any) -> Place:
        return BACKENDS[trial.backend].place.within(self._folder, self._server, self._uri)

    @abstractmethod
    def attempt(self, place: Place, outcome: EndedOf) -> None:
        """The trial itself. Raises what does not hold."""


def run_kills(suite: str, seed: int, backend: str, numbers: Collection[int]) -> list[Ended]:
    """Run these trials of a backend, one after the other; print a line for each. suite: what is killed, as in
    the name of its module."""
    module = import_module(f"tests.chaos.killed_{suite}")
    be_quiet()
    outcomes: list[Ended] = []
    there = BACKENDS[backend]
    with there.folder("crash-") as folder, contextlib.ExitStack() as stack:
        runner = None
        for trial in module.trials(seed, backend):
            if trial.number not in numbers:
                continue
            if runner is None or not runner.is_served:
                runner = module.Runner(Path(folder), server=stack.enter_context(there.server()))
            outcomes.append(runner.run(trial))
            print(outcomes[-1].line, flush=True)
    return outcomes


def summary(outcomes: Sequence[Ended]) -> dict[str, Any]:
    """How many trials there were, of which kinds, and how they ended."""
    return {
        "trials": len(outcomes),
        "failed": sum(bool(each.problem) for each in outcomes),
        "killed": sum(each.first_exit != 0 for each in outcomes),
        "servers_killed": sum(each.trial.victim != "process" for each in outcomes),
        "reached_at_the_kill": dict(Counter(each.reached for each in outcomes)),
        "answers_meanwhile": sum(each.answers.total() for each in outcomes),
        "seconds": round(sum(each.seconds for each in outcomes), 1),
    }
