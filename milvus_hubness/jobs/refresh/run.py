"""The run of a refresh: fill missing biases, or judge, announce, write and switch to new ones."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np

from milvus_hubness.basics.logs import audit, log
from milvus_hubness.basics.notebooks import ShownAsTable
from milvus_hubness.basics.texts import field_words
from milvus_hubness.basics.waiting import wait_seconds
from milvus_hubness.correction.banks.stored import StoredBank
from milvus_hubness.correction.codec.arrays import Floats
from milvus_hubness.correction.codec.quantisation import is_out_of_scale
from milvus_hubness.correction.estimators import to_dict
from milvus_hubness.correction.fitted import Correction, grouped, measured_kinds
from milvus_hubness.correction.guard import FEWEST_ROWS as FEWEST_MEASURED
from milvus_hubness.correction.guard import MOST_MEASURED, Evidence
from milvus_hubness.correction.kinds import Kinds, kinds_from
from milvus_hubness.correction.state import CollectionState, Former, Incoming, Profile
from milvus_hubness.errors import Cancelled, CorrectionNotRecommended
from milvus_hubness.jobs.common.bias_backends import BiasBackend
from milvus_hubness.jobs.common.corrections import NONE_READ, Banks, keep_nearest, load_correction
from milvus_hubness.jobs.common.fits import Fit, forget_fits
from milvus_hubness.jobs.common.inputs import read_gallery
from milvus_hubness.jobs.common.judging import (
    Judging,
    judged,
    report,
    store_verdict,
    stored_verdict,
)
from milvus_hubness.jobs.common.lease import Lease, lease_on, leasing
from milvus_hubness.jobs.common.lease_records import now
from milvus_hubness.jobs.common.progress import as_events
from milvus_hubness.jobs.common.row_writer import rewriting
from milvus_hubness.jobs.common.samples import distinct_samples
from milvus_hubness.jobs.enable.plan import measure
from milvus_hubness.jobs.migration.clean import drop_copy
from milvus_hubness.jobs.migration.ledger import Ledger, Migration
from milvus_hubness.jobs.migration.plan import MigrationOptions
from milvus_hubness.jobs.refresh.biases import (
    FEWEST_HELD_OUT,
    FEWEST_ITEMS,
    HELD_OUT,
    RefreshEvaluation,
    Renewal,
    Sample,
    evaluate,
    fit,
    sampled,
    steady_kinds,
    steady_mean,
)
from milvus_hubness.jobs.refresh.plan import (
    RefreshOptions,
    RefreshPlan,
    SpareBanks,
    begin,
    carry_out,
    choose_rebuild,
    columns_obstacle,
    half_switched,
    needs_other_columns,
    plan_refresh,
    ready_state,
    rebuildings,
    unfinished,
    with_profile,
)
from milvus_hubness.jobs.refresh.refit import RefitCheck, check_refit
from milvus_hubness.jobs.store.protocols import Store, expect_store
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

Action = Literal["none", "pending", "full", "rebuilt", "refused"]


@dataclass(frozen=True)
class RefreshResult(ShownAsTable):
    """The result of a refresh."""

    collection: str
    """The collection that has the biases now; after "rebuilt", the copy."""
    action: Action
    """What was done: "none" if nothing was due, "pending" if only rows without a bias were written,
    "full" for all rows, "rebuilt" if a copy took over the alias, "refused" if the new biases were
    judged worse and nothing changed, or if they would restart the time to live of all rows and only
    rows without a bias were written.
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
    write_intents: int = 0
    """The number of rows that a killed job had left in the write-intent log."""
    former_copy: str | None = None
    """The collection from which a copy took over the alias; it stays, and can be dropped."""
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


