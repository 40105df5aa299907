"""The options and the plan of a refresh: its bank,
its estimator, a rebuild; and spare bank generations.

A job notes the bank generations that may become spare; if it is killed, the next refresh of the
collection drops them, unless a collection state names them. If another job names one at that
moment, the store restores its rows, see Store.drop_bank_generations.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

import numpy as np
from pydantic import TypeAdapter

from milvus_hubness.basics.defaults import (
    DEFAULT_MEASURE,
    DEFAULT_TOLERANCE,
    REBUILD_ROWS,
    REBUILD_SHARE,
    WHERE_FROM,
    Engine,
    VerdictMode,
)
from milvus_hubness.basics.progress import Progress, silent
from milvus_hubness.basics.texts import field_words
from milvus_hubness.basics.words import expect_word
from milvus_hubness.correction.banks.bank import BankLike, QueryBank, optional_bank
from milvus_hubness.correction.banks.stored import StoredBank
from milvus_hubness.correction.codec.arrays import Metric
from milvus_hubness.correction.codec.index_hints import foremost, measured_on
from milvus_hubness.correction.codec.layout import Layout
from milvus_hubness.correction.codec.quantisation import with_bias_scale, with_spread
from milvus_hubness.correction.estimators import (
    DEFAULT_ESTIMATOR,
    Estimator,
    from_dict,
    to_dict,
)
from milvus_hubness.correction.estimators.base import expect_estimator, is_same
from milvus_hubness.correction.fitted import Correction
from milvus_hubness.correction.kinds import KindMeans
from milvus_hubness.correction.prior import Prior
from milvus_hubness.correction.state import (
    SLOTS_PER_PROFILE,
    BankReference,
    CollectionState,
    Profile,
    require_state,
)
from milvus_hubness.errors import (
    EmptyBank,
    InvalidInput,
    InvalidParameter,
    NoSpareColumns,
    StateError,
    UnfinishedMigration,
)
from milvus_hubness.jobs.common.judgements import Judgements
from milvus_hubness.jobs.common.judging import Judging
from milvus_hubness.jobs.common.lease import Lease
from milvus_hubness.jobs.common.lease_records import (
    default_client_ttl,
    expect_client_ttl,
    read_ledger,
)
from milvus_hubness.jobs.common.priors import (
    NO_PRIOR,
    ChosenPrior,
    PriorLike,
    PriorRequest,
    chosen_prior,
    joined_with,
    on_gallery,
)
from milvus_hubness.jobs.common.progress import Throttle
from milvus_hubness.jobs.migration.ledger import Chunk, Ledger, Migration
from milvus_hubness.jobs.migration.migrator import opened
from milvus_hubness.jobs.migration.plan import MigrationOptions
from milvus_hubness.jobs.migration.presence import identified, is_copy, is_source
from milvus_hubness.jobs.migration.survey import scan_chunk, survey
from milvus_hubness.jobs.store.generations import holds, reference_to
from milvus_hubness.jobs.store.ownership import LEDGER
from milvus_hubness.jobs.store.protocols import SearchGates, Store
from milvus_hubness.jobs.store.records import CollectionInfo, Record, TuningRecord
from milvus_hubness.quality.retrieval import Measure


@dataclass(frozen=True, eq=False)
class RefreshOptions:
    """Options of a refresh. Raises InvalidParameter, and as QueryBank does."""

    bank: BankLike | None = None
    """The queries; by default the stored ones."""
    target_bank: BankLike | None = None
    """The target items; by default the stored ones, if there are any."""
    estimator: Estimator | None = None
    """By default the choice of tuning since the last refresh,
    else the current one (the default for a new profile).
    """
    profile: str | None = None
    """The bias profile to refresh, by default the active one; a new name adds a profile, from the
    given bank, in spare columns of the stored vectors.
    """
    refit: bool = False
    """Refresh all rows though nothing changed, for estimators that learn from the gallery."""
    refit_share: float | None = None
    """Refit with the sampled queries as bank as soon as this share of the rows, above 0 and up to 1, is
    new or changed since the bank was fitted; None for never. Without enough samples, a new bank is due.
    """
    revert: bool = False
    """Return to the biases before the last full refresh."""
    prior: PriorLike | None = None
    """A field of the rows, or clicks by key, that says how often each row is wanted; by default the
    present prior, if there is one. Its values are read again by each refresh.
    """
    prior_weight: float | None = None
    """λ in units of the spread of scores; by default that of tuning since the last refresh, else the
    present one, else 0.
    """
    no_prior: bool = False
    """Drop the prior."""
    reads_values: bool = True
    """Read the field of the present prior again, of all rows; if a value has changed, the refresh is
    a full one.
    """
    force: bool = False
    """Compute and write all biases again though nothing changed, which repairs damaged ones, and
    use new biases even if they are worse than the old ones.
    """
    judgements: Judgements | None = None
    """Queries with right rows for the evaluation."""
    measure: str = DEFAULT_MEASURE
    """What the evaluation measures on these: R@k, MRR, MAP or nDCG@k."""
    queries: BankLike | None = None
    """Real queries without labels, apart from the bank, for the verdict and the evaluation; by
    default those that clients have sampled, and without any a part of the bank.
    """
    verdict: VerdictMode | None = None
    """What becomes of a verdict against a given bank: see VerdictMode; by default as the environment
    says, else "require", with which such a bank is refused, unless `force`.
    """
    rebuild_share: float = REBUILD_SHARE
    """If at least this share of at least `rebuild_rows` rows must be written, and the collection is
    named by an alias, make a copy with the new biases, which takes over the alias.
    """
    rebuild_rows: int = REBUILD_ROWS
    """Collections with fewer rows are not rebuilt, however many of their rows change."""
    plan: bool = False
    """Only return the plan."""
    restart_ttl: bool = False
    """Write all rows although the collection has a
    time to live, which starts again for each of them.
    """
    tolerance: float = DEFAULT_TOLERANCE
    """A bias is written again if it moves a score by more than this."""
    client_ttl: float = field(default_factory=default_client_ttl)
    """Seconds until every client has read a new collection state, before the first write."""
    throttle: Throttle = field(default_factory=Throttle)
    """Slows the writes down, and pauses them."""
    engine: Engine = "local"
    """What computes the written biases; the workers of "ray" also fit."""
    stop: threading.Event = field(default_factory=threading.Event)
    """Once this is set, Cancelled is raised between two batches."""
    progress: Progress = silent
    """Called with the phase, the rows done and all rows."""
    field: str | None = None
    """The corrected field, if there are several."""

    def __post_init__(self) -> None:
        expect_estimator(self.estimator)
        expect_word("engine", self.engine, Engine)
        Measure.of(self.measure)
        expect_client_ttl(self.client_ttl)
        for name in ("bank", "target_bank"):
            object.__setattr__(self, name, optional_bank(getattr(self, name)))
        judging = Judging.of(self.verdict, self.queries)
        object.__setattr__(self, "queries", judging.queries)
        object.__setattr__(self, "verdict", judging.mode)
        if not (np.isfinite(self.tolerance) and self.tolerance >= 0):
            raise InvalidParameter(f"tolerance is a number from 0 up, got {self.tolerance}")
        if self.refit_share is not None:
            refit_share(self.refit_share)
            if self.refit or self.revert:
                raise InvalidParameter(
                    "refit_share decides whether to refit: leave out refit and revert, which have "
                    "decided"
                )

        names_prior = self.prior_request != PriorRequest()
        if self.revert and (self.names_biases or self.refit or names_prior):
            raise InvalidParameter(
                "revert returns to the former biases: leave out bank, estimator, prior and refit"
            )

    @property
    def judging(self) -> Judging:
        """How the bank is judged: `force` goes on after a verdict against it."""
        mode: VerdictMode = self.verdict or "require"
        if self.force and mode == "require":
            mode = "warn"
        return Judging(mode, optional_bank(self.queries))

    @property
    def prior_request(self) -> PriorRequest:
        """The prior that the caller names. Raises InvalidInput, InvalidParameter."""
        return PriorRequest.of(self.prior, self.prior_weight, is_dropped=self.no_prior)

    @property
    def names_biases(self) -> bool:
        """Whether a bank or an estimator is given."""
        return not (self.bank is None and self.target_bank is None and self.estimator is None)


def refit_share(value: object) -> float:
    """Return a share of rows from which on a refit is due. Raises InvalidParameter."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value <= 1:  # type: ignore[operator]
        raise InvalidParameter(f"refit_share is a number above 0, up to 1, got {value!r}")
    return float(value)  # type: ignore[arg-type]


