"""Whether a refit is due because the gallery has changed, and whether the sampled queries suffice.

A bank has no query for a topic that came after it. A refit with such a bank can be worse than none,
so a refit takes the queries that clients have sampled as its bank. Where these are too few, nothing is
refitted, and a new bank is due.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

from milvus_hubness.basics.logs import log
from milvus_hubness.correction.banks.bank import QueryBank
from milvus_hubness.correction.state import CollectionState
from milvus_hubness.jobs.common.fits import Fit, fit_of, key_count
from milvus_hubness.jobs.common.samples import sampled_bank, samples_of
from milvus_hubness.jobs.migration.corrected import unfinished
from milvus_hubness.jobs.migration.ledger import Ledger
from milvus_hubness.jobs.refresh.evaluation import FEWEST_ITEMS
from milvus_hubness.jobs.refresh.options import RefreshOptions
from milvus_hubness.jobs.refresh.plan import ready_state
from milvus_hubness.jobs.refresh.result import RefreshResult
from milvus_hubness.jobs.store.protocols import QuerySampling, Store
from milvus_hubness.jobs.store.records import CollectionInfo, Sampling

FEWEST_COUNTED = 1_000
"""Rows from which on a collection that was created empty is noted: fewer may be the first of many."""

ROUNDING = 1e-9
"""What the last digits of a share may be off."""

FEWEST_SAMPLES = 50
"""Queries sampled since the last fit that a refit takes at least, however few rows have changed."""


@dataclass(frozen=True)
class RefitCheck:
    """The result of a check."""

    fit: Fit | None = None
    """The fit of the bank in use; None if nothing was checked."""
    share: float | None = None
    """The share of the rows that are new or changed since then; None if that is not counted yet."""
    reason: str = ""
    """Why all rows are to be refitted, and with which queries; empty if they are not."""
    bank: QueryBank | None = None
    """The sampled queries for that."""
    new_bank_due: str = ""
    """Why a refit is due that is not possible."""

    def noted(self, result: RefreshResult) -> RefreshResult:
        """Return the result of the refresh that followed with what was checked before it, and note
        whether a new bank is due.
        """
        if self.fit is None:
            return result

        is_done = result.action == "full" and not result.planned
        # The note of the former fit is gone then, and with it what was due.
        if is_done and self.fit.is_over(result.collection):
            return replace(result, unfitted_share=0.0)

        if not result.planned:
            self.fit.set_due(self.new_bank_due)
        if self.new_bank_due and not result.planned:
            log.warning("%s: %s", result.collection, self.new_bank_due)
        reason = result.reason
        if self.new_bank_due:
            reason = f"{reason}; {self.new_bank_due}"
        return replace(
            result,
            reason=reason,
            unfitted_share=self.share,
            new_bank_due=self.new_bank_due,
        )


def check_refit(
    store: Store, info: CollectionInfo, options: RefreshOptions, *, is_planned: bool
) -> RefitCheck:
    """Return whether a refit is due, and with which queries.

    Notes the rows of a fit that has no note, except for a plan. Raises StateError for a broken record
    in the ledger.
    """
    state = ready_state(info, options.field)
    name = options.profile or state.active
    if options.refit_share is None or name not in state.profiles:
        return RefitCheck()

    fit = fit_of(store, info, state, name)
    rows = store.count(info.name)
    share = _share(fit, rows, notes=not is_planned)
    enough = options.refit_share - ROUNDING
    if share is not None and share >= enough and not fit.due:
        # All keys are read once, where the number of rows demands a refit for the first time: rows
        # that were inserted twice are no new ones.
        share = _share(fit, key_count(store, info, rows), notes=not is_planned)
    if share is None or share < enough:
        return RefitCheck(fit, share)
    # Fewer rows show no hubs, and nothing could guard the refit.
    if rows < FEWEST_ITEMS or is_unfinished(store, info, state):
        return RefitCheck(fit, share)

    profile = state.profiles[name]
    since = f"since the bank was fitted on {profile.fitted_at:%Y-%m-%d}"
    why = f"{share:.1%} of the rows are new or changed {since}"

    if options.recipe.bank is not None:
        return RefitCheck(fit, share, new_bank_due=_of_given_bank(state, name, why, options))
    if len(state.profiles) > 1:
        # Each profile is for other queries, and needs a bank of these.
        lacking = (
            f"a new bank is due: {why}, and the samples are of the queries of all {len(state.profiles)} "
            f"profiles: refresh profile {name!r} with a bank of today's queries of its own"
        )
        return RefitCheck(fit, share, new_bank_due=lacking)
    sampling = info.samplings.of(state.field)
    if sampling is None:
        lacking = (
            f"a new bank is due: {why}, and no queries of {info.name!r} are sampled: refresh with "
            "a bank of today's queries"
        )
        if isinstance(store, QuerySampling):
            lacking += f", or start with milvus-hubness bank sample {info.name}"
        return RefitCheck(fit, share, new_bank_due=lacking)

    samples = samples_of(store, sampling)
    sampled = int((samples.at > profile.fitted_at.timestamp()).sum())
    needed = _needed(sampling, profile.bank.count, share)
    if sampled < needed:
        lacking = (
            f"a new bank is due: {why}, and {sampled:,} queries were sampled since, of "
            f"{needed:,} that a refit needs: wait for more, raise the rate (milvus-hubness bank "
            f"sample {info.name} --rate), or refresh with a bank of today's queries"
        )
        return RefitCheck(fit, share, new_bank_due=lacking)
    least = min(profile.bank.count, sampling.size) // 2
    if len(samples) < least:
        lacking = (
            f"a new bank is due: {why}, and only {len(samples):,} queries are sampled, of {least:,} "
            f"for a bank in place of one of {profile.bank.count:,}: wait for more, or refresh with a "
            "bank of today's queries"
        )
        return RefitCheck(fit, share, new_bank_due=lacking)

    bank = QueryBank(samples.vectors, source=sampling.samples_collection)
    reason = f"{why}: refitted with {len(bank):,} sampled queries, {sampled:,} of them sent since"
    return RefitCheck(fit, share, reason=reason, bank=bank)


def samples_for_refresh(
    store: Store, collection: str, field: str | None = None
) -> QueryBank | None:
    """Return the sampled queries as the bank of a refresh; None while one is unfinished.

    That goes on with the bank it began with: with the samples that have come since, it would begin
    again each time that it is killed. Raises as `sampled_bank` does.
    """
    info = store.info(collection, counted=False)
    if is_unfinished(store, info, ready_state(info, field)):
        return None
    return sampled_bank(store, collection, field)


def is_unfinished(store: Store, info: CollectionInfo, state: CollectionState) -> bool:
    """Whether a refresh is unfinished: it is continued first, with the bank that it has."""
    if state.filling is not None:
        return True
    return unfinished(store, Ledger(store).migrations(info.name), info, state.field) is not None


def _share(fit: Fit, rows: int, *, notes: bool) -> float | None:
    """Return the share of unfitted rows; None if it is counted from now on, or not yet.

    notes: whether to note from when on it is counted.
    """
    note = fit.note
    if note is not None:
        return fit.unfitted_share(note, rows)
    if rows >= FEWEST_COUNTED and notes:
        fit.write_now()
    return None


def _of_given_bank(state: CollectionState, name: str, why: str, options: RefreshOptions) -> str:
    """Return why a new bank is due although one is given; empty if the given one is new."""
    in_use = state.profiles[name].bank.queries_fingerprint
    given = options.recipe.named_bank
    if given is None or given.fingerprint != in_use:
        return ""
    return (
        f"a new bank is due: {why}, and the given bank is the one in use: pass one of today's "
        "queries, or none, for a refit with those that clients have sampled"
    )


def _needed(sampling: Sampling, bank_size: int, unfitted_share: float) -> int:
    """Return how many queries must have been sampled since the last fit: as large a share of the bank
    as the unfitted rows are of the gallery.
    """
    # A sample takes a random place, so half of the places are full long before all are.
    places = sampling.size // 2
    return max(FEWEST_SAMPLES, min(ceil(unfitted_share * bank_size - ROUNDING), places))
