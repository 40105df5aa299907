"""Which trials to mix, and whether the mix is worth applying."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from milvus_hubness.banks import Vectors
from milvus_hubness.estimators import Blend, Estimator
from milvus_hubness.quality.bootstrap import Interval, paired_difference
from milvus_hubness.quality.sweep import Trial
from milvus_hubness.quality.trials import Outcome, assess, unevenness

MEMBERS = 8
UNEVENNESS_WEIGHT = 0.3
FOLDS = 5
PRIOR_GAIN = 0.04
FALL_TO_APPLY = 0.15
FALL_TO_TRY = 0.05
WEAK = 0.6

Verdict = Literal["apply", "apply weakly", "leave it alone"]
Values = npt.NDArray[np.float64]


class Judgement(NamedTuple):
    """The verdict, the strength it is for, why, and the gain in R@1 over the raw search where labels tell."""

    verdict: Verdict
    strength: float
    reason: str
    interval: Interval | None


def pick(uneven: Values, ranks: npt.NDArray[np.int32] | None = None) -> npt.NDArray[np.int64]:
    """The numbers of the `MEMBERS` best trials; all biases but the raw one have a row.

    By mean reciprocal rank less `UNEVENNESS_WEIGHT` · Robin Hood index of N_10, or by the latter alone
    without ranks (n_trials, n_queries). Reciprocal ranks follow R@1 with less noise; evenness, which needs no
    labels, keeps a small set of labels from choosing by chance; and the mean of several good trials is safer,
    and often better, than the best of them.
    """
    score = -UNEVENNESS_WEIGHT * uneven
    if ranks is not None:
        score = score + (1 / ranks).mean(1)
    return np.sort(np.argsort(-score, kind="stable")[:MEMBERS])


def mix(trials: Sequence[Trial]) -> Trial:
    """The mean of the trials as one: their mean strength times a Blend of weights s_e / Σ s."""
    shares: dict[Estimator, float] = {}
    for trial in trials:
        shares[trial.estimator] = shares.get(trial.estimator, 0.0) + trial.strength
    total = sum(shares.values())
    estimator: Estimator = Blend(tuple(shares), tuple(share / total for share in shares.values()))
    if len(shares) == 1:
        [estimator] = shares
    return Trial(estimator, total / len(trials), _mean_bias(trials))


def cross_fitted_hits(
    trials: Sequence[Trial],
    outcome: Outcome,
    queries: Vectors,
    gallery: Vectors,
    positives: Sequence[npt.NDArray[np.int64]],
    *,
    seed: int = 0,
    device: str = "auto",
) -> Values:
    """(n_queries,) 1 where a query finds a positive first under a mix picked without its label, else 0."""
    uneven = unevenness(outcome, len(gallery))
    fold = np.random.default_rng(seed).permutation(len(queries)) % FOLDS
    mixes = [
        _mean_bias([trials[member] for member in pick(uneven, outcome.ranks[:, fold != this])])
        for this in range(FOLDS)
    ]
    hits = assess(queries, gallery, mixes, positives, device=device).hits
    found: Values = hits[fold, np.arange(len(queries))]
    return found


def judge_labelled(
    raw: Values, cross_fitted: Values, strength: float, fall: float, *, seed: int = 0
) -> Judgement:
    """Apply if the gain in R@1 to expect is above 0.

    raw, cross_fitted: (n_queries,) hits. What is expected is the gain measured, weighed against a prior of 4
    points with a standard deviation of 4, up or down as the label-free sign, `fall`, has it.
    """
    interval = paired_difference(raw, cross_fitted, seed=seed)
    n = len(raw)
    variance = (float(np.var(cross_fitted - raw)) + 1 / n) / n
    prior = PRIOR_GAIN if fall > FALL_TO_TRY else -PRIOR_GAIN
    expected = (interval.estimate / variance + prior / PRIOR_GAIN**2) / (1 / variance + 1 / PRIOR_GAIN**2)
    result = (
        f"on {n} labelled queries, each judged by a choice made without it, R@1 changes by "
        f"{100 * interval.estimate:+.1f} points (95% interval {100 * interval.low:+.1f} to "
        f"{100 * interval.high:+.1f})"
    )
    if expected <= 0:
        return Judgement("leave it alone", 0.0, f"{result}: no gain is to be expected", interval)
    if interval.low <= 0:
        result += f"; the interval holds 0, but by what is usual {100 * expected:+.1f} is to be expected"
    return Judgement("apply weakly" if strength < WEAK else "apply", strength, result, interval)


def judge_unlabelled(raw: float, mixed: float, default: float, strength: float) -> Judgement:
    """Apply if answers to queries that the biases have not seen fall more evenly on the items.

    raw, mixed, default: Robin Hood index of N_10 uncorrected, under the mix, under Blend at full strength.
    Both must fall by more than `FALL_TO_TRY`; where the mix falls by no more than `FALL_TO_APPLY`, half the
    strength is applied.
    """
    result = (
        f"on queries held out the share of answers that hubs have too many goes from {100 * raw:.1f}% to "
        f"{100 * mixed:.1f}%, and to {100 * default:.1f}% under the default Blend"
    )
    if relative_fall(raw, mixed, default) <= FALL_TO_TRY:
        return Judgement("leave it alone", 0.0, f"{result}: there is no hubness that a bias takes away", None)
    if relative_fall(raw, mixed) <= FALL_TO_APPLY:
        return Judgement("apply weakly", strength / 2, f"{result}: little, so half the strength", None)
    return Judgement("apply weakly" if strength < WEAK else "apply", strength, result, None)


def relative_fall(raw: float, *corrected: float) -> float:
    """By what share of the raw one unevenness falls under the correction where it falls least."""
    return 1 - max(corrected) / raw if raw > 0 else 0.0


def _mean_bias(trials: Sequence[Trial]) -> Vectors:
    mean: npt.NDArray[np.float64] = np.stack([trial.bias for trial in trials]).mean(0, dtype=np.float64)
    return mean.astype(np.float32)
