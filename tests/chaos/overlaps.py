"""Random trials: jobs overlap, calls are held, delayed, repeated or lost, and the application writes on."""

from __future__ import annotations

import contextlib
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from tests.chaos.jobs import Job
from tests.chaos.kinds import KINDS, Kind, claims, holds
from tests.chaos.processes import be_quiet, problem_of
from tests.chaos.qdrant_overlaps import QDRANT_BACKENDS, QDRANT_KINDS, QdrantScene, qdrant
from tests.chaos.relay import Relay, Rule, base_name
from tests.chaos.scene import Scene, milvus
from tests.chaos.settings import hasten

LEASE_SECONDS = 2.0
PATIENCE, WAITING, TAKEOVER_SECONDS = 60.0, 20.0, 12.0
SKEW = 5.0
PLANS = {
    "take over": 40,  # A call is held, its process stopped, the lease expires, the second job takes over.
    "overtake": 15,  # A call is held, its process goes on, a second job is started.
    "hold": 8,
    "late": 10,  # A call fails and is delivered later, while its job sends it again and goes on, or after it.
    "duplicate": 10,
    "drop": 7,
    "delay": 5,
    "together": 15,
}
ROW_WRITES = {"Insert", "Upsert", "Delete", "UpdateVectors", "SetPayload", "DeletePayload", "Batch"}
OTHER_ROWS = "__bank"
CHANGES = (*sorted(ROW_WRITES), "Alter", "Create", "Drop", "Rename", "Load", "Release", "Flush")
NAME_CHANGES = ("AlterAlias", "RenameCollection", "DropCollection")
NAMES = "names"
"""As the `call` of a trial: each call in turn that moves a name, or renames or drops a collection."""
SHARES = {"rows": 60, "changes": 28, "reads": 12}
"""Of the calls that are drawn: writes of rows of the collections, other changes, and all others."""


@dataclass(frozen=True)
class Trial:
    """One trial is what its seed, its kind and its backend say. plan: one of PLANS, "" to draw it; likewise
    `second`, the place of the second command among those of the kind, `skewed`, and `call`: the call that is
    held, as "request of Upsert 2 _src_hubness", in place of one that is drawn of all that the job makes; or
    NAMES, for as many trials as there are such calls and second commands."""

    seed: int
    kind: str
    backend: str
    plan: str = ""
    second: int | None = None
    skewed: bool | None = None
    call: str = ""


@dataclass
class Outcome:
    """problem: "" where all that must hold does. held: the call. reached: it came."""

    trial: Trial
    problem: str = ""
    plan: str = ""
    second: str = ""
    held: str = ""
    reached: bool = False
    exits: dict[str, int] = field(default_factory=dict)
    said: dict[str, str] = field(default_factory=dict)
    skew: float = 0.0
    refusals: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def line(self) -> str:
        ended = f"FAILED: {self.problem}" if self.problem else "ok"
        there = "" if self.reached else " (never came)"
        skew = f", clocks {self.skew:+.0f} s" if self.skew else ""
        said = (
            f" [{len(self.refusals)} writes refused: {self.refusals[0]}]" if self.refusals else ""
        )
        said += "".join(f" [{name}: {text[:150]}]" for name, text in self.said.items())
        return (
            f"{self.trial.backend} {self.trial.kind} seed {self.trial.seed}: {self.plan} {self.held}{there}, "
            f"then {self.second or 'nothing'}{skew}, exits {self.exits}{said}, {self.seconds:.1f} s: {ended}"
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            **asdict(self.trial),
            **{name: value for name, value in vars(self).items() if name != "trial"},
        }


def kind_of(trial: Trial) -> Kind:
    return (QDRANT_KINDS if trial.backend in QDRANT_BACKENDS else KINDS)[trial.kind]


def scene_of(backend: str, uri: str, folder: Path, rng: random.Random, **options: Any) -> Scene:
    return (QdrantScene if backend in QDRANT_BACKENDS else Scene)(uri, folder, rng, **options)


@cache
def typical_calls(trial: Trial, uri: str, folder: Path) -> tuple[tuple[str, str, int], ...]:
    """(method, collection without the stem, number) of the calls that the first command of a kind makes when
    nothing disturbs it."""
    kind = kind_of(trial)
    with scene_of(trial.backend, uri, folder, random.Random(0)) as scene:
        kind.make(scene)
        relay = scene.relay("A")
        job = scene.start("A", list(kind.first(scene)), relay)
        code = job.wait()
        assert code == 0, f"undisturbed, {trial.kind} exits with {code}: {job.message}"
        counts: Counter[tuple[str, str]] = Counter()
        calls = []
        for call in relay.calls:
            name = base_name(call.collection).replace(scene.stem, "", 1)
            counts[call.method, name] += 1
            calls.append((call.method, name, counts[call.method, name]))
    return tuple(calls)


