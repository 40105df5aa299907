"""Whether the verdict of a test on live users is right, and how many rows it takes, on simulated users.

    python -m benchmarks.experiment [--runs N] [--save]

Each row is a search of one of USERS users, some of whom search far more than others. Each user has a probability of
success, by a beta distribution, and an arm. In the treatment, a search that would fail succeeds with an added
probability, so that the true difference is known. Forty reports are made of each run.

- **covered**: runs in which the interval held the true difference at all looks. At least 95% are promised.
- **right**: runs with the right verdict within the limit; where arms are alike, those without a verdict.
- **rows**: after which the verdict came, over the runs with one.

"Rows as units" counts each search as if it were put into an arm by itself, which it is not. The second table has the
share of runs of arms that are alike in which the interval ever left out zero, if looks count only from so many
effective units, and units with a success and a failure, of the smaller arm on."""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from benchmarks.environment import environment, save, table
from milvus_hubness.quality.experiment import TREATMENT, UNPROVEN, compare_arms

Values = npt.NDArray[np.float64]

USERS = 20_000
LOOKS = 40
GUARDS = ((0, 0), (25, 12), (50, 25), (100, 50))
"""Effective units, and units with a success and a failure, of the smaller arm."""


class Case(NamedTuple):
    """Simulated users. success: the mean of their probabilities."""

    success: float = 0.3
    added: float = 0.0
    """Probability with which a failure of the treatment becomes a success."""
    share: float = 0.5
    zipf: float = 0.7
    """How often the user of rank r searches: r to the power −zipf; 0 for all alike."""
    graded: bool = False
    """Whether a success is 1 / rank of a click, else 1."""
    rows_as_units: bool = False
    limit: int = 20_000
    """Rows of a run."""

    @property
    def difference(self) -> float:
        return self.added * (1 - self.success)


ALIKE = {
    "alike": Case(),
    "alike, users search equally often": Case(zipf=0.0),
    "alike, few users search most": Case(zipf=1.2),
    "alike, a tenth is treated": Case(share=0.1),
    "alike, few users search most, a tenth is treated": Case(zipf=1.2, share=0.1),
    "alike, 2% succeed": Case(success=0.02),
    "alike, 98% succeed": Case(success=0.98),
    "alike, few users search most, rows as units": Case(zipf=1.2, rows_as_units=True),
}
CASES = {
    **ALIKE,
    "+0.05": Case(added=0.05 / 0.7, limit=100_000),
    "+0.05, users search equally often": Case(added=0.05 / 0.7, zipf=0.0, limit=100_000),
    "+0.05, a tenth is treated": Case(added=0.05 / 0.7, share=0.1, limit=100_000),
    "+0.02, users search equally often": Case(added=0.02 / 0.7, zipf=0.0, limit=100_000),
    "+0.05, 1 / rank of the click": Case(added=0.05 / 0.7, graded=True, limit=100_000),
}


class Run(NamedTuple):
    """What the looks of one run saw."""

    verdict: str
    rows: int
    """After which the verdict came."""
    is_covered: bool
    has_winner: tuple[bool, ...]
    """By GUARDS: whether the interval left out zero at a look that counts."""


def one_run(case: Case, seed: int) -> Run:
    rng = np.random.default_rng(seed)
    demand = np.arange(1, USERS + 1) ** -case.zipf
    user = rng.choice(USERS, size=case.limit, p=demand / demand.sum())
    treated = (rng.random(USERS) < case.share)[user]

    # Users differ widely: many nearly always fail.
    probability = rng.beta(2 * case.success, 2 * (1 - case.success), size=USERS)
    succeeds = rng.random(case.limit) < probability[user]
    success = (
        succeeds / rng.geometric(0.5, size=case.limit) if case.graded else succeeds.astype(float)
    )
    success = np.where(treated & (rng.random(case.limit) < case.added) & ~succeeds, 1.0, success)

    every = case.limit // LOOKS
    unit = np.arange(case.limit) if case.rows_as_units else user
    truth = case.added * (1 - float(probability.clip(0, 1) @ demand / demand.sum()))
    smaller = min(case.share, 1 - case.share)
    verdict, rows, is_covered = UNPROVEN, case.limit, True
    has_winner = np.zeros(len(GUARDS), np.bool_)
    for count in range(every, case.limit + 1, every):
        look = compare_arms(unit[:count], treated[:count], success[:count], share=case.share)
        if verdict == UNPROVEN and look.verdict != UNPROVEN:
            verdict, rows = look.verdict, count
        if look.difference is None:
            continue
        _, low, high = look.difference
        is_covered &= low <= truth <= high
        if not low <= 0 <= high:
            sums = np.bincount(unit[:count], success[:count])
            sizes = np.bincount(unit[:count])
            rare = min((sums > 0).sum(), (sums < sizes).sum())
            for number, (units, of_each) in enumerate(GUARDS):
                has_winner[number] |= (
                    smaller * look.effective_units >= units and smaller * rare >= of_each
                )
    return Run(verdict, rows, is_covered, tuple(has_winner.tolist()))


def summary_of(case: Case, runs: list[Run]) -> dict[str, Any]:
    right = TREATMENT if case.difference else UNPROVEN
    took = [run.rows for run in runs if run.verdict != UNPROVEN]
    quantiles = np.quantile(took, [0.05, 0.5, 0.95]).tolist() if took else None
    return {
        **case._asdict(),
        "difference": case.difference,
        "runs": len(runs),
        "covered": sum(run.is_covered for run in runs) / len(runs),
        "right": sum(run.verdict == right for run in runs) / len(runs),
        "wrong_winner": sum(run.verdict not in (right, UNPROVEN) for run in runs) / len(runs),
        "rows": quantiles,
        "winners_by_guard": np.mean([run.has_winner for run in runs], axis=0).tolist(),
    }


def markdown_of(rows: dict[str, dict[str, Any]]) -> str:
    verdicts = []
    for name, row in rows.items():
        took = ""
        if row["rows"] is not None:
            low, median, high = row["rows"]
            took = f"{median:,.0f} ({low:,.0f} to {high:,.0f})"
        shares = [f"{row[column]:.1%}" for column in ("covered", "right", "wrong_winner")]
        verdicts.append([name, f"{row['limit']:,}", f"{row['difference']:+.3f}", *shares, took])
    head = ["case", "rows of a run", "true difference", "covered", "right", "wrong winner"]
    runs = next(iter(rows.values()))["runs"]

    guards = [f"{units} units, {rare} of each" for units, rare in GUARDS]
    guarded = [
        [name, *(f"{share:.1%}" for share in rows[name]["winners_by_guard"])]
        for name in ALIKE
        if name in rows
    ]
    return (
        f"{runs} runs a case, each looked at {LOOKS} times.\n\n"
        f"{table([*head, 'rows until a verdict: median (5% to 95%)'], verdicts)}\n\n"
        "Where arms are alike, no verdict is right.\n\n"
        "Share of runs in which the interval ever left out zero, if looks count from so many of the "
        f"smaller arm on:\n\n{table(['case', *guards], guarded)}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=400)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    started = time.monotonic()

    rows = {}
    for name, case in CASES.items():
        rows[name] = summary_of(case, [one_run(case, seed) for seed in range(options.runs)])
        print(name, rows[name], flush=True)
    markdown = markdown_of(rows)
    if options.save:
        results = {"cases": rows, "environment": environment(started)}
        save("experiment", results, markdown)
    print(markdown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