SPARE_BANKS = "spare banks"
"""The group of the ledger's notes of spare bank generations, one for each collection."""

_NOTED = TypeAdapter(list[BankReference])


class SpareBanks:
    """The spare bank generations of one collection."""

    def __init__(self, store: Store, collection: str) -> None:
        self._store = store
        self._key = f"{SPARE_BANKS}/{collection}"

    def note(self, banks: Iterable[BankReference]) -> None:
        """Add these generations to the note."""
        spare = list(dict.fromkeys([*self.noted(), *banks]))
        if spare:
            self._put(spare)

    def _put(self, banks: Sequence[BankReference]) -> None:
        body = json.dumps([bank.model_dump() for bank in banks])
        self._store.put_records(LEDGER, [Record(self._key, SPARE_BANKS, body)])

    def noted(self) -> list[BankReference]:
        """Return the noted generations that are not yet dropped."""
        record = self._store.record(LEDGER, self._key)
        return list(read_ledger(_NOTED.validate_json, record)) if record else []

    def save(self, bank: StoredBank, current: BankReference, metric: Metric) -> BankReference:
        """Save a bank, and return the reference to it, or to the current generation if they are
        equal. Until a collection state names it, it is spare.
        """
        reference = reference_to(current.collection, bank)
        is_current = reference.generation == current.generation
        # Noted before it is saved: a killed job must not leave a generation that no note names.
        if not is_current:
            self.note([reference])
        self._store.save_bank(current.collection, bank, metric)
        return current if is_current else reference

    def drop(self, noted: Sequence[BankReference], state: CollectionState | None = None) -> None:
        """Drop the noted generations that no collection state names, and the note.

        noted: the whole note. state: that of this collection, which names some.
        """
        if not noted:
            return

        named = {bank.rows for bank in state.banks} if state else set()
        undecided = self._store.drop_bank_generations(
            [bank for bank in noted if bank.rows not in named]
        )
        # A later refresh drops them, once the states of all collections can be read.
        if undecided:
            self._put(undecided)
        else:
            self._store.drop_records(LEDGER, SPARE_BANKS, [self._key])


