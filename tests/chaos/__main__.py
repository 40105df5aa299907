"""python -m tests.chaos: random trials of overlapping jobs; each is repeated by its seed."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed

from benchmarks.environment import RESULTS, environment, save
from tests.chaos.kinds import KINDS
from tests.chaos.trials import PLANS, Outcome, Trial, run_part

BACKENDS = ("lite", "server-2.3.5")
TRIALS_PER_SERVER = 40


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    seed = int(os.environ.get("CHAOS_SEED") or random.randrange(10**6))
    groups = sorted({kind.group for kind in KINDS.values()})
    parser.add_argument("--kind", nargs="+", choices=[*KINDS, *groups], default=groups, metavar="KIND")
    parser.add_argument("--count", type=int, default=20, help="trials of each kind given")
    parser.add_argument("--seed", type=int, default=seed, help="of the first trial; the next has one more")
    parser.add_argument("--backend", choices=BACKENDS, default="lite")
    parser.add_argument("--plan", choices=PLANS, default="")
    parser.add_argument("--call", default="", help='that is held, as a line shows it: "request of Upsert 2 _src"')
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--save", action="store_true", help="in benchmarks/results/chaos.json")
    chosen = parser.parse_args()
    sys.stdout.write(f"seed {chosen.seed}\n")
    sys.stdout.flush()
    began = time.monotonic()
    by_kind = {kind: _trials(kind, chosen) for kind in chosen.kind}
    trials = [trial for each in by_kind.values() for trial in each]
    trials.sort(key=lambda trial: trial.kind)
    parts = [trials[i : i + TRIALS_PER_SERVER] for i in range(0, len(trials), TRIALS_PER_SERVER)]
    if len(parts) < chosen.workers:
        parts = [part for i in range(chosen.workers) if (part := trials[i :: chosen.workers])]
    outcomes: list[Outcome] = []
    with ProcessPoolExecutor(chosen.workers, multiprocessing.get_context("spawn")) as pool:
        for done in as_completed([pool.submit(run_part, part) for part in parts]):
            outcomes += done.result()
    found = {kind: _summary([each for each in outcomes if each.trial in by_kind[kind]]) for kind in by_kind}
    for kind, facts in found.items():
        line = f"{kind}: {facts['trials']} trials, {facts['failed']} failed {facts['failures']}"
        sys.stdout.write(line + "\n")
    if chosen.save:
        path = RESULTS / "chaos.json"
        before = json.loads(path.read_text()) if path.exists() else {}
        facts = {"first_seed": chosen.seed, "environment": environment(began)}
        made = {kind: {**facts, **each} for kind, each in found.items()}
        save("chaos", before | {chosen.backend: before.get(chosen.backend, {}) | made})
    sys.exit(1 if any(each["failed"] for each in found.values()) else 0)


def _trials(kind: str, chosen: argparse.Namespace) -> list[Trial]:
    """kind: one of KINDS, or a group, whose kinds take turns."""
    kinds = [kind] if kind in KINDS and kind not in {each.group for each in KINDS.values()} else []
    kinds = kinds or [name for name, each in KINDS.items() if each.group == kind]
    if chosen.backend != "lite":
        kinds = [name for name in kinds if KINDS[name].servers]
    return [
        Trial(chosen.seed + i, kinds[i % len(kinds)], chosen.backend, chosen.plan, call=chosen.call)
        for i in range(chosen.count if kinds else 0)
    ]


def _summary(outcomes: list[Outcome]) -> dict[str, object]:
    failed = [each for each in outcomes if each.problem]
    return {
        "trials": len(outcomes),
        "failed": len(failed),
        "failures": [{"kind": each.trial.kind, "seed": each.trial.seed, "problem": each.problem} for each in failed],
        "reached": sum(each.reached for each in outcomes),
        "plans": dict(Counter(each.plan for each in outcomes)),
        "held": dict(Counter(each.held.partition(" of ")[2].split(" ")[0] for each in outcomes if each.held)),
        "exits": dict(Counter(str(sorted(each.exits.items())) for each in outcomes)),
        "skewed": sum(bool(each.skew) for each in outcomes),
        "writes_refused": sum(len(each.refusals) for each in outcomes),
        "seconds": round(sum(each.seconds for each in outcomes), 1),
    }


if __name__ == "__main__":
    main()
