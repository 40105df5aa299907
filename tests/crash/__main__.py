"""python -m tests.crash: sixty migrations killed, and the application that goes on meanwhile."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import sys
import time
from concurrent.futures import ProcessPoolExecutor

from benchmarks.environment import environment, save
from tests.crash.trials import BACKENDS, KINDS, run_trials, summary
from tests.crash.writers import run_writers

WORKERS, WRITING_SECONDS = 3, 60


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.crash", description=__doc__)
    seed = int(os.environ.get("CRASH_SEED") or random.randrange(10**6))
    parser.add_argument("--seed", type=int, default=seed, help="[default: $CRASH_SEED, or a random one]")
    parser.add_argument("--backend", choices=BACKENDS, help="only this one; nothing is saved")
    parser.add_argument("--only", type=int, nargs="+", default=[], help="only these trials; nothing is saved")
    chosen = parser.parse_args()
    backends = [chosen.backend] if chosen.backend else list(BACKENDS)
    print(f"seed {chosen.seed}", flush=True)
    began = time.monotonic()
    numbers = chosen.only or list(range(len(KINDS)))
    parts = [(backend, numbers[i::2]) for backend in backends for i in range(2)]
    with ProcessPoolExecutor(WORKERS, multiprocessing.get_context("spawn")) as pool:
        running = [pool.submit(run_trials, chosen.seed, *part) for part in parts]
        beside = (
            [] if chosen.only else [(backend, rename) for backend in backends for rename in (False, True)]
        )
        writing = [pool.submit(run_writers, name, WRITING_SECONDS, rename=rename) for name, rename in beside]
        outcomes = [outcome for each in running for outcome in each.result()]
        writers = [each.result() for each in writing]
    found = {"seed": chosen.seed, **summary(outcomes)}
    print(found)
    failed = found["failed"] + sum(bool(each["problem"]) for each in writers)
    if not (chosen.backend or chosen.only):
        details = [each.to_dict() for each in outcomes]
        save("crash", {**found, "each": details, "writers": writers, "environment": environment(began)})
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