@dataclass(frozen=True)
class RefreshPlan:
    """The bank and the estimator of a profile's next biases."""

    estimator: Estimator
    bank: StoredBank
    strength: float
    """w of searches that name none."""
    reason: str
    """Why new biases are due; empty if they are not."""
    gate: int | None = None
    """The k of a DynamicGate, which searches have; None for none."""
    prior: Prior | None = None
    """The prior, measured on the values of all rows; its clicks are in the bank."""
    kinds: KindMeans | None = None
    """The means of kinds in use, or those that go with `reference`; None without kinds."""
    mean_bias: float = 0.0
    """The mean that is subtracted from every bias, if `reference` is set."""
    reference: BankReference | None = None
    """The generation of the bank, if it is stored already; the mean is decided then too."""
    carries_on: bool = False
    """Whether this continues an unfinished refresh."""
    rebuilding: Migration | None = None
    """The unfinished rebuild that this continues."""
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
    rebuilding: Migration | None,
    refit_reason: str = "",
) -> RefreshPlan:
    """Choose the bank and the estimator of the next refresh.

    state: with the profile to refresh as the active one. is_new: whether the collection lacks this
    profile so far. load_bank: reads the profile's bank. rebuilding: an unfinished rebuild of this
    collection. refit_reason: why a refit is due; empty if none is, or none is possible. Raises
    InvalidInput if biases are reverted that were never refreshed, and for a prior whose values are no
    numbers from 0 up.
    """
    if options.revert:
        return _reverting(store, info, state)

    reasons = ["a refit was requested"] if options.refit else []
    begun = _begun_profile(state, rebuilding)
    if begun and not options.refit:
        try:
            saved = store.load_bank(begun.bank)
        except (EmptyBank, StateError):
            reasons.append("the bank of an unfinished refresh is gone")
        else:
            if _names_same_biases(options, begun, saved):
                return _continuing(begun, saved, rebuilding)

    stored = load_bank()
    bank = _with(stored, optional_bank(options.bank), optional_bank(options.target_bank))
    profile = state.profile
    if is_new:
        verdict = info.verdicts.of(state.field, bank.queries.fingerprint, state.kind)
        prior = _measured_prior(store, info, state, options, NO_PRIOR, verdict)
        of_profile = options.estimator or from_dict(profile.estimator)
        return RefreshPlan(
            estimator=joined_with(of_profile, options.prior_request, prior),
            bank=replace(bank, clicks=prior.clicks),
            strength=profile.strength,
            reason="the profile is new",
            prior=prior.prior,
            kinds=profile.kinds,
            fits_bank=True,
        )

    estimator = options.estimator
    strength = profile.strength
    gate = profile.gate
    tuned = _newly_tuned(info, state, bank) if estimator is None else None
    if tuned is not None:
        estimator = from_dict(tuned.choice or {})
        strength = tuned.strength
        # Without labels, tuning does not judge gates, so that in use stays.
        if tuned.labelled and isinstance(store, SearchGates):
            gate = tuned.gate

    former = ChosenPrior(profile.prior, stored.clicks)
    verdict = tuned
    if options.prior is not None:
        verdict = info.verdicts.of(state.field, bank.queries.fingerprint, state.kind)
    prior = _measured_prior(store, info, state, options, former, verdict)
    present = from_dict(profile.estimator)
    fitting = joined_with(estimator or present, options.prior_request, prior)
    if estimator is not None or not is_same(fitting, profile.estimator):
        estimator = fitting

    if refit_reason:
        reasons.append(refit_reason)
    is_other = bank.fingerprint != profile.bank.fingerprint
    if (is_other or not holds(profile.bank, stored)) and not refit_reason:
        reasons.append("the bank changed")
    if estimator is not None and not is_same(estimator, profile.estimator):
        reasons.append("the parameters changed")
    if gate != profile.gate:
        reasons.append("the gate changed")
    if reason := _prior_reason(prior, former):
        reasons.append(reason)
    if needs_other_columns(store, info, state):
        reasons.append("the quantization of the vectors changed")

    if options.force and not reasons:
        # The only way to repair biases that something else
        # has damaged: nobody can see that they are wrong.
        reasons.append("it was forced")

    return RefreshPlan(
        estimator=estimator or present,
        bank=replace(bank, clicks=prior.clicks),
        strength=strength,
        reason=" and ".join(reasons),
        gate=gate,
        prior=prior.prior,
        kinds=profile.kinds,
        fits_bank=options.refit or bool(refit_reason) or is_other,
        needs_evaluation=bool(refit_reason),
    )


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
    request = options.prior_request
    if former.prior is None:
        request.expect_source()
    if request.prior is not None and request.prior.field in state.codec.hidden_fields:
        raise InvalidInput(
            f"field {request.prior.field!r} of {info.name!r} is computed from the bank: "
            "choose a field of the application as the prior"
        )

    is_followed = options.estimator is None
    chosen = chosen_prior(request, verdict, former, is_followed=is_followed)
    # Clicks that are stored stay what they are: nothing is to be read again.
    is_unread = former.prior and (former.prior.source == "pairs" or not options.reads_values)
    if is_unread and chosen == former:
        return chosen

    # Values that are all alike are a mistake in a new prior; one in use waits for better ones.
    in_use = former.prior.subject if former.prior else None
    is_new = chosen.prior is not None and chosen.prior.subject != in_use
    return on_gallery(store, info, chosen, is_new=is_new, progress=options.progress)


