"""The verdict on the bank of a refresh, and what follows from it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from milvus_hubness.basics.logs import audit
from milvus_hubness.jobs.common.judging import (
    Judging,
    judged,
    report,
    store_verdict,
    stored_verdict,
)
from milvus_hubness.jobs.common.samples import distinct_samples
from milvus_hubness.jobs.common.stored_biases import StoredBiases
from milvus_hubness.jobs.refresh.options import RefreshOptions
from milvus_hubness.jobs.refresh.plan import RefreshPlan
from milvus_hubness.jobs.refresh.sample import Sample, sampled
from milvus_hubness.jobs.store.records import TuningRecord
from milvus_hubness.quality.tuning import WEAK

FEWEST_ROWS_JUDGED = 1_000
"""Rows from which on a bank in use is judged that never was: fewer may be the first of many."""


@dataclass(frozen=True)
class BankVerdict:
    """Judges the bank of a refresh."""

    stored: StoredBiases
    """The rows, with the profile to refresh as the active one of their state."""
    options: RefreshOptions
    is_new: bool
    """Whether the profile to refresh is new."""

    @cached_property
    def judging(self) -> Judging:
        """How banks are judged: on the caller's queries, or on those that clients have sampled."""
        judging = self.options.judging
        if judging.queries is None and judging.mode != "skip":
            judging = replace(
                judging,
                queries=distinct_samples(
                    self.stored.store, self.stored.info, self.stored.state.field
                ),
            )
        return judging

    def names_other_bank(self, plan: RefreshPlan) -> bool:
        """Whether the caller gives a bank that this profile has not had so far."""
        in_use = self.stored.state.profile.bank.queries_fingerprint
        is_other = self.is_new or plan.bank.queries.fingerprint != in_use
        return self.options.recipe.bank is not None and is_other

    def verdict(self, plan: RefreshPlan, sample: Sample) -> TuningRecord | None:
        """Return the verdict on the bank of the plan; None if it is not judged."""
        field = self.stored.state.field
        bank = plan.bank.queries
        verdict = stored_verdict(
            self.stored.info, field, bank, self.judging, self.stored.state.kind
        )
        if verdict is None and self.judging.mode != "skip":
            rule = self.stored.state.kinds
            rows = sample.fit_rows(rule)
            verdict = judged(self.stored.state.layout, rows, field, bank, self.judging, rule)
        return verdict

    def of_bank_in_use(self, plan: RefreshPlan) -> TuningRecord | None:
        """Judge the bank in use if it never was, and return the verdict: a collection that is created
        with a bank has no rows to judge it on.
        """
        info = self.stored.info
        state = self.stored.state
        in_use = state.profile.bank.queries_fingerprint
        has_verdict = info.verdicts.of(state.field, in_use, state.kind) is not None
        if has_verdict or self.options.judging.mode == "skip" or info.rows < FEWEST_ROWS_JUDGED:
            return None

        verdict = self.verdict(plan, sampled(self.stored, None, self.options.progress))
        if verdict is not None:
            store_verdict(self.stored.store, info.name, verdict)
            # The biases are in use: who reads the result decides about them.
            report(verdict, info.name)
        return verdict

    def adopted(
        self, plan: RefreshPlan, verdict: TuningRecord | None, objection: str | None
    ) -> None:
        """Store the verdict on a bank whose biases are to be written, and log that they are written
        against advice, or with `force`, if they are.

        objection: of the evaluation of these biases.
        """
        name = self.stored.info.name
        objections = []
        if verdict is not None and self.judging.is_overruling(verdict):
            objections.append(verdict.reason)
        if objection and self.options.force:
            objections.append(objection)
        if objections or self.options.force:
            audit("forced", name, why=plan.reason, over=objections)
        store_verdict(self.stored.store, name, verdict)

    def strength(self, plan: RefreshPlan, verdict: TuningRecord) -> float:
        """Return the strength of searches after a verdict on the bank of the plan."""
        # What tuning chose is in the plan already.
        if verdict.choice is not None:
            return plan.strength
        if verdict.verdict == "apply weakly":
            return min(plan.strength, verdict.strength)

        # A strength that a former bank was given for its weakness does not stay with the next.
        in_use = self.stored.state.profile
        former = self.stored.info.verdicts.of(
            self.stored.state.field, in_use.bank.queries_fingerprint, self.stored.state.kind
        )
        was_weak = former is not None and 0 < former.strength < WEAK
        if was_weak and former is not None and in_use.strength == former.strength:
            return max(plan.strength, verdict.strength)
        return plan.strength
