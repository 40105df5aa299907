"""The plan of a refresh: its bank and its estimator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, replace
from itertools import count

import numpy as np

from milvus_hubness.basics.defaults import WHERE_FROM
from milvus_hubness.basics.texts import chosen_parameters, describe, field_words
from milvus_hubness.correction.banks.bank import QueryBank
from milvus_hubness.correction.banks.stored import StoredBank
from milvus_hubness.correction.estimators import DEFAULT_ESTIMATOR, Estimator, from_dict, to_dict
from milvus_hubness.correction.estimators.base import is_same
from milvus_hubness.correction.prior import Prior
from milvus_hubness.correction.state import CollectionState, Profile, require_state
from milvus_hubness.errors import (
    EmptyBank,
    InvalidInput,
    InvalidParameter,
    StateError,
    UnfinishedMigration,
)
from milvus_hubness.jobs.common.choice import Choice, choice_of
from milvus_hubness.jobs.common.priors import (
    NO_PRIOR,
    ChosenPrior,
    PriorRequest,
    chosen_prior,
    on_gallery,
)
from milvus_hubness.jobs.common.recipe import Recipe
from milvus_hubness.jobs.common.stored_biases import needs_other_columns
from milvus_hubness.jobs.migration.ledger import Migration
from milvus_hubness.jobs.refresh.options import RefreshOptions
from milvus_hubness.jobs.store.generations import holds
from milvus_hubness.jobs.store.protocols import Store, expect_feature, has_feature
from milvus_hubness.jobs.store.records import CollectionInfo, TuningRecord


@dataclass(frozen=True)
class RefreshPlan(Choice):
    """A profile's next biases: how they are fitted, on which bank, and why."""

    _: KW_ONLY
    bank: StoredBank
    reason: str
    """Why new biases are due; empty if they are not."""
    prior: Prior | None = None
    """The prior, measured on the values of all rows; its clicks are in the bank."""
    carries_on: bool = False
    """Whether this continues an unfinished refresh."""
    unfinished: Migration | None = None
    """The unfinished copy that this continues."""
    fits_bank: bool = False
    """Whether rows count as new or changed from now on: the bank is another one, or the refresh is a
    refit.
    """
    needs_evaluation: bool = False
    """Whether the biases are not adopted without an evaluation: no user has requested them."""


def plan_refresh(
    store: Store,
    info: CollectionInfo,
    state: CollectionState,
    is_new: bool,
    load_bank: Callable[[], StoredBank],
    options: RefreshOptions,
    unfinished: Migration | None,
    refit_reason: str = "",
) -> RefreshPlan:
    """Choose the bank and the estimator of the next refresh.

    state: with the profile to refresh as the active one. is_new: whether the collection lacks this
    profile so far. load_bank: reads the profile's bank. unfinished: the copy that a killed refresh has
    begun. refit_reason: why a refit is due; empty if none is, or none is possible. Raises
    InvalidInput for a prior whose values are no numbers from 0 up.
    """
    recipe = options.recipe
    if recipe.gate:
        expect_feature(store, "gate")
    reasons = ["a refit was requested"] if options.refit == "always" else []
    begun = _begun_profile(state, unfinished)
    if begun and options.refit != "always":
        try:
            saved = store.load_bank(begun.bank)
        except (EmptyBank, StateError):
            reasons.append("the bank of an unfinished refresh is gone")
        else:
            if _names_same_biases(options, begun, saved):
                return _continuing(begun, saved, unfinished)

    profile = state.profile
    try:
        stored = load_bank()
    except EmptyBank:
        # The biases in use cannot be computed any more; those of another bank can.
        if recipe.named_bank is None:
            raise
        stored = _in_place_of_lost(profile, recipe.named_bank, recipe.prior_request)
        reasons.append("the bank in use is gone")
    bank = _with(stored, recipe)
    are_gated = has_feature(store, "gate")
    on_bank = info.verdicts.of(state.field, bank.queries.fingerprint, state.kind)
    if is_new:
        prior = _measured_prior(store, info, state, options, NO_PRIOR, on_bank)
        choice = choice_of(recipe, on_bank, choice_in_use(profile), prior, are_gated=are_gated)
        return RefreshPlan(
            **vars(choice),
            bank=replace(bank, clicks=prior.clicks),
            reason="the profile is new",
            prior=prior.prior,
            fits_bank=True,
        )

    tuned = _newly_tuned(on_bank, profile, bank) if recipe.estimator is None else None
    former = ChosenPrior(profile.prior, stored.clicks)
    # The weight of a prior that was named now may have been tuned before it.
    prior_verdict = tuned if recipe.prior is None else on_bank
    prior = _measured_prior(store, info, state, options, former, prior_verdict)
    choice = choice_of(recipe, tuned, choice_in_use(profile), prior, are_gated=are_gated)

    if refit_reason:
        reasons.append(refit_reason)
    is_other = bank.fingerprint != profile.bank.fingerprint
    if (is_other or not holds(profile.bank, stored)) and not refit_reason:
        reasons.append("the bank changed")
    if not is_same(choice.estimator, profile.estimator):
        reasons.append(_method_reason(choice.estimator, profile, tuned))
    if choice.gate != profile.gate:
        reasons.append("the gate changed")
    if reason := _prior_reason(prior, former, prior_verdict):
        reasons.append(reason)
    if needs_other_columns(store, info, state):
        reasons.append("the quantization of the vectors changed")

    if options.force and not reasons:
        # The only way to repair biases that something else
        # has damaged: nobody can see that they are wrong.
        reasons.append("it was forced")

    return RefreshPlan(
        **vars(choice),
        bank=replace(bank, clicks=prior.clicks),
        reason=" and ".join(reasons),
        prior=prior.prior,
        fits_bank=options.refit == "always" or bool(refit_reason) or is_other,
        needs_evaluation=bool(refit_reason),
    )


