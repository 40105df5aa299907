"""What trials of refreshes are drawn from."""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from milvus_hubness import CSLS, NNN, Blend, Estimator
from milvus_hubness.correction.near_copies import COSINES
from tests.chaos.corrected import Biases
from tests.chaos.places import BACKENDS
from tests.chaos.sources import DIM, Shape

KINDS = ["full"] * 10 + ["pending"] * 6 + ["rollback"] * 4
"""Of each backend's twenty."""
SERVER_KILLS = {1, 8, 12, 17}
SURE_REQUESTS = 2
"""That every stage makes, if it is come to. Where it is the server that is killed, the moment must come."""
HABITS = ((True, "between"), (True, ""), (False, "between"), (False, "throughout"))
"""Whether the application searches throughout, and when it writes. What a killed server took is uncertain."""
PLACEMENTS = {
    "lite": ["beside"],
    "server-2.3.5": ["beside"],
    "qdrant-local": ["beside"],
}
"""Those whose refreshes make no copy; for the others, see killed_copies."""
BANK_SIZES = (64, 240, 80)
"""Of the banks at first, then, and after that: a fifth of the second is enough to judge by."""
MOST_ALIKE = min(COSINES)
"""Largest cosine of two queries of a bank. So no two count as one, and the biases follow from the file."""
EARLY = {"starting", "taking the lease", "looking", "judging"}
REQUESTS = {
    "milvus": {
        "full": {
            "starting": 12, "taking the lease": 12, "looking": 36, "judging": 40, "announcing": 24,
            "filling": 30, "writing": 84, "flipping": 12, "cleaning up": 12,
        },
        "pending": {"starting": 12, "taking the lease": 12, "looking": 40, "filling": 30, "cleaning up": 16},
    },
    "qdrant": {
        "full": {
            "starting": 7, "taking the lease": 5, "looking": 16, "judging": 37, "announcing": 39,
            "filling": 29, "writing": 55, "flipping": 8, "cleaning up": 14,
        },
        "pending": {"starting": 3, "taking the lease": 5, "looking": 25, "filling": 21, "cleaning up": 12},
    },
}  # fmt: skip
"""About how many requests each stage of a command makes. Whoever asks for a later one gets the next stage."""
for _stages in REQUESTS.values():
    _stages["rollback"] = {
        stage: count for stage, count in _stages["full"].items() if stage not in EARLY
    }
SHORT_TTL, LONG_TTL = 0.3, 2.5
"""Of clients that go on throughout, in seconds."""


@dataclass(frozen=True)
class Trial:
    """kind: what is killed: the biases of new rows, or a full refresh, or one that takes the last one back.
    stage: of the command, in which it is killed. again: how it is run again: the "same", the "plain" one that
    carries on, or a full one to "other" biases. changes: what a full one changes. writes: when the
    application goes on writing: between the two runs, throughout, or never. reads: it searches throughout."""

    seed: int
    backend: str
    number: int
    kind: str
    stage: str
    victim: str
    again: str
    changes: str
    method: str
    bias_location: str
    writes: str
    reads: bool
    shape: Shape

    @property
    def random(self) -> random.Random:
        return random.Random(f"refresh {self.seed} {self.backend} {self.number}")

    @property
    def ttl(self) -> float:
        """The state_ttl of the application, in seconds."""
        if not (self.reads or self.writes == "throughout"):
            return 0.0
        return LONG_TTL if self.again == "other" else SHORT_TTL

    def __str__(self) -> str:
        how = [
            self.again,
            *(["reads"] if self.reads else []),
            *([f"writes {self.writes}"] if self.writes else []),
        ]
        what = f"{self.changes} {self.method} in {self.bias_location}"
        shape = (
            f"{self.shape.key} {self.shape.metric} {self.shape.index} {self.shape.bias_location}"
        )
        return f"{self.backend} {self.number:2} {self.kind} ({' '.join(how)}, {what}, {shape})"


def trials(seed: int, backend: str) -> list[Trial]:
    """The twenty of a backend."""
    there = BACKENDS[backend]
    requests = REQUESTS[there.database]
    stages = {kind: _shuffled(requests[kind], f"{seed} {backend} {kind}") for kind in requests}
    made = []
    for number, kind in enumerate(KINDS):
        rng = random.Random(f"refresh trial {seed} {backend} {number}")
        killed = not there.is_embedded and number in SERVER_KILLS
        again = rng.choice(["plain", "same", *(["other"] if kind == "full" else [])])
        reads, writes = HABITS[number % len(HABITS)]
        if not there.hosts:
            reads, writes = False, writes and "between"
        victim = rng.choice(["server", "both"]) if killed else "process"
        changes = rng.choice(["bank", "parameters", "both"])
        method = rng.choice(["nnn", "nnn", "csls"] if reads else ["nnn", "csls", "blend"])
        bias_location = rng.choice(PLACEMENTS[backend])
        made.append(
            Trial(
                seed,
                backend,
                number,
                kind,
                next(stages[kind]),
                victim,
                again,
                changes,
                method,
                bias_location,
                writes=writes,
                reads=reads,
                shape=there.shape(rng, rng.choice(there.keys), biases=bias_location),
            )
        )
    return made


def _shuffled(stages: Collection[str], seed: str) -> Iterator[str]:
    """Each of them in turn."""
    order = list(stages)
    random.Random(seed).shuffle(order)
    return itertools.cycle(order)


def unlike_queries(rng: np.random.Generator, count: int) -> npt.NDArray[np.float32]:
    """(count, DIM) queries of various lengths, of which no two are near copies."""
    directions = np.zeros((0, DIM))
    while len(directions) < count:
        drawn = rng.standard_normal(DIM)
        drawn /= np.linalg.norm(drawn)
        if (directions @ drawn).max(initial=-1.0) < MOST_ALIKE:
            directions = np.vstack([directions, drawn])
    lengths = rng.uniform(0.5, 2.0, (count, 1))
    return (lengths * directions).astype(np.float32)


def drawn_biases(folder: Path, method: str, changes: str) -> tuple[Biases, Biases, Biases]:
    """Those at first, those after them, and others. folder: for their banks."""
    banks = []
    for number, size in enumerate(BANK_SIZES):
        banks.append(folder / f"bank_{number}.npy")
        np.save(banks[-1], unlike_queries(np.random.default_rng(90 + number), size))
    first, then, third = _estimators(method)
    new_bank = banks[0] if changes == "parameters" else banks[1]
    new_estimator = first if changes == "bank" else then
    return Biases(banks[0], first), Biases(new_bank, new_estimator), Biases(banks[2], third)


def _estimators(method: str) -> tuple[Estimator, Estimator, Estimator]:
    if method == "nnn":
        return NNN(8, 0.75), NNN(3, 1.0), NNN(5, 0.75)
    return (
        (CSLS(8), CSLS(4), NNN(5, 0.75)) if method == "csls" else (Blend(), NNN(8, 0.75), Blend())
    )
