"""A refresh of biases beside the vectors: a new generation of entries is filled next to the one that
searches read, and then one write of the state moves the searches.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from milvus_hubness.basics.waiting import wait_seconds
from milvus_hubness.correction.banks.stored import StoredBank
from milvus_hubness.correction.fitted import Correction
from milvus_hubness.correction.state import CollectionState, Former, Incoming, Profile
from milvus_hubness.errors import Cancelled
from milvus_hubness.jobs.beside.filling import Filled, fill_generation, fill_pending
from milvus_hubness.jobs.beside.generations import (
    flush_generation,
    is_unchecked,
    next_number,
    noted_unchecked,
    wait_unread,
)
from milvus_hubness.jobs.common.bias_backends import BiasBackend
from milvus_hubness.jobs.common.corrections import keep_nearest, load_correction
from milvus_hubness.jobs.common.fits import forget_fits
from milvus_hubness.jobs.common.inputs import read_gallery
from milvus_hubness.jobs.common.lease_records import now
from milvus_hubness.jobs.enable.plan import measure
from milvus_hubness.jobs.refresh.biases import Sample, fit
from milvus_hubness.jobs.refresh.plan import RefreshPlan
from milvus_hubness.jobs.refresh.refreshing import Action, Refreshing, RefreshResult


class Beside(Refreshing):
    """Carries out the refresh of biases beside the vectors."""

    def unchanged(self, plan: RefreshPlan) -> RefreshResult:
        """Give the present biases to rows without one; that makes all biases up to date."""
        count = self.waiting
        if not self.options.plan:
            count = self._fill(plan.bank)
            renewed = {"refreshed_at": now(), "evidence": self.evidence(plan)}
            fresh = self.state.profile.model_copy(update=renewed)
            state = self.state.with_profile(fresh)
            self.write_state(keep_nearest(self.store, self.info.name, state))

        action: Action = "pending" if count else "none"
        return self.result(
            action, "bank and parameters are unchanged", scanned=count, written=count
        )

    def expect_possible(self) -> None:
        """New biases can always be written."""

    def fitted(self, plan: RefreshPlan, sample: Sample) -> Correction:
        layout = self.state.layout
        correction = fit(self.store, self.info, self.state, layout, plan, self.options, None)
        biases = correction.centred(sample.vectors)
        mean_bias = plan.mean_bias
        prior = plan.prior
        if plan.reference is None:
            mean_bias = self.state.profile.mean_bias
            if len(biases):
                mean_bias = float(biases.mean(dtype=np.float64))
            if prior is not None:
                prior = prior.with_factor(correction.spread(sample.vectors, None))
        correction = replace(correction, mean_bias=mean_bias, prior=prior, clicks=plan.bank.clicks)
        return correction.measured(sample.vectors, None)

    def planned(self, plan: RefreshPlan, correction: Correction) -> RefreshResult:
        return self.result("full", plan.reason, written=self.info.rows)

    def adopt(self, plan: RefreshPlan, fresh: Profile, correction: Correction) -> RefreshResult:
        old = self.state.profile
        changes = {
            "slot": old.standby,
            "standby": old.slot,
            "epoch": next_number(self.state),
            "former": Former(**old.model_dump(include=set(Former.model_fields))),
        }
        return self._announced(fresh.model_copy(update=changes))._written(plan)

    def full(self, plan: RefreshPlan) -> RefreshResult:
        # What an unfinished refresh has replaced of the former generation must be filled first.
        if self.options.revert and self.state.incoming is None and not self.options.plan:
            return self._gone_back(plan)
        return super().full(plan)

    def _gone_back(self, plan: RefreshPlan) -> RefreshResult:
        """Have searches read the former generation, by one write of the state, and then give the rows
        that were written since their biases in it.
        """
        old = self.state.profile
        assert old.former is not None, "the plan has found it"
        changes = {name: getattr(old.former, name) for name in Former.model_fields}
        changes |= {
            "slot": old.standby,
            "standby": old.slot,
            "former": Former(**old.model_dump(include=set(Former.model_fields))),
            "refreshed_at": now(),
        }
        state = self.state.with_profile(old.model_copy(update=changes))
        state = keep_nearest(self.store, self.info.name, state)
        awaited = f"all clients to read the new state of {self.info.name!r}"
        noted = noted_unchecked(self.store, self.info, state.field)
        with self.lease.explained(), noted:
            self.write_state(state)
            wait_seconds(awaited, self.options.client_ttl, self.options.stop)
            backend = BiasBackend(self.store, self.info, state)
            correction = load_correction(self.store, state, state.profile, self.options.engine)
            filled = self._filled(backend, state.profile.slot, correction, "writing biases")
            backend.wait_visible()
            self.write_state(self._with_miss_rate(state, plan))

        return self.result(
            "full",
            plan.reason,
            scanned=filled.rows,
            written=filled.written,
            epoch=state.profile.epoch,
        )

    def continued(self, plan: RefreshPlan) -> RefreshResult:
        if self.options.plan:
            return self.result("full", plan.reason, written=self.info.rows)
        self.lease.check()
        return self._written(plan)

    def _announced(self, fresh: Profile) -> Beside:
        """Have clients write old and new biases with every row from now on; return the job with the
        new state.
        """
        wait_unread(self.info, self.state, self.options.client_ttl, self.options.stop)
        abandoned = self.state.incoming
        incoming = Incoming(name=self.state.active, profile=fresh)
        state = self.state.model_copy(update={"incoming": incoming})

        # The note comes first: a killed job must not leave a bank that nobody knows of.
        self.spare.note([abandoned.profile.bank] if abandoned else [])
        self.write_state(state)
        self.spare.drop(self.spare.noted(), state)
        if abandoned:
            self._forget_fit(abandoned.profile, abandoned.name, state)
        return replace(self, state=state)

    def _written(self, plan: RefreshPlan) -> RefreshResult:
        """Fill the announced generation, and switch to it."""
        incoming = self.state.incoming
        assert incoming is not None, "the biases are announced before"
        slot = incoming.profile.slot

        # From then on all clients write both. A killed job may not have waited so long.
        awaited = f"all clients to read the new state of {self.info.name!r}"
        wait_seconds(awaited, self.options.client_ttl, self.options.stop)
        with self.lease.explained():
            backend = BiasBackend(self.store, self.info, self.state)
            correction = load_correction(
                self.store, self.state, incoming.profile, self.options.engine
            )
            filled = self._filled(backend, slot, correction, "writing biases")
            flush_generation(self.store, self.state, slot)
            backend.wait_visible()

            fresh = incoming.profile.model_copy(update={"refreshed_at": now()})
            state = self.state.model_copy(update={"incoming": None})
            state = state.with_profile(fresh, incoming.name)
            state = self._with_miss_rate(state, plan)
            state = keep_nearest(self.store, self.info.name, state)

            # The switch is one write of one property, so that each search reads either only old
            # biases or only new ones. The note of the replaced bank precedes it.
            self.spare.note({*self.state.profile.banks} - {*state.profile.banks})
            self.write_state(state)

        self.spare.drop(self.spare.noted(), state)
        self._forget_fit(self.state.profile, self.state.active, state)
        return self.result(
            "full", plan.reason, scanned=filled.rows, written=filled.written, epoch=fresh.epoch
        )

    def _fill(self, bank: StoredBank) -> int:
        """Write the biases of the bank in use to rows without one; return how many were."""
        backend = BiasBackend(self.store, self.info, self.state)
        field = self.state.field
        was_killed = is_unchecked(self.store, self.info, field)
        count = 0
        if self.waiting or was_killed:
            with self.lease.explained(), noted_unchecked(self.store, self.info, field):
                profile = self.state.profile
                correction = load_correction(
                    self.store, self.state, profile, self.options.engine, {profile.bank: bank}
                )
                progress = self.options.progress
                count = fill_pending(backend, correction, self.waiting, progress, self._admit)
                if was_killed:
                    filled = self._filled(backend, profile.slot, correction, "checking biases")
                    count += filled.written

        backend.wait_visible()
        return count

    def _filled(
        self, backend: BiasBackend, slot: int, correction: Correction, doing: str
    ) -> Filled:
        """Write the entries of a slot that are not right yet. doing: what the progress says."""
        return fill_generation(backend, slot, correction, doing, self.options.progress, self._admit)

    def _admit(self, rows: int) -> None:
        if self.options.stop.is_set():
            raise Cancelled(
                f"stopped as requested: the next refresh of {self.info.name!r} carries on from here"
            )
        if rows:
            self.options.throttle.admit(rows)

    def _forget_fit(self, profile: Profile, name: str, state: CollectionState) -> None:
        """Delete the note of a fit that the present state does not name."""
        former = state.model_copy(update={"profiles": {name: profile}, "active": name})
        named = [state]
        if state.incoming is not None:
            named.append(state.with_profile(state.incoming.profile, state.incoming.name))
        forget_fits(self.store, [former], named)

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
            state.codec.side_prefix,
            self.store.most_candidates(self.info),
        )
        return state.model_copy(update={"reranking": measured})