def _prior_reason(new: ChosenPrior, former: ChosenPrior) -> str:
    """Return why a prior demands new biases; empty if it does not."""
    if new.arguments != former.arguments:
        return f"the prior changed; {remark}" if (remark := new.remark) else "the prior changed"
    if new.prior is None or former.prior is None or new.prior.digest == former.prior.digest:
        return ""
    if new.prior.source == "field":
        return f"the values of {new.prior.field!r} changed"
    # Its clicks are the same: other rows are there, whose clicks were computed with them.
    return ""


def _reverting(store: Store, info: CollectionInfo, state: CollectionState) -> RefreshPlan:
    """Return the plan to take the last refresh back. Raises InvalidInput if there was none."""
    former = state.profile.former
    if former is None:
        raise InvalidInput(f"{info.name!r} has no earlier biases: it was never refreshed")

    return RefreshPlan(
        estimator=from_dict(former.estimator),
        bank=store.load_bank(former.bank),
        strength=former.strength,
        reason="the last refresh is taken back",
        gate=former.gate,
        prior=former.prior,
        kinds=former.kinds,
        mean_bias=former.mean_bias,
        reference=former.bank,
        # Who takes a refit back does not want the same one at the next time.
        fits_bank=True,
    )


def _begun_profile(state: CollectionState, rebuilding: Migration | None) -> Profile | None:
    """Return the active profile as an unfinished refresh will leave it; None without one."""
    incoming = state.incoming
    begun = incoming.profile if incoming and incoming.name == state.active else None
    if rebuilding and rebuilding.state:
        return rebuilding.state.profiles.get(state.active, begun)
    return begun


