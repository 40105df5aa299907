"""A refresh of biases beside the vectors: a new generation of entries is filled next to the one that
searches read, and then one write of the state moves the searches.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np

from milvus_hubness.basics.waiting import wait_seconds
from milvus_hubness.correction.banks.stored import StoredBank
from milvus_hubness.correction.codec.beside import SLOTS
from milvus_hubness.correction.fitted import Correction
from milvus_hubness.correction.state import CollectionState, OtherGeneration, Profile
from milvus_hubness.errors import EmptyCollection, InvalidInput
from milvus_hubness.jobs.beside.entries import Entries
from milvus_hubness.jobs.beside.filling import Filled, fill_generation, fill_pending
from milvus_hubness.jobs.beside.generations import (
    flush_generation,
    is_unchecked,
    noted_unchecked,
    wait_unread,
)
from milvus_hubness.jobs.common.corrections import keep_nearest, load_correction
from milvus_hubness.jobs.common.fits import forget_fits
from milvus_hubness.jobs.common.gallery import read_gallery
from milvus_hubness.jobs.common.lease_records import now
from milvus_hubness.jobs.enable.plan import measure
from milvus_hubness.jobs.refresh.biases import fit
from milvus_hubness.jobs.refresh.plan import RefreshPlan
from milvus_hubness.jobs.refresh.refreshing import Refreshing
from milvus_hubness.jobs.refresh.result import Action, RefreshResult
from milvus_hubness.jobs.refresh.sample import Sample, sampled
from milvus_hubness.jobs.store.protocols import confirm_bank


class BesideVectors(Refreshing):
    """Carries out the refresh of biases beside the vectors."""

    def unchanged(self, plan: RefreshPlan) -> RefreshResult:
        """Give the present biases to rows without one; that makes all biases up to date."""
        count = self.waiting
        if not self.is_planned:
            count = self._fill(plan.bank)
            self.note_unchanged(plan)

        action: Action = "pending" if count else "none"
        return self.result(
            action, "bank and parameters are unchanged", scanned=count, written=count
        )

    def expect_possible(self) -> None:
        """New biases can always be written."""

    def fitted(self, plan: RefreshPlan, sample: Sample) -> Correction:
        layout = self.state.layout
        correction = fit(self.stored, layout, plan, self.options, None)
        biases = correction.centred(sample.vectors)
        mean_bias = self.state.profile.mean_bias
        if len(biases):
            mean_bias = float(biases.mean(dtype=np.float64))
        prior = plan.prior
        if prior is not None:
            prior = prior.with_factor(correction.spread(sample.vectors, None))
        correction = replace(correction, mean_bias=mean_bias, prior=prior, clicks=plan.bank.clicks)
        return correction.measured(sample.vectors, None)

    def planned(self, plan: RefreshPlan, correction: Correction) -> RefreshResult:
        return self.result("full", plan.reason, written=self.info.rows)

    def adopt(self, plan: RefreshPlan, fresh: Profile, correction: Correction) -> RefreshResult:
        # After a rollback, the former generation has the higher epoch.
        former_epochs = [self.state.other.profile.epoch] if self.state.other is not None else []
        placed = {
            "slot": SLOTS - 1 - self.state.profile.slot,
            "epoch": 1 + max([self.state.profile.epoch, *former_epochs]),
        }
        job = self._announced("filling", fresh.model_copy(update=placed))
        potentials = plan.bank.queries.of_queries(correction.fitted.potentials)
        stored = replace(plan.bank, potentials=potentials)
        confirm_bank(self.store, fresh.bank, stored, self.state.metric)
        return job._written(plan.bank, plan.reason)

    def continued(self, plan: RefreshPlan) -> RefreshResult:
        if self.is_planned:
            return self.result("full", plan.reason, written=self.info.rows)
        self.lease.check()
        return self._written(plan.bank, plan.reason)

    def taken_back(self) -> RefreshResult:
        """Let searches read the former generation again, which first gets the biases of the rows that
        were written since; or give up the refresh that is unfinished. A killed one is carried on.

        Raises InvalidInput without a former generation.
        """
        other = self.state.other
        if other is None:
            raise InvalidInput(f"{self.info.name!r} has no earlier biases: it was never refreshed")
        if other.use == "filling":
            self._replace_other(None)
            return self.result("none", "the unfinished refresh was given up", scanned=0)

        # Before clients are to write its biases, for which they read it too.
        bank = self.store.load_bank(other.profile.bank)
        job = self
        if other.use == "former":
            # The rows count as fitted now: what a refit changed would be due again at once.
            profile = other.profile.model_copy(update={"fitted_at": now()})
            sample = sampled(self.stored, None, self.options.progress)
            self.fit_of(profile).write(sample.key_count, sample.fitted)
            job = self._announced("returning", profile)
        return job._written(bank, "the last refresh was taken back")

    def _announced(self, use: Literal["filling", "returning"], profile: Profile) -> BesideVectors:
        """Have clients write the biases of this generation too with every row from now on; return the
        job with the new state.
        """
        wait_unread(self.info, self.state, self.options.client_ttl, self.options.throttle.stopped)
        return self._replace_other(OtherGeneration(use=use, profile=profile))

    def _replace_other(self, other: OtherGeneration | None) -> BesideVectors:
        """Write the state with another second generation, and drop the bank of the one before unless
        it has further use; return the job with the new state.
        """
        replaced = self.state.other
        state = self.state.model_copy(update={"other": other})
        self.write_state(state)
        if replaced:
            self.drop_replaced([replaced.profile.bank], state)
            self._forget_fit(replaced.profile, state)
        return replace(self, state=state)

    def _written(self, bank: StoredBank, reason: str) -> RefreshResult:
        """Fill the announced generation, and switch to it. bank: its bank."""
        filling = self.state.filling
        assert filling is not None, "the generation is announced before"

        # From then on all clients write both. A killed job may not have waited so long.
        awaited = f"all clients to read the new state of {self.info.name!r}"
        wait_seconds(awaited, self.options.client_ttl, self.options.throttle.stopped)
        with self.lease.explained():
            entries = Entries(self.store, self.info, self.state)
            correction = load_correction(self.store, self.state, filling)
            filled = self._filled(entries, filling.slot, correction, "writing biases")
            flush_generation(self.store, self.state, filling.slot)
            entries.wait_visible({filling.slot: correction})

            fresh = filling.model_copy(update={"refreshed_at": now()})
            former = OtherGeneration(use="former", profile=self.state.profile)
            state = self.state.model_copy(update={"other": former}).with_profile(fresh)
            state = self._with_miss_rate(state, bank)
            state = keep_nearest(self.store, self.info.name, state)

            # The switch is one write of one property, so that each search reads either only old
            # biases or only new ones.
            self.write_state(state)

        self._forget_fit(self.state.profile, state)
        return self.result(
            "full", reason, scanned=filled.rows, written=filled.written, epoch=fresh.epoch
        )

    def _fill(self, bank: StoredBank) -> int:
        """Write the biases of the bank in use to rows without one; return how many were."""
        entries = Entries(self.store, self.info, self.state)
        field = self.state.field
        was_killed = is_unchecked(self.store, self.info, field)
        count = 0
        if self.waiting or was_killed:
            with self.lease.explained(), noted_unchecked(self.store, self.info, field):
                profile = self.state.profile
                correction = load_correction(self.store, self.state, profile, {profile.bank: bank})
                progress = self.options.progress
                count = fill_pending(entries, correction, self.waiting, progress, self._admit)
                if was_killed:
                    filled = self._filled(entries, profile.slot, correction, "checking biases")
                    count += filled.written

        entries.wait_visible()
        return count

    def _filled(self, entries: Entries, slot: int, correction: Correction, doing: str) -> Filled:
        """Write the entries of a slot that are not right yet. doing: what the progress says."""
        return fill_generation(entries, slot, correction, doing, self.options.progress, self._admit)

    def _admit(self, rows: int) -> None:
        self.options.throttle.check()
        if rows:
            self.options.throttle.admit(rows)

    def _forget_fit(self, profile: Profile, state: CollectionState) -> None:
        """Delete the note of a fit that the present state does not name."""
        filling = [state.with_profile(state.filling)] if state.filling is not None else []
        forget_fits(self.store, [state.with_profile(profile)], [state, *filling])

    def _with_miss_rate(self, state: CollectionState, bank: StoredBank) -> CollectionState:
        """Return the state with a new measurement of the corrected answers that candidates miss; without
        a row that can be searched, the former one stays.
        """
        if state.allowed_miss_rate is None:
            return state

        progress = self.options.progress
        try:
            gallery = read_gallery(self.store, self.info, state.field, progress=progress)
        except EmptyCollection:
            return state
        correction = load_correction(self.store, state, state.profile)
        measured, _ = measure(
            gallery,
            correction,
            bank.queries,
            state.profile.strength,
            state.allowed_miss_rate,
            state.codec.side_prefix,
            self.store.most_candidates(self.info),
        )
        return state.model_copy(update={"reranking": measured})
