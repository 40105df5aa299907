"""python -m tests.chaos: jobs that overlap, and jobs that are killed and run again; a seed repeats each trial.

Without arguments: twelve trials of each kind of overlap, then all kills (about two hours)."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import sys
import time
from collections import Counter
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from typing import Any

from benchmarks.environment import RESULTS, environment, save
from tests.chaos import killed_copies, killed_migrations, killed_refreshes, trial
from tests.chaos.kinds import KINDS
from tests.chaos.migration_clients import run_writers
from tests.chaos.overlaps import PLANS, Outcome, Trial, run_part
from tests.chaos.pauses import run_pauses
from tests.chaos.places import BACKENDS
from tests.chaos.qdrant_overlaps import QDRANT_BACKENDS, QDRANT_KINDS

EVERYTHING = (["overlaps", "--count", "12"], ["kills"])
OVERLAP_BACKENDS = ("lite", "server-2.3.5", *QDRANT_BACKENDS)
TRIALS_PER_SERVER = 40
WORKERS, WRITING_SECONDS = 3, 60
SUITES = {
    "migrations": killed_migrations.COUNT,
    "refreshes": killed_refreshes.COUNT,
    "copies": killed_copies.COUNT,
}
"""What is killed, and how many trials of it each backend has."""


def main() -> None:
    # Banks are random vectors, which no verdict would have corrected; the processes inherit this.
    os.environ.setdefault("MILVUS_HUBNESS_VERDICT", "skip")
    os.environ.setdefault("MILVUS_HUBNESS_CLIENT_TTL", "0")
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    seed = int(os.environ.get("CHAOS_SEED") or random.randrange(10**6))
    parser.add_argument(
        "--seed", type=int, default=seed, help="[default: $CHAOS_SEED, or a random one]"
    )
    commands = parser.add_subparsers(dest="command", required=True)
    _add_overlaps(
        commands.add_parser(
            "overlaps", help="jobs that overlap, calls that are held, paused processes"
        )
    )
    _add_kills(
        commands.add_parser("kills", help="killed jobs, and applications that go on meanwhile")
    )
    given = sys.argv[1:]
    runs = [given] if given else EVERYTHING
    print(f"seed {seed if not given else parser.parse_args(given).seed}", flush=True)
    failed = False
    for arguments in runs:
        chosen = parser.parse_args(arguments)
        failed |= chosen.run(chosen)
    sys.exit(1 if failed else 0)


def _pool(workers: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"))


def _save(name: str, made: dict[str, Any], under: str = "") -> None:
    """Save what was made, beside what else was saved before."""
    path = RESULTS / f"{name}.json"
    before = json.loads(path.read_text()) if path.exists() else {}
    save(name, before | ({under: before.get(under, {}) | made} if under else made))


# -- overlaps ---------------------------------------------------------------------------------------------


def _add_overlaps(parser: argparse.ArgumentParser) -> None:
    groups = sorted({kind.group for kind in KINDS.values()})
    names = [*KINDS, *QDRANT_KINDS, *groups]
    parser.set_defaults(run=_run_overlaps)
    parser.add_argument("--kind", nargs="+", choices=names, default=groups, metavar="KIND")
    parser.add_argument(
        "--count",
        type=int,
        default=20,
        help="trials of each kind given; each has a seed of its own",
    )
    parser.add_argument("--backend", choices=OVERLAP_BACKENDS, default="lite")
    parser.add_argument("--plan", choices=PLANS, default="")
    parser.add_argument(
        "--call",
        default="",
        help='that is held, as a line shows it: "request of Upsert 2 _src"; or "names": each that moves a '
        "name or drops a collection, with each second command, whatever the plan",
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--save", action="store_true", help="in benchmarks/results/chaos.json")


def _run_overlaps(chosen: argparse.Namespace) -> bool:
    """Run the trials; return whether any failed."""
    began = time.monotonic()
    by_kind = {kind: _overlaps_of(kind, chosen) for kind in chosen.kind}
    trials = [trial for each in by_kind.values() for trial in each]
    trials.sort(key=lambda trial: trial.kind)
    parts = [trials[i : i + TRIALS_PER_SERVER] for i in range(0, len(trials), TRIALS_PER_SERVER)]
    if len(parts) < chosen.workers:
        parts = [part for i in range(chosen.workers) if (part := trials[i :: chosen.workers])]
    kinds_of = {kind: {trial.kind for trial in by_kind[kind]} for kind in by_kind}
    outcomes: list[Outcome] = []
    with _pool(chosen.workers) as pool:
        for done in as_completed([pool.submit(run_part, part) for part in parts]):
            outcomes += done.result()
    found = {
        kind: _overlap_summary([each for each in outcomes if each.trial.kind in kinds_of[kind]])
        for kind in by_kind
    }
    for kind, facts in found.items():
        print(f"{kind}: {facts['trials']} trials, {facts['failed']} failed {facts['failures']}")
    if chosen.save:
        facts = {"first_seed": chosen.seed, "environment": environment(began)}
        _save(
            "chaos", {kind: {**facts, **each} for kind, each in found.items()}, under=chosen.backend
        )
    return any(each["failed"] for each in found.values())


def _overlaps_of(kind: str, chosen: argparse.Namespace) -> list[Trial]:
    """kind: one of KINDS, or a group, whose kinds take turns."""
    table = QDRANT_KINDS if chosen.backend in QDRANT_BACKENDS else KINDS
    kinds = [kind] if kind in table and kind not in {each.group for each in table.values()} else []
    kinds = kinds or [name for name, each in table.items() if each.group == kind]
    return [
        Trial(chosen.seed + i, kinds[i % len(kinds)], chosen.backend, chosen.plan, call=chosen.call)
        for i in range(chosen.count if kinds else 0)
    ]


def _overlap_summary(outcomes: list[Outcome]) -> dict[str, object]:
    failed = [each for each in outcomes if each.problem]
    return {
        "trials": len(outcomes),
        "failed": len(failed),
        "failures": [
            {"kind": each.trial.kind, "seed": each.trial.seed, "problem": each.problem}
            for each in failed
        ],
        "reached": sum(each.reached for each in outcomes),
        "plans": dict(Counter(each.plan for each in outcomes)),
        "held": dict(
            Counter(each.held.partition(" of ")[2].split(" ")[0] for each in outcomes if each.held)
        ),
        "exits": dict(Counter(str(sorted(each.exits.items())) for each in outcomes)),
        "skewed": sum(bool(each.skew) for each in outcomes),
        "writes_refused": sum(len(each.refusals) for each in outcomes),
        "seconds": round(sum(each.seconds for each in outcomes), 1),
    }


# -- kills ------------------------------------------------------------------------------------------------


def _add_kills(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_run_kills)
    parser.add_argument("--backend", choices=BACKENDS, help="only this one; nothing is saved")
    parser.add_argument(
        "--of",
        choices=SUITES,
        help="only these; what is saved of the others stays. With --only: migrations",
    )
    parser.add_argument(
        "--only", type=int, nargs="+", default=[], help="only these trials; nothing is saved"
    )


def _run_kills(chosen: argparse.Namespace) -> bool:
    """Run the trials, and applications and pauses beside them; return whether any failed."""
    began = time.monotonic()
    backends = [chosen.backend] if chosen.backend else list(BACKENDS)
    suites = [chosen.of or "migrations"] if chosen.of or chosen.only else list(SUITES)
    with _pool(WORKERS) as pool:
        running: dict[str, list[Future[Any]]] = {suite: [] for suite in suites}
        for suite in suites:
            numbers = chosen.only or list(range(SUITES[suite]))
            parts = [(backend, numbers[i::2]) for backend in backends for i in range(2)]
            running[suite] = [
                pool.submit(trial.run_kills, suite, chosen.seed, *part) for part in parts if part[1]
            ]
        writing, pausing = [], []
        if not chosen.only and "migrations" in suites:
            beside = [(backend, rename) for backend in backends for rename in _moves(backend)]
            writing = [
                pool.submit(run_writers, name, WRITING_SECONDS, rename=rename)
                for name, rename in beside
            ]
        if not chosen.only and "refreshes" in suites:
            shared = [backend for backend in backends if BACKENDS[backend].hosts]
            pausing = [pool.submit(run_pauses, chosen.seed, backend) for backend in shared]
        outcomes = {
            suite: [outcome for each in parts for outcome in each.result()]
            for suite, parts in running.items()
        }
        writers = [each.result() for each in writing]
        pauses = [pair for each in pausing for pair in each.result()]
    found = {suite: trial.summary(outcomes[suite]) for suite in suites}
    print(found)
    if not (chosen.backend or chosen.only):
        facts = {"seed": chosen.seed, "environment": environment(began)}
        beside = {"migrations": {"writers": writers}, "refreshes": {"pauses": pauses}}
        made = {
            suite: {
                **facts,
                **found[suite],
                **beside.get(suite, {}),
                "each": [each.to_dict() for each in outcomes[suite]],
            }
            for suite in suites
        }
        _save("crash", made)
    return any(each["failed"] for each in found.values()) or any(
        each["problem"] for each in writers + pauses
    )


def _moves(backend: str) -> list[bool]:
    """Whether the application keeps its own name, of all that the backend can do beside writers."""
    there = BACKENDS[backend]
    # Milvus Lite opens a collection anew after a rename, once for each of two requests that come at
    # once, and loses what one of them writes: its page has writers stop before.
    keeps_writes = there.renames and not there.is_embedded
    return [False, True] if keeps_writes else [False]


if __name__ == "__main__":
    main()