def _names_same_biases(options: RefreshOptions, begun: Profile, saved: StoredBank) -> bool:
    """Whether the options ask for no other biases than the unfinished refresh, with its bank."""
    bank = _with(saved, optional_bank(options.bank), optional_bank(options.target_bank))
    present = ChosenPrior(begun.prior, saved.clicks)
    prior = chosen_prior(options.prior_request, None, present)
    estimator = options.estimator or from_dict(begun.estimator)
    is_same_method = is_same(joined_with(estimator, options.prior_request, prior), begun.estimator)
    is_same_prior = prior.arguments == present.arguments
    return is_same_method and is_same_prior and bank.fingerprint == saved.fingerprint


def _continuing(begun: Profile, saved: StoredBank, rebuilding: Migration | None) -> RefreshPlan:
    """Return the plan to finish the unfinished refresh to this profile."""
    return RefreshPlan(
        estimator=from_dict(begun.estimator),
        bank=saved,
        strength=begun.strength,
        reason="one was not finished",
        gate=begun.gate,
        prior=begun.prior,
        kinds=begun.kinds,
        mean_bias=begun.mean_bias,
        reference=begun.bank,
        carries_on=True,
        rebuilding=rebuilding,
    )


def ready_state(info: CollectionInfo, field: str | None) -> CollectionState:
    """Return the state of the field if it is ready. Raises NotCorrected, UnfinishedMigration."""
    state = require_state(info.state_of(field), info.name)
    if state.phase != "ready":
        raise UnfinishedMigration(f"{info.name!r} is unfinished, a copy of {state.source!r}")
    return state


def with_profile(
    state: CollectionState, name: str, options: RefreshOptions
) -> tuple[CollectionState, bool]:
    """Return the state with this profile as the active one, and whether the profile is new.

    A new profile gets two spare columns of the stored vectors, without
    biases yet: those of locality hints first, and last that of the
    graph hint. Raises InvalidParameter, InvalidInput, NoSpareColumns.
    """
    if name in state.profiles:
        return state.model_copy(update={"active": name}), False

    # An unfinished refresh adds the profile: it is new, and its slots are taken already.
    if state.incoming is not None and state.incoming.name == name:
        begun = state.incoming.profile
        draft = begun.model_copy(
            update={"slot": begun.standby, "standby": begun.slot, "epoch": begun.epoch - 1}
        )
        return state.with_profile(draft, name).model_copy(update={"active": name}), True

    if not name:
        raise InvalidParameter("a profile needs a name")
    if options.bank is None:
        raise InvalidInput(f"no profile {name!r}: pass --bank FILE to add it ({WHERE_FROM})")

    wider = _with_columns(state, state.slots + SLOTS_PER_PROFILE)
    # The width of a vector field is fixed: only columns that pad the vectors can be taken.
    fits = (
        wider.layout.width == state.layout.width
        and wider.codec.form.width == state.codec.form.width
    )
    if state.codec.needs_candidates or not fits:
        raise NoSpareColumns(
            f"{field_words(state.field)} has no columns to spare for profile {name!r}: "
            "migrate it with room for more profiles"
        )

    active = state.profile
    draft = Profile(
        estimator=to_dict(options.estimator or DEFAULT_ESTIMATOR),
        slot=state.slots,
        standby=state.slots + 1,
        mean_bias=0.0,
        bank=active.bank,
        # Measured on this profile's own bank when it is fitted.
        kinds=active.kinds,
        epoch=1,
        refreshed_at=active.refreshed_at,
        fitted_at=active.fitted_at,
    )
    return wider.with_profile(draft, name).model_copy(update={"active": name}), True