def _in_place_of_lost(profile: Profile, bank: QueryBank, request: PriorRequest) -> StoredBank:
    """Return what stands in for the bank of a profile that is gone: the given one, without what an
    estimator has learned.

    Raises InvalidInput where the clicks of the prior went with it, and nobody names or drops them.
    """
    prior = profile.prior
    names_other = request.prior is not None or request.is_demand or request.is_dropped
    if prior is not None and prior.source == "pairs" and not names_other:
        raise InvalidInput(
            "the clicks of the prior went with the bank: pass them again (--prior-from), or drop "
            "the prior (--no-prior)"
        )
    return StoredBank(bank, np.empty((len(bank), 0), np.float32))


def choice_in_use(profile: Profile) -> Choice:
    """Return what a profile applies."""
    return Choice(from_dict(profile.estimator), profile.strength, profile.gate)


def _method_reason(estimator: Estimator, profile: Profile, tuned: TuningRecord | None) -> str:
    """Return from which method to which one a refresh goes, and who chose that."""
    former, new = (
        describe(chosen_parameters(one)) for one in (profile.estimator, to_dict(estimator))
    )
    chosen = f", which tune chose by {tuned.judged_by}" if tuned is not None else ""
    return f"the parameters changed from {former} to {new}{chosen}"


def _measured_prior(
    store: Store,
    info: CollectionInfo,
    state: CollectionState,
    options: RefreshOptions,
    former: ChosenPrior,
    verdict: TuningRecord | None,
) -> ChosenPrior:
    """Return the prior of the new biases, with what the values of all rows say.

    former: that of the biases in use. Raises InvalidInput, InvalidParameter.
    """
    request = options.recipe.prior_request
    if former.prior is None:
        request.expect_source()
    if request.prior is not None and request.prior.field in state.codec.hidden_fields:
        raise InvalidInput(
            f"field {request.prior.field!r} of {info.name!r} is computed from the bank: "
            "choose a field of the application as the prior"
        )

    is_followed = options.recipe.estimator is None
    chosen = chosen_prior(request, verdict, former, is_followed=is_followed)
    # Clicks that are stored stay what they are: nothing is to be read again.
    is_unread = former.prior and (former.prior.source == "pairs" or options.refit == "pending")
    if is_unread and chosen == former:
        return chosen

    # Values that are all alike are a mistake in a new prior; one in use waits for better ones.
    in_use = former.prior.subject if former.prior else None
    is_new = chosen.prior is not None and chosen.prior.subject != in_use
    return on_gallery(store, info, chosen, is_new=is_new, progress=options.progress)


def _prior_reason(new: ChosenPrior, former: ChosenPrior, verdict: TuningRecord | None) -> str:
    """Return why a prior demands new biases; empty if it does not."""
    if new.arguments != former.arguments:
        remark = new.remark(verdict)
        return f"the prior changed; {remark}" if remark else "the prior changed"
    if new.prior is None or former.prior is None or new.prior.digest == former.prior.digest:
        return ""
    if new.prior.source == "field":
        return f"the values of {new.prior.field!r} changed"
    # Its clicks are the same: other rows are there, whose clicks were computed with them.
    return ""


