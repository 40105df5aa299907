"""A refresh of biases in the vectors: a migration to a copy with the new ones."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from functools import cached_property

import numpy as np

from milvus_hubness.basics.logs import log
from milvus_hubness.correction.banks.stored import StoredBank
from milvus_hubness.correction.codec.base import form_of
from milvus_hubness.correction.codec.index_hints import measured_on
from milvus_hubness.correction.codec.layout import Layout
from milvus_hubness.correction.codec.quantisation import with_bias_scale, with_spread
from milvus_hubness.correction.fitted import Correction, measured_kinds
from milvus_hubness.correction.kinds import expect_room
from milvus_hubness.correction.state import BankReference, CollectionState, Profile
from milvus_hubness.errors import LeaseHeld, StoreError
from milvus_hubness.jobs.common.corrections import keep_nearest
from milvus_hubness.jobs.common.kinds import KindRequest
from milvus_hubness.jobs.common.lease_records import now
from milvus_hubness.jobs.common.progress import as_events
from milvus_hubness.jobs.migration.clean import drop_copy
from milvus_hubness.jobs.migration.corrected import (
    begun,
    drop_former,
    expect_copyable,
    replaced_copies,
    target_of,
    unfinished,
)
from milvus_hubness.jobs.migration.ledger import Ledger, Migration, Switch
from milvus_hubness.jobs.migration.migrator import opened
from milvus_hubness.jobs.migration.plan import MigrationOptions, waits_for_clients
from milvus_hubness.jobs.migration.rights import expect_rights, grant_remarks
from milvus_hubness.jobs.migration.survey import estimated
from milvus_hubness.jobs.refresh.biases import Sample, fit
from milvus_hubness.jobs.refresh.plan import RefreshOptions, RefreshPlan
from milvus_hubness.jobs.refresh.refreshing import CopyPlan, Refreshing, RefreshResult
from milvus_hubness.jobs.store.generations import Batch
from milvus_hubness.jobs.store.records import ColumnNeeds

NO_ROOM = re.compile(r"quota (exceeded|exhausted)|no space left|memory limit exceeded", re.I)
"""What a server says that has no room for more rows: Milvus by its quotas, Qdrant by its disk."""


def copying(options: RefreshOptions) -> MigrationOptions:
    """Return the options of the migration that a refresh makes."""
    return MigrationOptions(
        client_ttl=options.client_ttl,
        throttle=options.throttle,
        events=as_events(options.progress),
    )


class ByCopy(Refreshing):
    """Carries out the refresh of biases in the vectors."""

    @property
    def expiry(self) -> str:
        if not self.info.time_to_live:
            return ""
        return (
            f"rows of {self.info.name!r} expire {self.info.time_to_live:,} s after their last write, "
            "and those of a copy are written now, so that they expire later: allow that with "
            "--restart-ttl (restart_ttl), or keep the biases beside the vectors (enable)"
        )

    def unchanged(self, plan: RefreshPlan) -> RefreshResult:
        """Note that all biases are up to date; rows without one get theirs in the next copy. A copy that
        a killed refresh left has other biases, and goes.
        """
        if not self.is_planned:
            self._drop_unfinished()
            renewed = {"refreshed_at": now(), "evidence": self.evidence(plan)}
            state = self.state.with_profile(self.state.profile.model_copy(update=renewed))
            self.write_state(keep_nearest(self.store, self.info.name, state))

        reason = "bank and parameters are unchanged"
        if self.waiting:
            reason += f"; {self.waiting:,} rows have the mean bias until the next copy (--force makes one)"
        return self.result("none", reason, scanned=0)

    def expect_possible(self) -> None:
        _ = self._switch
        kinds = KindRequest.of(self.state.kind or None)
        unhinted = replace(self.state.layout, kinds=None)
        kinds.expect_possible(with_spread(unhinted, self._needs.spread), self.state.field)
        if self.is_new and self.state.kinds is not None:
            # Later refreshes record the state of the copy beside that of its source.
            expect_room(self.state.kinds, self.state.dim, len(self.state.profiles))
        if not self.is_planned:
            target = target_of(self.store, self.info, self.state.profile.epoch + 1)
            expect_rights(self.store, self.info, target)

    @cached_property
    def _renames(self) -> bool:
        """Whether the collection's own name moves to the copy: it does if the caller used it."""
        return self.options.rename and self.requested == self.info.name

    @cached_property
    def _switch(self) -> Switch:
        return expect_copyable(self.store, self.info, self.state, rename=self._renames)

    # -- the new biases ----------------------------------------------------------------------

    @cached_property
    def _bare_layout(self) -> Layout:
        """The columns of the copy's vectors, without what is measured on them.

        The mean of L2 stays, as other profiles are fitted with it, and so do the offsets of kinds:
        vectors keep each bit from copy to copy.
        """
        present = self.state.layout
        bare = replace(
            present.without_hints(),
            slots=replace(present.slots, count=len(self.state.profiles)),
            multiple_of=self._needs.multiple_of,
        )
        if self._needs.spread == bare.slots.spread:
            return bare
        return with_spread(bare, self._needs.spread)

    @cached_property
    def _needs(self) -> ColumnNeeds:
        """What the field's index and quantiser ask of augmented vectors."""
        return self.store.column_needs(self.info, self.state.field)

    @property
    def _is_in_use(self) -> bool:
        """Whether the profile to refresh is the one that searches use."""
        return self.state.active == self.active

    @cached_property
    def _bank_in_use(self) -> StoredBank:
        """The bank of the profile that searches use."""
        return self.store.load_bank(self.state.profiles[self.active].bank, checked=False)

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
        layout = self._layout(plan, sample)
        rule = self.state.kinds
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
            profile = self.state.profiles[self.active]
            in_use = Correction.of_profile(self.state, profile, self._bank_in_use)
            strength = profile.strength
            # The sample has no values of its prior, which change the size of biases by little.
            stored = replace(in_use, prior=None).centred(sample.vectors, kinds=numbers)
        layout = with_bias_scale(layout, sample.vectors, stored, strength)
        return replace(correction, layout=layout)

    def _state(self, fresh: Profile, layout: Layout) -> CollectionState:
        """Return the state of the copy, with the refreshed profile as the active one."""
        return self.state.model_copy(update={"layout": layout}).with_profile(fresh)

    # -- the copy ----------------------------------------------------------------------------

    def planned(self, plan: RefreshPlan, correction: Correction) -> RefreshResult:
        copy = self._copy_plan(correction)
        return self.result("full", plan.reason, written=self.info.rows, copy=copy)

    def _copy_plan(self, correction: Correction) -> CopyPlan:
        """Return what the copy takes, from a page of rows."""
        store = self.store
        info = self.info
        field = self.state.field
        codec = self.state.codec
        page, reading_seconds = self._timed_page()

        def correct(rows: Batch) -> None:
            vectors = codec.decode_rows(codec.columns(rows.vectors, rows.rows))
            correction.centred(vectors, rows.items)

        vector = info.vector_fields[field]
        widths = {
            "source": codec.form.width,
            "target": form_of(correction.layout, vector.dtype).width,
        }
        estimates = estimated(page, reading_seconds, correct, vector, widths, info.rows)
        target = target_of(store, info, self.state.profile.epoch + 1)
        return CopyPlan(
            target=target,
            names=self._switch.names,
            renamed=self._switch.source_renamed,
            rows=info.rows,
            memory_bytes=estimates.memory_bytes,
            seconds=round(estimates.seconds, 3),
            waiting_seconds=waits_for_clients(
                self.options.client_ttl,
                estimates.seconds,
                alias=self._switch.name,
                rename=self._switch.source_renamed,
            ),
            remarks=tuple(self._remarks(target)),
        )

    def _timed_page(self) -> tuple[Batch, float]:
        """Return a whole page of rows, or the most that a partition has, and the seconds of its read."""
        page_rows = self.store.chunk_rows(self.info)
        most: Batch | None = None
        seconds = 0.0
        for partition in self.info.partitions:
            began = time.perf_counter()
            page = self.store.scan(
                self.info.name, self.state.field, limit=page_rows, partition=partition
            )
            if most is None or len(page) > len(most):
                most = page
                seconds = time.perf_counter() - began
            if len(page) == page_rows:
                break
        assert most is not None, "each collection has a partition"
        return most, seconds

    def _remarks(self, target: str) -> list[str]:
        """Return what the user should know before a copy of this name is made."""
        info = self.info
        remarks = grant_remarks(self.store, info.name, target)
        if self.requested == info.name and not self._renames:
            remarks.append(
                f"who reads {info.name!r} by its own name goes on reading the former copy: --rename "
                "(rename) moves that name too"
            )
        return remarks

    def adopt(self, plan: RefreshPlan, fresh: Profile, correction: Correction) -> RefreshResult:
        dropped_copy = self._drop_unfinished()
        state = self._state(fresh, correction.layout)
        return self._copied(plan, self._begun(state, dropped_copy))

    def continued(self, plan: RefreshPlan) -> RefreshResult:
        migration = plan.unfinished
        assert migration is not None, "only a copy is continued"
        if self.is_planned:
            return self.result("full", plan.reason, written=self.info.rows)
        self.lease.check()
        if migration.arguments["schema"] == self.store.schema_facts(self.info):
            return self._copied(plan, migration)

        # The copy is like the source of then: another one is made, with the same biases.
        dropped_copy = self._drop_unfinished()
        return self._copied(plan, self._begun(migration.corrected(), dropped_copy))

    def _begun(self, state: CollectionState, avoided: str) -> Migration:
        """Record a copy with the biases of this state in the ledger. avoided: a name that it must not
        have.
        """
        return begun(
            self.store,
            self.info,
            state,
            rename=self._renames,
            progress=self.options.progress,
            avoided=avoided,
        )

    def _drop_unfinished(self) -> str:
        """Drop the copy of a killed refresh, whose biases are not wanted any more. Return its name, "" for
        none: the next copy must not have it, as a call may be under way that moves a name to it, or
        drops it.
        """
        migrations = Ledger(self.store).migrations(self.info.name)
        left = unfinished(self.store, migrations, self.info, self.state.field)
        if left is None:
            return ""
        self.lease.check()
        self.lease.include(left.target)
        drop_copy(self.lease, Ledger(self.store), left)
        return left.target

    def _copied(self, plan: RefreshPlan, migration: Migration) -> RefreshResult:
        """Make the copy with the new biases, and let it take over the names."""
        try:
            with opened(self.store, migration, copying(self.options), self.lease) as migrator:
                done = migrator.run()
        except StoreError as error:
            if NO_ROOM.search(str(error)) is None:
                raise
            raise StoreError(
                f"{error}; a copy of {migration.source!r} has no room: make some, as by dropping "
                "former copies (migrate clean), and repeat the command, or keep the biases beside "
                "the vectors (enable), whose refresh makes no copy"
            ) from error

        dropped = self._drop_former(done)
        rows = (done.verified or {}).get("rows", 0)
        return self.result(
            "full",
            plan.reason,
            scanned=rows,
            written=rows,
            collection=done.target,
            epoch=done.corrected().profiles[self.state.active].epoch,
            former_copy=None if done.source_now in dropped else done.source_now,
            dropped=dropped,
        )

    def _drop_former(self, done: Migration) -> tuple[str, ...]:
        """Drop the former copies before the ones that are kept, and return their names."""
        dropped: list[str] = []
        for replacing in replaced_copies(self.store, done, self.options.keep_former):
            name = replacing.source_now
            try:
                self._drop(replacing)
            except (StoreError, LeaseHeld) as error:
                # The new biases are in use: the next refresh tries this again.
                log.warning("the former copy %r stays for now: %s", name, error)
            else:
                dropped.append(name)
        return tuple(dropped)

    def _drop(self, replacing: Migration) -> None:
        """Drop the source of a former refresh, and the bank generations that only it names."""
        name = replacing.source_now
        banks: list[BankReference] = []
        if self.store.exists(name):
            states = self.store.info(name, counted=False).states.values()
            banks = [bank for state in states for bank in state.banks]
        self.lease.include(name)
        drop_former(self.lease, replacing)
        self.drop_replaced(banks)
