"""A refresh of either kind: what it judges, before it changes anything, and its result."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from milvus_hubness.basics.logs import audit
from milvus_hubness.basics.notebooks import ShownAsTable
from milvus_hubness.basics.texts import describe
from milvus_hubness.correction.banks.stored import StoredBank
from milvus_hubness.correction.estimators import to_dict
from milvus_hubness.correction.fitted import Correction, grouped
from milvus_hubness.correction.guard import FEWEST_ROWS as FEWEST_MEASURED
from milvus_hubness.correction.guard import MOST_MEASURED, Evidence
from milvus_hubness.correction.state import BankReference, CollectionState, Profile
from milvus_hubness.errors import CorrectionNotRecommended, EmptyCollection, InvalidInput
from milvus_hubness.jobs.common.fits import Fit
from milvus_hubness.jobs.common.judging import (
    Judging,
    judged,
    report,
    store_verdict,
    stored_verdict,
)
from milvus_hubness.jobs.common.lease import Lease
from milvus_hubness.jobs.common.lease_records import now
from milvus_hubness.jobs.common.samples import distinct_samples
from milvus_hubness.jobs.common.stored_biases import StoredBiases
from milvus_hubness.jobs.refresh.biases import (
    FEWEST_HELD_OUT,
    FEWEST_ITEMS,
    HELD_OUT,
    RefreshEvaluation,
    Sample,
    evaluate,
    sampled,
)
from milvus_hubness.jobs.refresh.plan import RefreshOptions, RefreshPlan
from milvus_hubness.jobs.store.generations import holds
from milvus_hubness.jobs.store.protocols import Store
from milvus_hubness.jobs.store.records import CollectionInfo, TuningRecord
from milvus_hubness.quality.measures import as_plain
from milvus_hubness.quality.tuning import FEWEST_QUERIES, WEAK

UNEVALUATED = (
    f"it cannot be evaluated: that takes {FEWEST_ITEMS} rows, and {FEWEST_QUERIES} real queries apart "
    f"from the bank or a bank of {round(FEWEST_HELD_OUT / HELD_OUT)}"
)
"""Why a refit that no user has requested is refused."""

FEWEST_ROWS_JUDGED = 1_000
"""Rows from which on a bank in use is judged that never was: fewer may be the first of many."""

Action = Literal["none", "pending", "full", "refused"]


@dataclass(frozen=True)
class CopyPlan:
    """A copy with new biases."""

    target: str
    """Its name."""
    names: tuple[str, ...]
    """The names that move to it."""
    renamed: str | None
    """The new name of its source; None if that keeps its own."""
    rows: int
    """Number of rows."""
    memory_bytes: dict[str, int]
    """The memory that the loaded source and the loaded copy take, as "source" and "target"."""
    seconds: float
    """How long copy and verification take, estimated on a sample of the rows."""
    waiting_seconds: float
    """How long the refresh waits for clients."""
    remarks: tuple[str, ...] = ()
    """What the user should know before the run."""


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


@dataclass(frozen=True)
class Refreshing(ABC):
    """Carries out a refresh plan."""

    store: Store
    lease: Lease
    info: CollectionInfo
    requested: str
    """The name or alias that the caller used."""
    state: CollectionState
    """The state with the profile to refresh as the active one."""
    active: str
    """The profile that searches use."""
    is_new: bool
    """Whether the profile to refresh is new."""
    options: RefreshOptions
    is_planned: bool
    """Whether only the plan is wanted: nothing is written."""
    waiting: int
    """The number of rows without a bias."""

    def run(self, plan: RefreshPlan) -> RefreshResult:
        """Carry the plan out, as far as the collection permits."""
        if not plan.reason:
            return self.with_verdict(self.unchanged(plan), plan)
        if self.expiry and not self.options.restart_ttl:
            return self.result("refused", f"{plan.reason}, but {self.expiry}", scanned=0)
        return self.full(plan)

    @property
    def expiry(self) -> str:
        """Why new biases need leave, since rows that expire would do so later; empty if they would not."""
        return ""

    @abstractmethod
    def unchanged(self, plan: RefreshPlan) -> RefreshResult:
        """Do what is left to do if no new biases are due."""

    @abstractmethod
    def expect_possible(self) -> None:
        """Raise CannotMigrate or InvalidInput if new biases cannot be written."""

    @abstractmethod
    def fitted(self, plan: RefreshPlan, sample: Sample) -> Correction:
        """Return the correction of the new biases, with the layout of the rows to write."""

    @abstractmethod
    def planned(self, plan: RefreshPlan, correction: Correction) -> RefreshResult:
        """Return what `adopt` would do."""

    @abstractmethod
    def adopt(self, plan: RefreshPlan, fresh: Profile, correction: Correction) -> RefreshResult:
        """Let searches use the new biases. fresh: the profile as it will be then."""

    @abstractmethod
    def continued(self, plan: RefreshPlan) -> RefreshResult:
        """Continue what a killed refresh has begun."""

    @property
    def stored(self) -> StoredBiases:
        """The rows with the biases in use."""
        return StoredBiases(self.store, self.info, self.state)

    # -- all rows ----------------------------------------------------------------------------

    def full(self, plan: RefreshPlan) -> RefreshResult:
        """Judge the new biases, and write them to all rows, or continue that."""
        options = self.options
        self.expect_possible()
        if plan.carries_on:
            return self.continued(plan)

        sample = sampled(self.stored, options.judgements, options.progress, plan.prior)
        bank = grouped(self.state.layout, plan.bank.queries, sample.vectors)
        plan = replace(plan, bank=replace(plan.bank, queries=bank))
        verdict = self._verdict(plan, sample) if self._names_other_bank(plan) else None
        if verdict is not None:
            try:
                self._judging.require(verdict, self.info.name, is_last=False)
            except CorrectionNotRecommended as error:
                reason = f"{plan.reason}, but {error.advice} (force goes on all the same)"
                return self.result("refused", reason, verdict=verdict)
            plan = replace(plan, strength=self._strength(plan, verdict))

        evaluation = None if self.is_new else self._evaluation(plan, sample)
        if evaluation and evaluation.objection and not options.force:
            reason = f"{plan.reason}, but {evaluation.objection}"
            return self.result("refused", reason, judged=evaluation, verdict=verdict)

        if plan.needs_evaluation and evaluation is None and not options.force:
            return self.result("refused", f"{plan.reason}, but {UNEVALUATED}", verdict=verdict)

        try:
            correction = self.fitted(plan, sample)
        except InvalidInput:
            if len(sample.vectors):
                raise
            raise EmptyCollection(
                f"{self.info.name!r} has no rows with a valid vector, on which "
                f"{describe(to_dict(plan.estimator))} is fitted: insert items, and repeat the command"
            ) from None
        if self.is_planned:
            return replace(self.planned(plan, correction), judged=evaluation, verdict=verdict)

        self.lease.check()
        self._audit_force(plan, verdict, evaluation)
        store_verdict(self.store, self.info.name, verdict)
        fresh = self._fresh(plan, correction)
        if plan.fits_bank:
            self.fit_of(fresh).write(sample.key_count, sample.fitted)
        result = self.adopt(plan, fresh, correction)
        return replace(result, judged=evaluation, verdict=verdict)

    def _evaluation(self, plan: RefreshPlan, sample: Sample) -> RefreshEvaluation | None:
        """Return the evaluation of the new biases; None with too little data."""
        options = self.options
        queries = self._judging.queries
        labelled = None
        if options.judgements is not None:
            labelled = sample.labelled(options.judgements, self.info.name, options.measure)
        return evaluate(
            self.stored,
            plan,
            sample,
            labelled,
            queries=None if queries is None else queries.vectors,
            progress=options.progress,
        )

    def evidence(self, plan: RefreshPlan) -> Evidence | None:
        """Return the quantiles for the hub guard: the present ones, or new ones if the gallery has
        changed its size by a tenth since.
        """
        profile = self.state.profile
        evidence = profile.evidence
        rows = min(self.info.rows, MOST_MEASURED)
        is_measured = evidence is not None and abs(rows - evidence.rows) <= 0.1 * evidence.rows
        if self.state.on_hub == "off" or is_measured or rows < FEWEST_MEASURED:
            return evidence

        sample = sampled(self.stored, None, self.options.progress)
        correction = Correction.of_profile(self.state, profile, plan.bank)
        kinds = sample.kinds(self.state.kinds)
        measured = correction.measured(sample.vectors, kinds).evidence
        return None if measured is None else measured.after(evidence)

    def _fresh(self, plan: RefreshPlan, correction: Correction) -> Profile:
        """Save the bank, and return the profile as it will be after the refresh."""
        old = self.state.profile
        self.lease.check()
        potentials = plan.bank.queries.of_queries(correction.fitted.potentials)
        bank = replace(plan.bank, potentials=potentials)
        reference = self._saved(bank, old.bank)

        evidence = correction.evidence
        return old.model_copy(
            update={
                "estimator": to_dict(correction.fitted.estimator),
                "mean_bias": correction.mean_bias,
                "prior": correction.prior,
                "kinds": None if correction.kinds is None else correction.kinds.means,
                "bank": reference,
                "epoch": old.epoch + 1,
                "strength": plan.strength,
                "gate": plan.gate,
                "refreshed_at": now(),
                "fitted_at": now() if plan.fits_bank else old.fitted_at,
                "evidence": None if evidence is None else evidence.after(old.evidence),
            }
        )

    # -- the verdict on a bank ---------------------------------------------------------------

    @cached_property
    def _judging(self) -> Judging:
        """How banks are judged: on the caller's queries, or on those that clients have sampled."""
        judging = self.options.judging
        if judging.queries is None and judging.mode != "skip":
            judging = replace(
                judging, queries=distinct_samples(self.store, self.info, self.state.field)
            )
        return judging

    def _names_other_bank(self, plan: RefreshPlan) -> bool:
        """Whether the caller gives a bank that this profile has not had so far."""
        in_use = self.state.profile.bank.queries_fingerprint
        is_other = self.is_new or plan.bank.queries.fingerprint != in_use
        return self.options.recipe.bank is not None and is_other

    def _verdict(self, plan: RefreshPlan, sample: Sample) -> TuningRecord | None:
        """Return the verdict on the bank of the plan; None if it is not judged."""
        field = self.state.field
        bank = plan.bank.queries
        verdict = stored_verdict(self.info, field, bank, self._judging, self.state.kind)
        if verdict is None and self._judging.mode != "skip":
            rule = self.state.kinds
            rows = sample.fit_rows(rule)
            verdict = judged(self.state.layout, rows, field, bank, self._judging, rule)
        return verdict

    def _strength(self, plan: RefreshPlan, verdict: TuningRecord) -> float:
        """Return the strength of searches after a verdict on the bank of the plan."""
        # What tuning chose is in the plan already.
        if verdict.choice is not None:
            return plan.strength
        if verdict.verdict == "apply weakly":
            return min(plan.strength, verdict.strength)

        # A strength that a former bank was given for its weakness does not stay with the next.
        in_use = self.state.profile
        former = self.info.verdicts.of(
            self.state.field, in_use.bank.queries_fingerprint, self.state.kind
        )
        was_weak = former is not None and 0 < former.strength < WEAK
        if was_weak and former is not None and in_use.strength == former.strength:
            return max(plan.strength, verdict.strength)
        return plan.strength

    def _audit_force(
        self,
        plan: RefreshPlan,
        verdict: TuningRecord | None,
        evaluation: RefreshEvaluation | None,
    ) -> None:
        """Log that biases are written against advice, or with `force`, if they are."""
        objections = []
        if verdict is not None and self._judging.is_overruling(verdict):
            objections.append(verdict.reason)
        if evaluation is not None and evaluation.objection and self.options.force:
            objections.append(evaluation.objection)
        if objections or self.options.force:
            audit("forced", self.info.name, why=plan.reason, over=objections)

    def with_verdict(self, result: RefreshResult, plan: RefreshPlan) -> RefreshResult:
        """Return the result of a refresh without new biases, with a verdict on the bank in use if it
        had none: a collection that is created with a bank has no rows to judge it on.
        """
        in_use = self.state.profile.bank.queries_fingerprint
        has_verdict = self.info.verdicts.of(self.state.field, in_use, self.state.kind)
        is_skipped = self.options.judging.mode == "skip" or self.is_planned
        if has_verdict is not None or is_skipped or self.info.rows < FEWEST_ROWS_JUDGED:
            return result

        sample = sampled(self.stored, None, self.options.progress)
        verdict = self._verdict(plan, sample)
        if verdict is not None:
            store_verdict(self.store, self.info.name, verdict)
            # The biases are in use: who reads the result decides about them.
            report(verdict, self.info.name)
        return replace(result, verdict=verdict)

    # -- helpers -----------------------------------------------------------------------------

    def result(
        self,
        action: Action,
        reason: str,
        *,
        scanned: int | None = None,
        written: int = 0,
        **more: Any,
    ) -> RefreshResult:
        """Return a result; `more` holds further fields of it, and others in place of the usual."""
        facts: dict[str, Any] = {
            "collection": self.info.name,
            "action": action,
            "reason": reason,
            "scanned": self.info.rows if scanned is None else scanned,
            "written": written,
            "epoch": self.state.profile.epoch,
            "planned": self.is_planned,
        }
        return RefreshResult(**(facts | more))

    def fit_of(self, profile: Profile) -> Fit:
        """Return the fit of this value of the profile to refresh."""
        return Fit(self.store, self.info, self.state.with_profile(profile))

    def _saved(self, bank: StoredBank, current: BankReference) -> BankReference:
        """Save a bank, and return the reference to it, or the current one, which may name nearest
        items too, if they hold the same rows.
        """
        is_current = holds(current, bank)
        saved, _ = self.store.save_bank(
            current.collection, bank, self.state.metric, in_use=is_current
        )
        return current if is_current else saved

    def drop_replaced(
        self, banks: Iterable[BankReference], state: CollectionState | None = None
    ) -> None:
        """Drop the generations of these banks that no collection state names, nor this one."""
        named = {bank.rows for bank in state.banks} if state is not None else set()
        replaced = {bank.rows: bank for bank in banks if bank.rows not in named}
        self.store.drop_bank_generations(list(replaced.values()))

    def write_state(self, state: CollectionState) -> None:
        """Write the state, with the profile that searches use as the active one."""
        self.lease.check()
        self.store.write_property(self.info.name, state.property_name, self.searchable(state))

    def searchable(self, state: CollectionState) -> CollectionState:
        """Return the state with the profile that searches use as the active one."""
        return state.model_copy(update={"active": self.active})