def refresh(
    store: Store, /, collection: str, options: RefreshOptions | None = None, **changes: Any
) -> RefreshResult:
    """Compute missing or outdated biases under one
    lease, and write only the rows whose bias changes.

    A full refresh evaluates the new biases against the old ones and against none, on queries that
    were not fitted and on labelled ones if given. If they are worse, it changes nothing, unless
    `force`. Else it writes the standby slot of every row whose bias there differs by more than the
    tolerance, and then exchanges the slots, so that no search mixes old and new biases. If it is
    killed or stopped before that, the next refresh continues it.

    changes: fields of `RefreshOptions`, in place of those of `options`. Raises NotCorrected,
    UnfinishedMigration, LeaseHeld, LeaseLost, Cancelled, DimensionMismatch, BankTooSmall,
    InvalidParameter, NoSpareColumns, and InvalidInput if a target bank, the bank of a new profile,
    or the biases to return to are missing.
    """
    expect_store(store)
    options = replace(options, **changes) if options else RefreshOptions(**changes)
    field = options.field
    began = time.perf_counter()
    with ExitStack() as stack:
        if options.plan:
            # A plan writes nothing, so its lease is never taken.
            info = store.info(collection, counted=False)
            ready_state(info, field)
            lease = lease_on(store, info)
        else:
            validated = leasing(store, collection, lambda current: ready_state(current, field))
            lease, info = stack.enter_context(validated)

        stop_reason = Cancelled("stopped as requested: the next refresh carries on from here")
        stack.enter_context(options.throttle.stopped_by(options.stop, stop_reason))

        check = check_refit(store if options.plan else lease.store, info, options)
        if check.bank is not None:
            # Queries of the application themselves: the evaluation decides on them.
            options = replace(options, bank=check.bank, verdict="skip")
        result = _refreshed(lease, store, info, collection, options, check.reason)
        result = _with_refit(result, check)

    return replace(result, seconds=round(time.perf_counter() - began, 2))


def _with_refit(result: RefreshResult, check: RefitCheck) -> RefreshResult:
    """Return the result with what was checked before it, and note whether a new bank is due."""
    if check.fit is None:
        return result

    is_done = result.action in ("full", "rebuilt") and not result.planned
    # The note of the former fit is gone then, and with it what was due.
    if is_done and check.fit.is_over(result.collection):
        return replace(result, unfitted_share=0.0)

    if not result.planned:
        check.fit.set_due(check.new_bank_due)
    if check.new_bank_due and not result.planned:
        log.warning("%s: %s", result.collection, check.new_bank_due)
    reason = result.reason
    if check.new_bank_due:
        reason = f"{reason}; {check.new_bank_due}"
    return replace(
        result,
        reason=reason,
        unfitted_share=check.share,
        new_bank_due=check.new_bank_due,
    )


def _refreshed(
    lease: Lease,
    store: Store,
    info: CollectionInfo,
    requested: str,
    options: RefreshOptions,
    refit_reason: str,
) -> RefreshResult:
    """Finish what a killed job left, plan the refresh, and carry it out.

    requested: the name or alias that the caller used.
    """
    whole = ready_state(info, options.field)
    state, is_new = with_profile(whole, _chosen_profile(whole, options), options)
    if not options.plan:
        store = lease.store
    spare_banks = SpareBanks(store, info.name)

    # A strongly consistent read mostly waits, so these reads run in parallel.
    with ThreadPoolExecutor(5, "reading") as executor:
        row_count = executor.submit(store.count, info.name)
        rebuilds = executor.submit(rebuildings, store, info.name)
        noted_banks = executor.submit(spare_banks.noted)
        pending_count = executor.submit(BiasBackend(store, info, state).count_pending)
        stored_bank = executor.submit(store.load_bank, state.profile.bank, checked=False)

        unfinished_rebuild = unfinished(rebuilds.result(), info)
        unfinished_cutover = half_switched(rebuilds.result(), info)
        if unfinished_cutover and not options.plan:
            carry_out(unfinished_cutover, MigrationOptions(), lease)

        # The bank is awaited only where the plan needs it.
        waiting = pending_count.result()
        noted = noted_banks.result()
        plan = plan_refresh(
            store,
            info,
            state,
            is_new,
            stored_bank.result,
            options,
            unfinished_rebuild,
            refit_reason,
        )

    # The state of an unfinished rebuild may name a noted bank, and no collection has it yet.
    if noted and not options.plan and not unfinished_rebuild:
        lease.check()
        spare_banks.drop(noted)

    job = Refreshing(
        store=store,
        lease=lease,
        info=replace(info, rows=row_count.result()),
        requested=requested,
        state=state,
        active=whole.active,
        is_new=is_new,
        options=options,
        waiting=waiting,
    )
    result = job.run(plan, stored_bank.result)

    bias_age_seconds = 0.0
    if result.action == "refused":
        age = now() - state.profile.refreshed_at
        bias_age_seconds = round(age.total_seconds(), 1)

    return replace(
        result,
        rows=job.info.rows,
        pending=waiting,
        bias_age_seconds=bias_age_seconds,
        write_intents=store.count_notes(info.intent_log) if info.intent_log else 0,
    )


