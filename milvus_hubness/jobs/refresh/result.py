"""The result of a refresh, and of its plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from milvus_hubness.basics.notebooks import ShownAsTable
from milvus_hubness.jobs.refresh.copy_plan import CopyPlan
from milvus_hubness.jobs.refresh.evaluation import RefreshEvaluation
from milvus_hubness.jobs.store.records import TuningRecord
from milvus_hubness.quality.measures import as_plain

Action = Literal["none", "pending", "full", "refused"]


@dataclass(frozen=True)
class RefreshResult(ShownAsTable):
    """The result of a refresh."""

    collection: str
    """The collection that has the biases now: the copy, if one was made."""
    action: Action
    """What was done: "none" if nothing was due, "full" if all rows have new biases, in a copy that
    took over the names unless biases are beside the vectors, "refused" if the new biases were judged
    worse, or would restart the time to live of all rows. "pending", and "refused" in the last case,
    only beside the vectors: rows without a bias got one.
    """
    reason: str
    """Why this action was taken."""
    scanned: int
    """The number of rows that were read."""
    written: int
    """The number of rows that were written."""
    epoch: int
    """Counts the refreshes of the profile, from 1."""
    rows: int = 0
    """The number of rows of the collection."""
    pending: int = 0
    """The number of rows without a bias before."""
    bias_age_seconds: float = 0.0
    """The time since the biases were last up to date."""
    seconds: float = 0.0
    """How long the refresh took."""
    judged: RefreshEvaluation | None = None
    """The evaluation of the new biases; None without any, or with too little data."""
    verdict: TuningRecord | None = None
    """The verdict on a given bank, or on a bank in use that had none; None if none was judged."""
    planned: bool = False
    """Whether this is only a plan."""
    copy: CopyPlan | None = None
    """The copy that was made, or would be; None without one."""
    former_copy: str | None = None
    """The collection from which the copy took over; it stays for a rollback."""
    dropped: tuple[str, ...] = ()
    """The former copies that were dropped."""
    unfitted_share: float | None = None
    """The share of the rows that are new or changed since the bank was fitted; None without
    `refit_share`, or before it is counted.
    """
    new_bank_due: str = ""
    """Why a new bank is due: a refit is, but too few queries were sampled for it."""

    @property
    def skipped(self) -> int:
        """Number of rows that were read and left unchanged."""
        return max(0, self.scanned - self.written)

    @property
    def excess_answers(self) -> dict[str, float]:
        """Excess answers taken by hubs, as a share of all answers to the
        queries of the evaluation, by "raw", "old" and "new"; empty without an evaluation.
        """
        return self.judged.excess_answers if self.judged else {}

    @property
    def skewness(self) -> dict[str, float]:
        """The skewness of N_10 over the same queries, by the same names."""
        return self.judged.skewness if self.judged else {}

    @property
    def overlap(self) -> float | None:
        """The mean share of old top tens that are in the new top tens."""
        return self.judged.overlap if self.judged else None

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain data, for people and for --json."""
        verdict = self.verdict.facts if self.verdict else None
        return {**as_plain(self), "verdict": verdict, "skipped": self.skipped}