def _with_columns(state: CollectionState, slots: int) -> CollectionState:
    """Return the state with this number of slots, and with the graph hint and locality hint columns
    that still fit.
    """
    layout = state.layout
    bare = replace(
        layout, slots=slots, anchor=0.0, pull=0.0, length_pull=0.0, locality_hints="", reach=0.0
    )
    count = min(layout.locality_hint_count, bare.spare - bool(layout.anchor))
    hints = foremost(layout.locality_hints, layout.dim, count)
    wider = replace(
        bare,
        anchor=layout.anchor if bare.spare else 0.0,
        pull=layout.pull if bare.spare else 0.0,
        length_pull=layout.length_pull if bare.spare else 0.0,
        locality_hints=hints,
        reach=layout.reach if hints else 0.0,
    )
    return state.model_copy(update={"layout": wider})


def _with(stored: StoredBank, bank: QueryBank | None, target_bank: QueryBank | None) -> StoredBank:
    """Return the stored bank with these queries and targets in place of its own, where given."""
    return replace(
        stored, queries=bank or stored.queries, targets=target_bank or stored.targets, nearest=()
    )


def _newly_tuned(
    info: CollectionInfo, state: CollectionState, bank: StoredBank
) -> TuningRecord | None:
    """Return the choice of tuning for this bank, which
    the biases do not follow yet; None if there is none.

    A verdict on the bank in use counts from the last
    refresh on; one on another bank, whenever it was made.
    """
    verdict = info.verdicts.of(state.field, bank.queries.fingerprint, state.kind)
    profile = state.profile
    if verdict is None or verdict.choice is None:
        return None
    is_in_use = profile.bank.fingerprint == bank.fingerprint
    return None if is_in_use and verdict.tuned_at <= profile.refreshed_at else verdict


def needs_other_columns(store: Store, info: CollectionInfo, state: CollectionState) -> bool:
    """Whether the field's quantiser, which its owner can change at any time, needs biases in more
    columns than stored vectors have. Biases in more columns than necessary are as good.
    """
    # A state can name a field that its owner has dropped meanwhile; other checks say so.
    if state.codec.needs_candidates or state.field not in info.vector_fields:
        return False
    return store.bias_spread(info, state.field) > state.layout.spread


def choose_rebuild(
    info: CollectionInfo,
    requested: str,
    state: CollectionState,
    share: float,
    options: RefreshOptions,
) -> tuple[bool, str]:
    """Return whether to rebuild, and why.

    requested: the caller's name or alias. share: of rows that need a
    write. If most rows do, a copy that takes over the alias costs no more,
    and spares the live collection upserts, which starve its compaction.
    """
    moved = f"{share:.0%} of {info.rows:,} rows change"
    if share < options.rebuild_share:
        return False, f"{moved}: they are upserted"
    if info.rows < options.rebuild_rows:
        return False, f"{moved}, fewer than {options.rebuild_rows:,} in all: they are upserted"
    if obstacle := rebuild_obstacle(info, requested, state):
        return False, f"{moved}, and are upserted: {obstacle}"
    return True, f"{moved}: a copy takes over the alias {info.aliases[0]!r}"


def rebuild_obstacle(info: CollectionInfo, requested: str, state: CollectionState) -> str:
    """Return why no copy can take over from the collection; empty if one can."""
    if state.codec.leaves_vectors:
        return "biases outside the vector field are not rebuilt"
    if len(info.states) > 1:
        return f"other fields of {info.name!r} are corrected too"
    if len(info.aliases) != 1:
        what = "several aliases lead" if info.aliases else "no alias leads"
        return f"{what} to {info.name!r}, and one is moved in one step"
    if requested == info.name:
        return f"requested by its alias {info.aliases[0]!r}, a copy would take over"

    return ""


def columns_obstacle(info: CollectionInfo, requested: str, state: CollectionState) -> str:
    """Return why no copy can have the columns that a quantiser needs; empty if one can."""
    if state.kinds is not None:
        return "this quantizer would clip what queries send for kinds"
    return rebuild_obstacle(info, requested, state)


