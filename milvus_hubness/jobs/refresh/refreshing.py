"""A refresh of either kind: what it judges, before it changes anything."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from milvus_hubness.basics.texts import describe
from milvus_hubness.correction.estimators import to_dict
from milvus_hubness.correction.fitted import Correction, grouped
from milvus_hubness.correction.state import BankReference, CollectionState, Profile
from milvus_hubness.errors import CorrectionNotRecommended, EmptyCollection, InvalidInput
from milvus_hubness.jobs.common.corrections import keep_nearest, saved_bank
from milvus_hubness.jobs.common.fits import Fit
from milvus_hubness.jobs.common.lease import Lease
from milvus_hubness.jobs.common.lease_records import now
from milvus_hubness.jobs.common.stored_biases import StoredBiases
from milvus_hubness.jobs.refresh.bank_verdict import BankVerdict
from milvus_hubness.jobs.refresh.biases import evaluate
from milvus_hubness.jobs.refresh.evaluation import UNEVALUATED, RefreshEvaluation
from milvus_hubness.jobs.refresh.guard import renewed_evidence
from milvus_hubness.jobs.refresh.options import RefreshOptions
from milvus_hubness.jobs.refresh.plan import RefreshPlan
from milvus_hubness.jobs.refresh.result import Action, RefreshResult
from milvus_hubness.jobs.refresh.sample import Sample, sampled
from milvus_hubness.jobs.store.protocols import Store
from milvus_hubness.jobs.store.records import CollectionInfo


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
            result = self.unchanged(plan)
            if self.is_planned:
                return result
            return replace(result, verdict=self.bank_verdict.of_bank_in_use(plan))
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

    @cached_property
    def bank_verdict(self) -> BankVerdict:
        """Judges the bank."""
        return BankVerdict(self.stored, self.options, self.is_new)

    # -- all rows ----------------------------------------------------------------------------

    def full(self, plan: RefreshPlan) -> RefreshResult:
        """Judge the new biases, and write them to all rows, or continue that."""
        options = self.options
        self.expect_possible()
        if plan.carries_on:
            return self.continued(plan)

        self._expect_width()
        sample = sampled(self.stored, options.judgements, options.progress, plan.prior)
        bank = grouped(self.state.layout, plan.bank.queries, sample.vectors)
        plan = replace(plan, bank=replace(plan.bank, queries=bank))
        verdict = (
            self.bank_verdict.verdict(plan, sample)
            if self.bank_verdict.names_other_bank(plan)
            else None
        )
        if verdict is not None:
            try:
                self.bank_verdict.judging.require(verdict, self.info.name, is_last=False)
            except CorrectionNotRecommended as error:
                reason = f"{plan.reason}, but {error.advice} (force goes on all the same)"
                return self.result("refused", reason, verdict=verdict)
            plan = replace(plan, strength=self.bank_verdict.strength(plan, verdict))

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
        objection = None if evaluation is None else evaluation.objection
        self.bank_verdict.adopted(plan, verdict, objection)
        fresh = self._fresh(plan, correction)
        if plan.fits_bank:
            self.fit_of(fresh).write(sample.key_count, sample.fitted)
        result = self.adopt(plan, fresh, correction)
        return replace(result, judged=evaluation, verdict=verdict)

    def _expect_width(self) -> None:
        """Raise DimensionMismatch unless the caller's queries fit the field, before it is read."""
        judgements = self.options.judgements
        judged = None if judgements is None else judgements.queries
        for queries in filter(None, (judged, self.options.judging.queries)):
            queries.expect_dim(self.state.dim, f"field {self.state.field!r} of {self.info.name!r}")

    def _evaluation(self, plan: RefreshPlan, sample: Sample) -> RefreshEvaluation | None:
        """Return the evaluation of the new biases; None with too little data."""
        options = self.options
        queries = self.bank_verdict.judging.queries
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

    def _fresh(self, plan: RefreshPlan, correction: Correction) -> Profile:
        """Save the bank, and return the profile as it will be after the refresh."""
        old = self.state.profile
        self.lease.check()
        potentials = plan.bank.queries.of_queries(correction.fitted.potentials)
        bank = replace(plan.bank, potentials=potentials)
        reference = saved_bank(self.store, bank, old.bank, self.state.metric)

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

    def drop_replaced(
        self, banks: Iterable[BankReference], state: CollectionState | None = None
    ) -> None:
        """Drop the generations of these banks that no collection state names, nor this one."""
        named = {bank.rows for bank in state.banks} if state is not None else set()
        replaced = {bank.rows: bank for bank in banks if bank.rows not in named}
        self.store.drop_bank_generations(list(replaced.values()))

    def note_unchanged(self, plan: RefreshPlan) -> None:
        """Note that all biases are up to date now."""
        evidence = renewed_evidence(self.stored, plan.bank, self.options.progress)
        renewed = {"refreshed_at": now(), "evidence": evidence}
        state = self.state.with_profile(self.state.profile.model_copy(update=renewed))
        self.write_state(keep_nearest(self.store, self.info.name, state))

    def write_state(self, state: CollectionState) -> None:
        """Write the state, with the profile that searches use as the active one."""
        self.lease.check()
        self.store.write_property(self.info.name, state.property_name, self.searchable(state))

    def searchable(self, state: CollectionState) -> CollectionState:
        """Return the state with the profile that searches use as the active one."""
        return state.model_copy(update={"active": self.active})
