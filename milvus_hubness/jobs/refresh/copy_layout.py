"""The columns of the vectors of a refresh's copy, and the correction that fits into them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from milvus_hubness.correction.banks.stored import StoredBank
from milvus_hubness.correction.codec.index_hints import measured_on
from milvus_hubness.correction.codec.layout import Layout
from milvus_hubness.correction.codec.quantisation import with_bias_scale, with_spread
from milvus_hubness.correction.fitted import Correction, measured_kinds
from milvus_hubness.correction.kinds import expect_room
from milvus_hubness.jobs.common.kinds import KindRequest
from milvus_hubness.jobs.common.stored_biases import StoredBiases
from milvus_hubness.jobs.refresh.biases import fit
from milvus_hubness.jobs.refresh.options import RefreshOptions
from milvus_hubness.jobs.refresh.plan import RefreshPlan
from milvus_hubness.jobs.refresh.sample import Sample
from milvus_hubness.jobs.store.records import ColumnNeeds


@dataclass(frozen=True)
class CopyLayout:
    """How the vectors of the copy are to be stored."""

    stored: StoredBiases
    """The rows, with the profile to refresh as the active one of their state."""
    active: str
    """The profile that searches use."""
    options: RefreshOptions

    def expect_possible(self, *, is_new: bool) -> None:
        """Raise CannotMigrate or InvalidInput if the copy could not have its columns.

        is_new: whether the profile to refresh is new.
        """
        state = self.stored.state
        kinds = KindRequest.of(state.kind or None)
        unhinted = replace(state.layout, kinds=None)
        kinds.expect_possible(with_spread(unhinted, self._needs.spread), state.field)
        if is_new and state.kinds is not None:
            # Later refreshes record the state of the copy beside that of its source.
            expect_room(state.kinds, state.dim, len(state.profiles))

    @cached_property
    def _bare_layout(self) -> Layout:
        """The columns of the copy's vectors, without what is measured on them.

        The mean of L2 stays, as other profiles are fitted with it, and so do the offsets of kinds:
        vectors keep each bit from copy to copy.
        """
        present = self.stored.state.layout
        bare = replace(
            present.without_hints(),
            slots=replace(present.slots, count=len(self.stored.state.profiles)),
            multiple_of=self._needs.multiple_of,
        )
        if self._needs.spread == bare.slots.spread:
            return bare
        return with_spread(bare, self._needs.spread)

    @cached_property
    def _needs(self) -> ColumnNeeds:
        """What the field's index and quantiser ask of augmented vectors."""
        return self.stored.store.column_needs(self.stored.info, self.stored.state.field)

    @property
    def _is_in_use(self) -> bool:
        """Whether the profile to refresh is the one that searches use."""
        return self.stored.state.active == self.active

    @cached_property
    def _bank_in_use(self) -> StoredBank:
        """The bank of the profile that searches use."""
        return self.stored.store.load_bank(
            self.stored.state.profiles[self.active].bank, checked=False
        )

    def _layout(self, plan: RefreshPlan, sample: Sample) -> Layout:
        """Return the layout of the copy, but for the scale of a spread bias."""
        # Index hints and the scale serve most searches: those by the profile in use.
        bank = plan.bank if self._is_in_use else self._bank_in_use
        return measured_on(
            self._bare_layout,
            sample.vectors,
            bank.queries.condensed.vectors,
            keeps_mean=True,
            **self._needs.hints,
        )

    def fitted(self, plan: RefreshPlan, sample: Sample) -> Correction:
        """Return the correction of the new biases, with the layout of the rows to write."""
        layout = self._layout(plan, sample)
        rule = self.stored.state.kinds
        numbers = sample.kinds(rule)
        kinds = measured_kinds(layout, rule, sample.vectors, numbers, plan.bank.queries)
        correction = fit(self.stored, layout, plan, self.options, kinds)

        biases = correction.centred(sample.vectors, kinds=numbers)
        mean_bias = float(biases.mean(dtype=np.float64)) if len(biases) else 0.0
        prior = plan.prior
        if prior is not None:
            prior = prior.with_factor(correction.spread(sample.vectors, numbers))
        correction = replace(correction, mean_bias=mean_bias, prior=prior, clicks=plan.bank.clicks)
        correction = correction.measured(sample.vectors, numbers)
        if layout.slots.spread == 1:
            return correction

        strength = plan.strength
        everything = np.ones(len(biases), np.bool_)
        stored = correction.with_prior(biases - np.float32(mean_bias), everything, sample.items)
        if not self._is_in_use:
            profile = self.stored.state.profiles[self.active]
            in_use = Correction.of_profile(self.stored.state, profile, self._bank_in_use)
            strength = profile.strength
            # The sample has no values of its prior, which change the size of biases by little.
            stored = replace(in_use, prior=None).centred(sample.vectors, kinds=numbers)
        layout = with_bias_scale(layout, sample.vectors, stored, strength)
        return replace(correction, layout=layout)
