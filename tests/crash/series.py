"""Trials one after the other."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol, TypeVar

from tests.crash.places import BACKENDS, be_quiet


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
