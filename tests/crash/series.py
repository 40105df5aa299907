"""Trials one after the other."""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from tests.crash.places import BACKENDS, be_quiet, said
from tests.crash.ports import Place
from tests.servers import MilvusServer


class _HasLine(Protocol):
    @property
    def line(self) -> str: ...


TrialOf = TypeVar("TrialOf", contravariant=True)
OutcomeOf = TypeVar("OutcomeOf", bound=_HasLine, covariant=True)


class Runs(Protocol[TrialOf, OutcomeOf]):
    """A Runner of either suite."""

    @property
    def is_served(self) -> bool: ...

    def run(self, trial: TrialOf) -> OutcomeOf: ...


@dataclass
class Ended:
    """How a trial ended. seconds: of the whole trial."""

    trial: Any
    moment: str = ""
    reached: str = ""
    first_exit: int | None = None
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
        place = BACKENDS[trial.backend].place.within(self._folder, self._server, self._uri)
        try:
            self.attempt(place, outcome)
        except Exception as error:
            outcome.problem = said(error)
        outcome.seconds = time.monotonic() - began
        return outcome

    @abstractmethod
    def attempt(self, place: Place, outcome: EndedOf) -> None:
        """The trial itself. Raises what does not hold."""


def run_one_by_one(
    backend: str, trials: Iterable[TrialOf], runner_of: Callable[..., Runs[TrialOf, OutcomeOf]]
) -> list[OutcomeOf]:
    """The outcomes; prints a line for each. runner_of: (folder, server=…), asked anew where a server did not
    come back after it was killed."""
    be_quiet()
    outcomes = []
    there = BACKENDS[backend]
    with there.folder("crash-") as folder, contextlib.ExitStack() as stack:
        runner: Runs[TrialOf, OutcomeOf] | None = None
        for trial in trials:
            if runner is None or not runner.is_served:
                runner = runner_of(Path(folder), server=stack.enter_context(there.server()))
            outcomes.append(runner.run(trial))
            print(outcomes[-1].line, flush=True)
    return outcomes