def _chosen_profile(state: CollectionState, options: RefreshOptions) -> str:
    """Return the profile to refresh: the named one,
    one whose refresh is unfinished, or the active one.
    """
    if options.profile is not None:
        return options.profile
    names_other_biases = options.names_biases or options.revert
    if state.incoming is not None and not names_other_biases:
        return state.incoming.name
    return state.active


@dataclass(frozen=True)
class Refreshing:
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
    waiting: int
    """The number of rows without a bias."""

    def run(self, plan: RefreshPlan, load_bank: Callable[[], StoredBank]) -> RefreshResult:
        """Carry the plan out, as far as the collection permits.

        load_bank: reads the bank in use.
        """
        if not plan.reason:
            return self.with_verdict(self.pending(plan), plan)
        if self.restarts_ttl:
            return self.without_restart(plan, load_bank)
        if obstacle := self.column_obstacle(plan):
            return self.with_former_biases(plan, load_bank, obstacle)
        return self.full(plan)

    # -- rows without a bias --------------------------------------------------------------------

    def pending(self, plan: RefreshPlan) -> RefreshResult:
        """Give the present biases to rows without one; that makes all biases up to date."""
        count = self.waiting
        if not self.options.plan:
            count = self._fill(plan)
            renewed = {"refreshed_at": now(), "evidence": self._evidence(plan)}
            fresh = self.state.profile.model_copy(update=renewed)
            state = self._without_outgoing(self.state).with_profile(fresh)
            self._write_state(keep_nearest(self.store, self.info.name, state))

        action: Action = "pending" if count else "none"
        return self._result(
            action, "bank and parameters are unchanged", scanned=count, written=count
        )

    def _evidence(self, plan: RefreshPlan) -> Evidence | None:
        """Return the quantiles for the hub guard: the present ones, or new ones if the gallery has
        changed its size by a tenth since.
        """
        profile = self.state.profile
        evidence = profile.evidence
        rows = min(self.info.rows, MOST_MEASURED)
        is_measured = evidence is not None and abs(rows - evidence.rows) <= 0.1 * evidence.rows
        if self.state.on_hub == "off" or is_measured or rows < FEWEST_MEASURED:
            return evidence

        sample = sampled(self.store, self.info, self.state, None, self.options.progress)
        correction = Correction.of_profile(self.state, profile, plan.bank)
        kinds = sample.kinds(self.state.kinds)
        return correction.measured(sample.vectors, kinds).evidence

    def _fill(self, plan: RefreshPlan) -> int:
        """Write the biases of the plan's bank to rows without one; return how many were."""
        backend = BiasBackend(self.store, self.info, self.state)
        # After a killed refresh, the repair may restore rows without a bias.
        was_killed = self.info.intent_log is not None
        count = 0
        # Each step mostly waits for the database.
        with ThreadPoolExecutor(2, "refresh") as executor:
            steps: list[Future[None]] = []
            if self.state.incoming is None:
                steps.append(executor.submit(Renewal.forget, self.store, self.info.name))
            if self.waiting or was_killed:
                with self._renewing({self.state.profile.bank: plan.bank}) as renewal:
                    count = renewal.fill_pending(self.waiting)
                    # This can run while the write-intent log is being closed.
                    steps.append(executor.submit(backend.wait_visible))
            else:
                backend.wait_visible()

            for step in steps:
                step.result()
        return count

    # -- rows that expire --------------------------------------------------------------------

    @property
    def restarts_ttl(self) -> bool:
        """Whether new biases would restart the time to
        live of unchanged rows, and this is not allowed.
        """
        expires = self.info.time_to_live and self.state.codec.writes_rows
        return bool(expires) and not self.options.restart_ttl

    def without_restart(
        self, plan: RefreshPlan, load_bank: Callable[[], StoredBank]
    ) -> RefreshResult:
        """Fill rows without a bias, which are new, and leave the others as they are."""
        reason = (
            f"{plan.reason}, but rows of {self.info.name!r} expire {self.info.time_to_live:,} s "
            "after their last write, and a refresh writes unchanged rows again, so that they "
            "expire later: allow that with --restart-ttl (restart_ttl), or keep the biases beside "
            "the rows (enable)"
        )
        return self.with_former_biases(plan, load_bank, reason)

    def with_former_biases(
        self, plan: RefreshPlan, load_bank: Callable[[], StoredBank], reason: str
    ) -> RefreshResult:
        """Refuse the new biases for this reason, but fill
        rows that have none yet with the present ones.
        """
        # A new profile has no biases yet that a row could get.
        count = 0 if self.is_new else self.waiting
        if not (self.is_new or self.options.plan):
            count = self._fill(replace(plan, bank=load_bank()))
        return self._result("refused", reason, scanned=count, written=count)

    # -- a quantiser that needs other columns ------------------------------------------------

    @cached_property
    def needs_other_columns(self) -> bool:
        """Whether only a copy has the columns in which the field's quantiser keeps biases."""
        return not self.is_new and needs_other_columns(self.store, self.info, self.state)

    def _other_columns(self, vectors: Floats, biases: Floats, strength: float) -> str:
        """Return which columns the field's quantiser needs for these biases (n,) of valid vectors
        (n, d); empty if the present ones suit.
        """
        if self.is_new or self.state.codec.needs_candidates:
            return ""
        if self.needs_other_columns:
            return "the quantizer needs more columns, which"
        if is_out_of_scale(self.state.layout, vectors, biases, strength):
            return "the quantizer needs another scale of biases, which"
        return ""

    def column_obstacle(self, plan: RefreshPlan) -> str:
        """Return why biases cannot be written as the field's quantiser needs them; empty if they
        can, or must be.
        """
        if plan.carries_on or self.options.force or not self.needs_other_columns:
            return ""

        obstacle = columns_obstacle(self.info, self.requested, self.state)
        if not obstacle:
            return ""

        spread = self.store.bias_spread(self.info, self.state.field)
        remedy = f"give {self.info.name!r} one alias and refresh by it"
        return (
            f"{plan.reason}, but the quantizer of {field_words(self.state.field)} needs each bias in "
            f"{spread} columns, where its vectors have {self.state.layout.spread}, and no copy "
            f"with more can take over: {obstacle}. So {remedy}, turn the quantization off, or "
            "write the biases as they are (--force), of which it loses a part"
        )

    # -- all rows ----------------------------------------------------------------------------

    def full(self, plan: RefreshPlan) -> RefreshResult:
        """Judge the new biases, and write them to all rows or to a copy, or continue that."""
        if plan.carries_on:
            return self._continued(plan)

        options = self.options

        sample = sampled(
            self.store, self.info, self.state, options.judgements, options.progress, plan.prior
        )
        # A bank that is stored already keeps the groups that its biases were fitted with.
        if plan.reference is None:
            bank = grouped(self.state.layout, plan.bank.queries, sample.vectors)
            plan = replace(plan, bank=replace(plan.bank, queries=bank))
        verdict = self._verdict(plan, sample) if self._names_other_bank(plan) else None
        if verdict is not None:
            try:
                self._judging.require(verdict, self.info.name, is_last=False)
            except CorrectionNotRecommended as error:
                reason = f"{plan.reason}, but {error.advice} (force goes on all the same)"
                return self._result("refused", reason, verdict=verdict)
            plan = replace(plan, strength=self._strength(plan, verdict))

        evaluation: RefreshEvaluation | None = None
        if not self.is_new:
            queries = self._judging.queries
            labelled = None
            if options.judgements is not None:
                labelled = sample.labelled(options.judgements, self.info.name, options.measure)
            evaluation = evaluate(
                self.store,
                self.state,
                plan,
                sample,
                labelled,
                queries=None if queries is None else queries.vectors,
            )
        # Who takes a refresh back has decided already.
        is_decided = options.force or options.revert
        if evaluation and evaluation.objection and not is_decided:
            return self._result(
                "refused",
                f"{plan.reason}, but {evaluation.objection}",
                judged=evaluation,
                verdict=verdict,
            )

        if plan.needs_evaluation and evaluation is None and not is_decided:
            return self._result("refused", f"{plan.reason}, but {UNEVALUATED}", verdict=verdict)

        kinds = self._kinds(plan, sample)
        correction = fit(self.store, self.info, self.state, plan, options, kinds)
        numbers = sample.kinds(self.state.kinds)
        biases = correction.centred(sample.vectors, kinds=numbers)
        mean_bias = plan.mean_bias
        prior = plan.prior
        if plan.reference is None:
            mean_bias = steady_mean(self.state.profile.mean_bias, biases)
            if prior is not None:
                prior = prior.with_factor(correction.spread(sample.vectors, numbers))
        correction = replace(correction, mean_bias=mean_bias, prior=prior, clicks=plan.bank.clicks)
        correction = correction.measured(sample.vectors, numbers)

        rebuilds, why = self._chosen_rebuild(plan, sample, correction, biases)
        reason = f"{plan.reason}; {why}" if why else plan.reason
        if options.plan:
            action: Action = "rebuilt" if rebuilds else "full"
            return self._result(
                action, reason, written=self.info.rows, judged=evaluation, verdict=verdict
            )

        self.lease.check()
        self._audit_force(plan, verdict, evaluation)
        if verdict is not None:
            store_verdict(self.store, self.info.name, verdict)
        fresh = self._fresh(plan, correction)
        if plan.fits_bank:
            self._fit(fresh).write(sample.key_count, sample.fitted)
        self._drop_former_rebuild()
        if rebuilds:
            migration = self._begun_rebuild(fresh)
            result = self._rebuilt(plan, migration)
        else:
            announced = self._announced(fresh)
            result = announced._write(plan)

        return replace(result, reason=reason, judged=evaluation, verdict=verdict)

    def _kinds(self, plan: RefreshPlan, sample: Sample) -> Kinds | None:
        """Return the means of kinds of the new biases; None without kinds."""
        rule = self.state.kinds
        if rule is None or plan.kinds is None:
            return None
        present = kinds_from(rule, plan.kinds, self.state.dim)
        if plan.reference is not None:
            return present
        layout = self.state.layout
        numbers = sample.kinds(rule)
        new = measured_kinds(layout, rule, sample.vectors, numbers, plan.bank.queries)
        # Those of a new profile are still those of another bank.
        return new if self.is_new else steady_kinds(present, new)

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
        return self.options.bank is not None and is_other

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
        is_skipped = self.options.verdict == "skip" or self.options.plan
        if has_verdict is not None or is_skipped or self.info.rows < FEWEST_ROWS_JUDGED:
            return result

        sample = sampled(self.store, self.info, self.state, None, self.options.progress)
        verdict = self._verdict(plan, sample)
        if verdict is not None:
            store_verdict(self.store, self.info.name, verdict)
            # The biases are in use: who reads the result decides about them.
            report(verdict, self.info.name)
        return replace(result, verdict=verdict)

    def _chosen_rebuild(
        self, plan: RefreshPlan, sample: Sample, correction: Correction, biases: Floats
    ) -> tuple[bool, str]:
        """Return whether to write the new numbers by a copy, and why.

        biases: (n,) of the sample, before they are centred, without the prior.
        """
        if self.is_new:
            return False, ""

        centred = biases - np.float32(correction.mean_bias)
        everything = np.ones(len(centred), np.bool_)
        biases = correction.with_prior(centred, everything, sample.items)

        if columns := self._other_columns(sample.vectors, biases, plan.strength):
            obstacle = columns_obstacle(self.info, self.requested, self.state)
            remedy = obstacle or f"it takes over the alias {self.info.aliases[0]!r}"
            return not obstacle, f"{columns} only a copy has: {remedy}"

        standby = sample.biases[:, self.state.profile.standby]
        moves = np.abs(biases - standby)
        changed = moves > self.options.tolerance
        share = float(changed.mean()) if len(changed) else 0.0
        return choose_rebuild(self.info, self.requested, self.state, share, self.options)

    def _drop_former_rebuild(self) -> None:
        """Drop the copy of an unfinished rebuild, whose biases are not wanted any more."""
        left = unfinished(rebuildings(self.store, self.info.name), self.info)
        if left:
            self.lease.include(left.target)
            drop_copy(self.lease, Ledger(self.store), left)

    def _begun_rebuild(self, fresh: Profile) -> Migration:
        """Record a rebuild with this profile in the ledger, and return it."""
        state = self._searchable(self.state.with_profile(fresh))
        state = state.model_copy(update={"incoming": None, "outgoing": None})
        return begin(self.store, self.info, state, progress=self.options.progress)

    def _continued(self, plan: RefreshPlan) -> RefreshResult:
        if self.options.plan:
            action: Action = "rebuilt" if plan.rebuilding else "full"
            return self._result(action, plan.reason, written=self.info.rows)
        self.lease.check()
        return self._rebuilt(plan, plan.rebuilding) if plan.rebuilding else self._write(plan)

    def _result(
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
            "planned": self.options.plan,
        }
        return RefreshResult(**(facts | more))

    def _rebuilt(self, plan: RefreshPlan, migration: Migration) -> RefreshResult:
        """Make the copy with the new biases, and let it take over the alias."""
        options = MigrationOptions(
            client_ttl=self.options.client_ttl,
            throttle=self.options.throttle,
            events=as_events(self.options.progress),
        )
        done = carry_out(migration, options, self.lease)
        rows = (done.verified or {}).get("rows", 0)
        return self._result(
            "rebuilt",
            plan.reason,
            scanned=rows,
            written=rows,
            collection=done.target,
            epoch=done.corrected().profile.epoch,
            former_copy=done.source,
        )

    def _fresh(self, plan: RefreshPlan, correction: Correction) -> Profile:
        """Save the bank, and return the profile as it will be after the refresh."""
        old = self.state.profile
        reference = plan.reference
        if reference is None:
            self.lease.check()
            potentials = plan.bank.queries.of_queries(correction.fitted.potentials)
            bank = replace(plan.bank, potentials=potentials)
            reference = self._spare.save(bank, old.bank, self.state.metric)

        former = Former(**old.model_dump(include=set(Former.model_fields)))
        return old.model_copy(
            update={
                "estimator": to_dict(correction.fitted.estimator),
                "slot": old.standby,
                "standby": old.slot,
                "mean_bias": correction.mean_bias,
                "prior": correction.prior,
                "kinds": None if correction.kinds is None else correction.kinds.means,
                "bank": reference,
                "epoch": old.epoch + 1,
                "strength": plan.strength,
                "gate": plan.gate,
                "refreshed_at": now(),
                "fitted_at": now() if plan.fits_bank else old.fitted_at,
                "former": None if self.is_new else former,
                "tolerance": self.options.tolerance,
                "evidence": correction.evidence,
            }
        )

    def _announced(self, fresh: Profile) -> Refreshing:
        """Have clients write old and new biases with every
        row from now on; return the job with the new state.
        """
        abandoned = self.state.incoming
        incoming = Incoming(name=self.state.active, profile=fresh)
        state = self.state.model_copy(update={"incoming": incoming, "outgoing": None})

        # The note comes first: a killed job must not leave a bank that nobody knows of.
        self._spare.note([abandoned.profile.bank] if abandoned else [])
        self._write_state(state)
        self._spare.drop(self._spare.noted(), state)
        if abandoned:
            self._forget_fit(abandoned.profile, abandoned.name, state)
        Renewal.forget(self.store, self.info.name)
        return replace(self, state=state)

    def _write(self, plan: RefreshPlan) -> RefreshResult:
        """Write the announced biases, and switch to them."""
        incoming = self.state.incoming
        assert incoming is not None, "the biases are announced before"
        with self._renewing() as renewal:
            filled = renewal.fill_pending(self.waiting)
            scanned, written = renewal.run(incoming.profile)
            renewal.backend.wait_visible()

            # Clients with an older cached state still read the former slot, so new rows get a bias
            # in it too; a new profile has none.
            leaving: Incoming | None = None
            if not self.is_new:
                leaving = Incoming(name=incoming.name, profile=self.state.profile)
            fresh = incoming.profile.model_copy(update={"refreshed_at": now()})
            moved = {"incoming": None, "outgoing": leaving}
            state = self.state.model_copy(update=moved).with_profile(fresh, incoming.name)
            state = self._with_miss_rate(state, plan)
            state = keep_nearest(self.store, self.info.name, state)

            # The switch is one write of one property, so that each search reads either
            # only old biases or only new ones. The note of the replaced bank precedes it.
            self._spare.note({*self.state.profile.banks} - {*state.profile.banks})
            self._write_state(state)

        state = self._without_outgoing(state)
        self._spare.drop(self._spare.noted(), state)
        if not self.is_new:
            self._forget_fit(self.state.profile, self.state.active, state)
        Renewal.forget(self.store, self.info.name)
        return self._result(
            "full", plan.reason, scanned=scanned, written=written + filled, epoch=fresh.epoch
        )

    def _without_outgoing(self, state: CollectionState) -> CollectionState:
        """Wait until all clients have read the new state, then
        write and return a state without the former biases.
        """
        if state.outgoing is None:
            return state

        awaited = f"all clients to read the new state of {self.info.name!r}"
        if wait_seconds(awaited, self.options.client_ttl, self.options.stop):
            return state

        renewed = state.model_copy(update={"outgoing": None})
        self._write_state(renewed)
        return renewed

    def _fit(self, profile: Profile) -> Fit:
        """Return the fit of this value of the profile to refresh."""
        return Fit(self.store, self.info, self.state.with_profile(profile))

    def _forget_fit(self, profile: Profile, name: str, state: CollectionState) -> None:
        """Delete the note of a fit that the present state does not name."""
        former = state.model_copy(update={"profiles": {name: profile}, "active": name})
        changes = [change for change in (state.incoming, state.outgoing) if change is not None]
        changed = [state.with_profile(change.profile, change.name) for change in changes]
        forget_fits(self.store, [former], [state, *changed])

    @property
    def _spare(self) -> SpareBanks:
        return SpareBanks(self.store, self.info.name)

    def _with_miss_rate(self, state: CollectionState, plan: RefreshPlan) -> CollectionState:
        """Return the state with a new measurement of the corrected answers that candidates miss."""
        if state.allowed_miss_rate is None:
            return state

        gallery = read_gallery(self.store, self.info, state.field, progress=self.options.progress)
        correction = load_correction(self.store, state, state.profile)
        measured, _ = measure(
            gallery,
            correction,
            plan.bank.queries,
            state.profile.strength,
            state.allowed_miss_rate,
            state.codec.side_collection,
            self.store.most_candidates(self.info),
        )
        return state.model_copy(update={"reranking": measured})

    # -- helpers -----------------------------------------------------------------------------

    @contextmanager
    def _renewing(self, banks: Banks = NONE_READ) -> Iterator[Renewal]:
        """Have clients note their writes within the block, and yield the writer of the biases.
        banks: read already.
        """
        ttl = self.options.client_ttl
        stop = self.options.stop
        with (
            rewriting(self.lease, self.info, self.state, client_ttl=ttl, stop=stop) as writer,
            self.lease.explained(),
        ):
            backend = BiasBackend(self.store, self.info, self._searchable(self.state), writer)
            yield Renewal(backend, self.state.active == self.active, self.options, banks)

    def _write_state(self, state: CollectionState) -> None:
        self.lease.check()
        self.store.write_property(self.info.name, state.property_name, self._searchable(state))

    def _searchable(self, state: CollectionState) -> CollectionState:
        """Return the state to write: it lists no profile
        that has no biases yet, so searches cannot use one.
        """
        profiles = dict(state.profiles)
        if self.is_new and state.incoming is not None:
            profiles.pop(state.incoming.name, None)
        return state.model_copy(update={"active": self.active, "profiles": profiles})