def _begun_profile(state: CollectionState, unfinished: Migration | None) -> Profile | None:
    """Return the active profile as an unfinished refresh will leave it; None without one."""
    begun = state.filling
    # A copy that is being prepared is what an interrupted `clean` has left.
    if unfinished and unfinished.state and unfinished.phase != "preparing":
        return unfinished.state.profiles.get(state.active, begun)
    return begun


def _names_same_biases(options: RefreshOptions, begun: Profile, saved: StoredBank) -> bool:
    """Whether the options ask for no other biases than the unfinished refresh, with its bank."""
    recipe = options.recipe
    bank = _with(saved, recipe)
    present = ChosenPrior(begun.prior, saved.clicks)
    prior = chosen_prior(recipe.prior_request, None, present)
    choice = choice_of(recipe, None, choice_in_use(begun), prior)
    is_same_method = is_same(choice.estimator, begun.estimator) and choice.gate == begun.gate
    is_same_prior = prior.arguments == present.arguments
    return is_same_method and is_same_prior and bank.fingerprint == saved.fingerprint


def _continuing(begun: Profile, saved: StoredBank, unfinished: Migration | None) -> RefreshPlan:
    """Return the plan to finish the unfinished refresh to this profile."""
    return RefreshPlan(
        **vars(choice_in_use(begun)),
        bank=saved,
        reason="one was not finished",
        prior=begun.prior,
        carries_on=True,
        unfinished=unfinished,
    )


def ready_state(info: CollectionInfo, field: str | None) -> CollectionState:
    """Return the state of the field if it is ready. Raises NotCorrected, UnfinishedMigration."""
    state = require_state(info.state_of(field), info.name)
    if state.phase != "ready":
        raise UnfinishedMigration(f"{info.name!r} is unfinished, a copy of {state.source!r}")
    return state


def with_profile(
    state: CollectionState, name: str, options: RefreshOptions, unfinished: Migration | None
) -> tuple[CollectionState, bool]:
    """Return the state with this profile as the active one, and whether the profile is new.

    A new profile has no biases yet, and no columns before a copy is made. unfinished: the copy that a
    killed refresh has begun. Raises InvalidParameter, InvalidInput.
    """
    if name in state.profiles:
        return state.model_copy(update={"active": name}), False

    begun = unfinished.state.profiles.get(name) if unfinished and unfinished.state else None
    if begun is not None:
        return state.with_profile(begun, name).model_copy(update={"active": name}), True

    if not name:
        raise InvalidParameter("a profile needs a name")
    if options.recipe.bank is None:
        raise InvalidInput(f"no profile {name!r}: pass --bank FILE to add it ({WHERE_FROM})")
    if state.codec.leaves_vectors:
        raise InvalidInput(
            f"the biases of {field_words(state.field)} are beside its vectors, where there is no room "
            f"for profile {name!r}: migrate the collection, and refresh the copy"
        )

    active = state.profile
    taken = {other.slot for other in state.profiles.values()}
    draft = Profile(
        estimator=to_dict(options.recipe.estimator or DEFAULT_ESTIMATOR),
        slot=next(slot for slot in count() if slot not in taken),
        mean_bias=0.0,
        bank=active.bank,
        # Measured on this profile's own bank when it is fitted.
        kinds=active.kinds,
        epoch=1,
        refreshed_at=active.refreshed_at,
        fitted_at=active.fitted_at,
    )
    return state.with_profile(draft, name).model_copy(update={"active": name}), True


def _with(stored: StoredBank, recipe: Recipe) -> StoredBank:
    """Return the stored bank with the queries and targets of a recipe in place of its own, where it names
    some.
    """
    queries = recipe.named_bank or stored.queries
    return replace(
        stored, queries=queries, targets=recipe.named_targets or stored.targets, nearest=()
    )


def _newly_tuned(
    verdict: TuningRecord | None, profile: Profile, bank: StoredBank
) -> TuningRecord | None:
    """Return the choice of tuning for this bank, which
    the biases do not follow yet; None if there is none.

    verdict: the stored one on the bank. On the bank in use it counts from the last
    refresh on; on another bank, whenever it was made.
    """
    if verdict is None or verdict.choice is None:
        return None
    is_in_use = profile.bank.fingerprint == bank.fingerprint
    return None if is_in_use and verdict.tuned_at <= profile.refreshed_at else verdict