def _drawn(rng: random.Random, calls: tuple[tuple[str, str, int], ...]) -> tuple[str, str, int]:
    groups: dict[str, list[tuple[str, str, int]]] = {"rows": [], "changes": [], "reads": []}
    for call in calls:
        is_row = call[0] in ROW_WRITES and call[1].startswith("_") and OTHER_ROWS not in call[1]
        group = "rows" if is_row else "changes" if call[0].startswith(CHANGES) else "reads"
        groups[group].append(call)
    shares = {name: SHARES[name] for name, found in groups.items() if found}
    [group] = rng.choices(list(shares), list(shares.values()))
    return rng.choice(groups[group])


def late_changes_of_names(trial: Trial, uri: str, folder: Path) -> list[Trial]:
    """Return a trial for each call of a kind that no alias can fence, with each second command: it arrives
    after that."""
    calls = typical_calls(Trial(0, trial.kind, trial.backend), uri, folder)
    return [
        replace(
            trial,
            plan="take over",
            second=second,
            skewed=False,
            call=f"request of {method} {number} {name or '-'}",
        )
        for method, name, number in calls
        if method.startswith(NAME_CHANGES)
        for second in range(len(kind_of(trial).seconds))
    ]


def run_trial(trial: Trial, uri: str, folder: Path) -> Outcome:
    """What happened."""
    outcome, began = Outcome(trial), time.monotonic()
    try:
        calls = (
            () if trial.call else typical_calls(Trial(0, trial.kind, trial.backend), uri, folder)
        )
        began = time.monotonic()
        rng = random.Random(f"chaos {trial.kind} {trial.seed}")
        # Qdrant's score of L2 is a root, from which no bias in a payload can be subtracted.
        has_roots = trial.backend in QDRANT_BACKENDS and kind_of(trial).place == "beside"
        metric = rng.choice(["IP", "COSINE"] if has_roots else ["IP", "COSINE", "L2"])
        with scene_of(trial.backend, uri, folder, rng, metric=metric) as scene:
            _Run(trial, outcome, scene, rng, calls).run()
    except Exception as error:
        outcome.problem = problem_of(error)
    outcome.seconds = round(time.monotonic() - began, 1)
    return outcome


def run_part(trials: list[Trial]) -> list[Outcome]:
    """Run these trials, all of one backend, on a server of their own; print a line for each."""
    be_quiet()
    hasten()
    outcomes = []
    with (
        tempfile.TemporaryDirectory(prefix="chaos-") as folder,
        _served(trials[0].backend, Path(folder)) as uri,
    ):
        for requested in trials:
            expanded = [requested]
            if requested.call == NAMES:
                expanded = late_changes_of_names(requested, uri, Path(folder))
            for trial in expanded:
                outcomes.append(run_trial(trial, uri, Path(folder)))
                sys.stdout.write(outcomes[-1].line + "\n")
                sys.stdout.flush()
    return outcomes


def _served(backend: str, folder: Path) -> contextlib.AbstractContextManager[str]:
    return qdrant(backend) if backend in QDRANT_BACKENDS else milvus(backend, folder)