def begin(
    store: Store, info: CollectionInfo, state: CollectionState, *, progress: Progress
) -> Migration:
    """Plan a copy of `info` with the biases of `state`, and record it in the ledger."""
    surveyed = survey(store, info, store.chunk_rows(info), progress=progress)
    ledger = Ledger(store)

    # products, products_r2, products_r3: the copy of a copy does not pile up endings.
    base = re.sub(r"_r\d+$", "", info.name)
    names = (f"{base}_r{number}" for number in count(state.profile.epoch))
    # What depends on the index and on the vectors is decided for the copy again.
    layout = _copy_layout(store, info, state, surveyed.chunks[:1])
    copy = state.model_copy(update={"layout": layout, "source": info.name, "phase": "copying"})
    migration = Migration(
        source=info.name,
        target=next(name for name in names if not store.exists(name)),
        field=state.field,
        bank_collection=state.profile.bank.collection,
        arguments={"schema": store.schema_facts(info), "alias": info.aliases[0]},
        phase="copying",
        source_identity=identified(store, store.info(info.name, counted=False)),
        rebuilds=info.states[state.field],
        rows=surveyed.rows,
        chunks=len(surveyed.chunks),
    )

    # The record comes last: without it, nobody looks for the chunks, and the next refresh begins
    # a rebuild of its own.
    ledger.write_chunks(migration, surveyed.chunks)
    return ledger.write(migration, state=copy.model_copy(update={"migration": migration.id}))


def _copy_layout(
    store: Store, info: CollectionInfo, state: CollectionState, some: Sequence[Chunk]
) -> Layout:
    """Return the layout of the copy: the spread that the field's quantiser needs now, and constants
    that depend on the bank and, in `some` chunks, on the vectors.
    """
    layout = state.layout
    field = state.field
    spread = store.bias_spread(info, field)
    has_hints = store.takes_locality_hints(info, field) and layout.metric != "L2"
    is_other = spread != layout.spread
    if not some or not (is_other or has_hints or spread > 1):
        return layout

    rows = scan_chunk(store, info.name, field, some[0], store.chunk_rows(info))
    vectors = state.codec.decode_rows(state.codec.columns(rows.vectors, rows.rows))
    valid = ~layout.invalid(vectors)
    vectors = vectors[valid]
    rows = rows.take(np.flatnonzero(valid).tolist())
    bank = store.load_bank(state.profile.bank)

    if is_other or has_hints:
        layout = measured_on(
            with_spread(layout, spread) if is_other else layout,
            vectors,
            bank.queries.condensed.vectors,
            graph_hint=store.takes_graph_hint(info, field),
            locality_hints=store.takes_locality_hints(info, field),
            # The first chunk says too little of rows that could not be read back.
            keeps_mean=True,
            length_pull=store.takes_length_pull(info, field),
        )

    if spread > 1:
        profile = state.profile
        described = state.model_copy(update={"layout": layout})
        correction = Correction.of_profile(described, profile, bank)
        biases = correction.centred(vectors, rows)
        layout = with_bias_scale(layout, vectors, biases, profile.strength)

    return layout


def rebuildings(store: Store, collection: str) -> list[Migration]:
    """Return all rebuilds in the ledger that can be read, finished or not.

    Raises StateError if the entry of a migration from or to this collection cannot be read.
    """
    return [
        migration
        for migration in Ledger(store).migrations(collection)
        if migration.rebuilds is not None
    ]


def unfinished(rebuilds: Sequence[Migration], info: CollectionInfo) -> Migration | None:
    """Return the unfinished rebuild of this collection, if any."""
    over = {"switched", "rolled back", "finished"}
    of_this_collection = (
        rebuild
        for rebuild in reversed(rebuilds)
        if rebuild.source == info.name and is_source(info, rebuild)
    )
    return next((rebuild for rebuild in of_this_collection if rebuild.phase not in over), None)


def half_switched(rebuilds: Sequence[Migration], copy: CollectionInfo) -> Migration | None:
    """Return the rebuild that made this copy, if only its
    cutover, after the move of the alias, is unfinished.
    """
    switching = (
        rebuild
        for rebuild in rebuilds
        if rebuild.phase == "switching" and rebuild.target == copy.name and is_copy(copy, rebuild)
    )
    return next(
        (rebuild for rebuild in switching if rebuild.arguments["alias"] in copy.aliases), None
    )


def carry_out(migration: Migration, options: MigrationOptions, lease: Lease) -> Migration:
    """Copy, verify and move the alias; continue where an earlier run stopped.

    Raises as migrations do.
    """
    with opened(lease.store, migration, options, lease) as migrator:
        return migrator.run(alias=migration.arguments["alias"])
