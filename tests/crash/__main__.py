"""python -m tests.crash: migrations, refreshes and rebuilds killed, and applications that go on meanwhile."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import sys
import time
from concurrent.futures import ProcessPoolExecutor

from benchmarks.environment import RESULTS, environment, save
from tests.crash import draws, rebuilds, refreshes, trials
from tests.crash.places import BACKENDS
from tests.crash.rivals import run_rivals
from tests.crash.writers import run_writers

WORKERS, WRITING_SECONDS = 3, 60
SUITES = {
    "migrations": (trials.run_trials, trials.summary, len(trials.KINDS)),
    "refreshes": (refreshes.run_refreshes, refreshes.summary, len(draws.KINDS)),
    "rebuilds": (rebuilds.run_rebuilds, rebuilds.summary, rebuilds.COUNT),
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.crash", description=__doc__)
    seed = int(os.environ.get("CRASH_SEED") or random.randrange(10**6))
    parser.add_argument("--seed", type=int, default=seed, help="[default: $CRASH_SEED, or a random one]")
    parser.add_argument("--backend", choices=BACKENDS, help="only this one; nothing is saved")
    parser.add_argument(
        "--of", choices=SUITES, help="only these; what is saved of the others stays. With --only: migrations"
    )
    parser.add_argument("--only", type=int, nargs="+", default=[], help="only these trials; nothing is saved")
    chosen = parser.parse_args()
    backends = [chosen.backend] if chosen.backend else list(BACKENDS)
    suites = [chosen.of or "migrations"] if chosen.of or chosen.only else list(SUITES)
    print(f"seed {chosen.seed}", flush=True)
    began = time.monotonic()
    with ProcessPoolExecutor(WORKERS, multiprocessing.get_context("spawn")) as pool:
        running = {}
        for suite in suites:
            run, _, count = SUITES[suite]
            numbers = chosen.only or list(range(count))
            parts = [(backend, numbers[i::2]) for backend in backends for i in range(2)]
            running[suite] = [pool.submit(run, chosen.seed, *part) for part in parts if part[1]]
        writing, rivalling = [], []
        if not chosen.only and "migrations" in suites:
            beside = [(backend, rename) for backend in backends for rename in _moves(backend)]
            writing = [pool.submit(run_writers, name, WRITING_SECONDS, rename=rename) for name, rename in beside]
        if not chosen.only and "refreshes" in suites:
            shared = [backend for backend in backends if BACKENDS[backend].hosts]
            rivalling = [pool.submit(run_rivals, chosen.seed, backend) for backend in shared]
        outcomes = {suite: [outcome for each in parts for outcome in each.result()] for suite, parts in running.items()}
        writers = [each.result() for each in writing]
        rivals = [pair for each in rivalling for pair in each.result()]
    found = {suite: SUITES[suite][1](outcomes[suite]) for suite in suites}
    print(found)
    failed = sum(each["failed"] for each in found.values())
    failed += sum(bool(each["problem"]) for each in writers + rivals)
    if not (chosen.backend or chosen.only):
        beside = {"migrations": {"writers": writers}, "refreshes": {"rivals": rivals}}
        facts = {"seed": chosen.seed, "environment": environment(began)}
        kept = RESULTS / "crash.json"
        before = json.loads(kept.read_text()) if kept.exists() else {}
        made = {
            suite: {
                **facts,
                **found[suite],
                **beside.get(suite, {}),
                "each": [each.to_dict() for each in outcomes[suite]],
            }
            for suite in suites
        }
        save("crash", before | made)
    sys.exit(1 if failed else 0)


def _moves(backend: str) -> list[bool]:
    """Whether the application keeps its own name, of all that the backend can do."""
    return [False, True] if BACKENDS[backend].renames else [False]


if __name__ == "__main__":
    main()