class _Run:
    def __init__(
        self,
        trial: Trial,
        outcome: Outcome,
        scene: Scene,
        rng: random.Random,
        calls: tuple[tuple[str, str, int], ...],
    ) -> None:
        self._outcome, self._scene, self._rng, self._calls = outcome, scene, rng, calls
        self._kind: Kind = kind_of(trial)
        plans = [trial.plan] if trial.plan else list(PLANS)
        [self._plan] = rng.choices(plans, [PLANS[plan] for plan in plans])
        number = rng.randrange(len(self._kind.seconds))
        self._second = self._kind.seconds[number if trial.second is None else trial.second]
        drawn = rng.random() < 0.2
        skewed = drawn if trial.skewed is None else trial.skewed
        outcome.plan, outcome.skew = self._plan, rng.choice([-SKEW, SKEW]) if skewed else 0.0
        self._hosts = rng.choice([("", ""), ("first", "second")])
        self._jobs: list[Job] = []

    def run(self) -> None:
        scene, outcome = self._scene, self._outcome
        self._kind.make(scene)
        self._relays = [scene.relay("A"), scene.relay("B")]
        scene.write()
        if self._plan == "together":
            self._together()
        else:
            self._with_rule()
        for job in self._jobs:
            outcome.exits[job.name] = job.wait(PATIENCE)
            if job.code:
                outcome.said[job.name] = job.message
        outcome.refusals = scene.refusals
        scene.compare("after both jobs ended")
        self._judge()
        scene.write()
        self._kind.finish(scene)
        scene.compare("after the last run")
        scene.assert_biases(scene.banks[1])

    # -- the plans ----------------------------------------------------------------------------------------

    def _with_rule(self) -> None:
        scene, rng = self._scene, self._rng
        rule = self._rule(self._relays[0])
        first = self._start("A", self._kind.first(scene))
        while not rule.reached.wait(0.02) and first.is_running:
            pass
        self._outcome.reached = rule.reached.is_set()
        if not self._outcome.reached:
            return
        if self._plan in ("take over", "overtake", "hold"):
            if self._plan == "take over":
                first.stop()
            scene.write()
            if self._plan != "hold":
                self._overtaken(first)
                scene.write()
            if rng.random() < 0.5:
                rule.release()
                first.go_on()
            else:
                first.go_on()
                time.sleep(rng.choice([0.0, 0.3]))
                rule.release()
        else:
            scene.write()
        self._write_while(first)
        first.wait(PATIENCE)
        if self._plan in ("duplicate", "late"):
            scene.write()
            rule.release()

    def _overtaken(self, first: Job) -> None:
        """The second job, to its end; again, as long as it is refused because of a stopped one."""
        stopped = self._plan == "take over"
        if stopped:
            time.sleep(LEASE_SECONDS + 0.3)
        until = time.monotonic() + TAKEOVER_SECONDS
        while True:
            job = self._start("B", self._second(self._scene))
            self._write_while(job, WAITING)
            if not stopped or not job.is_refused or time.monotonic() > until:
                break
            self._scene.write(0.03)
            self._jobs.remove(job)

    def _together(self) -> None:
        scene, rng = self._scene, self._rng
        for relay in self._relays:
            method, name, nth = _drawn(rng, self._calls)
            relay.delay(method, self._named(name), nth, seconds=rng.uniform(0.1, 1.5))
        pair = [("A", self._kind.first(scene)), ("B", self._second(scene))]
        rng.shuffle(pair)
        for name, argv in pair:
            self._start(name, argv)
            time.sleep(rng.choice([0.0, 0.1, 0.4, 0.8]))
        for job in self._jobs:
            self._write_while(job)
        self._outcome.reached = True

    def _start(self, name: str, argv: Any) -> Job:
        is_first = name == "A"
        if not is_first:
            self._outcome.second = " ".join(argv[:2]) if argv[0] == "migrate" else argv[0]
        job = self._scene.start(
            name,
            list(argv),
            self._relays[0 if is_first else 1],
            lease_seconds=LEASE_SECONDS,
            host=self._hosts[0 if is_first else 1],
            skew=self._outcome.skew if is_first else 0.0,
        )
        self._jobs.append(job)
        return job

    def _write_while(self, job: Job, seconds: float = PATIENCE) -> None:
        """The application writes while a job runs, for at most so long."""
        until = time.monotonic() + seconds
        while job.is_running and time.monotonic() < until:
            self._scene.write(0.01)
            time.sleep(0.3)

    def _rule(self, relay: Relay) -> Rule:
        if self._outcome.trial.call:
            edge, _, call = self._outcome.trial.call.split(" ", 2)
            # A read of Qdrant has a blank in its name: "Get points/scroll", and "Get " for all else.
            method, number, name = call.rsplit(" ", 2)
            nth, name = int(number), name.strip("-")
        else:
            method, name, nth = _drawn(self._rng, self._calls)
            edge = self._rng.choice(["request", "request", "response"])
        collection = self._named(name)
        made: dict[str, Any] = {
            "duplicate": lambda: relay.duplicate(method, collection, nth),
            "late": lambda: relay.late(
                method, collection, nth, seconds=self._rng.choice([None, 1.5, 3.0])
            ),
            "drop": lambda: relay.drop(method, collection, nth, edge),
            "delay": lambda: relay.delay(
                method, collection, nth, seconds=self._rng.uniform(0.5, 3.0)
            ),
        }
        self._outcome.held = f"{edge} of {method} {nth} {name or '-'}"
        hold = lambda: relay.hold(method, collection, nth, edge)  # noqa: E731
        rule: Rule = made.get(self._plan, hold)()
        return rule

    def _named(self, name: str) -> str:
        return f"{self._scene.stem}{name}" if name.startswith("_") else name

    # -- what must hold -----------------------------------------------------------------------------------

    def _judge(self) -> None:
        """A job that exited with 0 did what it says, and others say in one line why they did not."""
        for job in self._jobs:
            assert not job.has_traceback, f"{job.name} ended with a traceback: {job.message[-400:]}"
            assert job.code in (0, 1), f"{job.name} exited with {job.code}: {job.message}"
            assert job.code == 0 or job.message, (
                f"{job.name} exited with {job.code} and says nothing"
            )
        done = [job for job in self._jobs if job.code == 0]
        made = [claims(self._scene, job) for job in done]
        assert not made or any(holds(self._scene, claim) for claim in made), (
            f"{' and '.join(job.name for job in done)} exited with 0, but the collection is otherwise: {made}"
        )
        refreshes = [job.result["refresh"] for job in done if "refresh" in job.result]
        epochs = [each["epoch"] for each in refreshes if each["action"] == "full"]
        assert len(set(epochs)) == len(epochs), (
            f"two refreshes say that they made the same epoch: {refreshes}"
        )
        state = self._scene.state() if epochs else None
        if state is not None and len(made) == len(refreshes):
            now = state.profile.epoch
            assert now >= max(epochs), (
                f"a refresh says that it made epoch {max(epochs)}, but it is {now}"
            )
