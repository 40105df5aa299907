"""A refresh of biases in the vectors: a migration to a copy with the new ones."""

from __future__ import annotations

import re
from functools import cached_property

from milvus_hubness.basics.logs import log
from milvus_hubness.correction.codec.layout import Layout
from milvus_hubness.correction.fitted import Correction
from milvus_hubness.correction.state import BankReference, CollectionState, Profile
from milvus_hubness.errors import LeaseHeld, StoreError
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
from milvus_hubness.jobs.migration.options import MigrationOptions
from milvus_hubness.jobs.migration.rights import expect_rights, grant_remarks
from milvus_hubness.jobs.migration.run import opened
from milvus_hubness.jobs.refresh.copy_layout import CopyLayout
from milvus_hubness.jobs.refresh.copy_plan import copy_plan
from milvus_hubness.jobs.refresh.options import RefreshOptions
from milvus_hubness.jobs.refresh.plan import RefreshPlan
from milvus_hubness.jobs.refresh.refreshing import Refreshing
from milvus_hubness.jobs.refresh.result import RefreshResult
from milvus_hubness.jobs.refresh.sample import Sample

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
            self.note_unchanged(plan)

        reason = "bank and parameters are unchanged"
        if self.waiting:
            reason += f"; {self.waiting:,} rows have the mean bias until the next copy (--force makes one)"
        return self.result("none", reason, scanned=0)

    def expect_possible(self) -> None:
        _ = self._switch
        self._layout.expect_possible(is_new=self.is_new)
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
    def _layout(self) -> CopyLayout:
        return CopyLayout(self.stored, self.active, self.options)

    def fitted(self, plan: RefreshPlan, sample: Sample) -> Correction:
        return self._layout.fitted(plan, sample)

    def _state(self, fresh: Profile, layout: Layout) -> CollectionState:
        """Return the state of the copy, with the refreshed profile as the active one."""
        return self.state.model_copy(update={"layout": layout}).with_profile(fresh)

    # -- the copy ----------------------------------------------------------------------------

    def planned(self, plan: RefreshPlan, correction: Correction) -> RefreshResult:
        target = target_of(self.store, self.info, self.state.profile.epoch + 1)
        copy = copy_plan(
            self.stored,
            correction,
            target,
            self._switch,
            client_ttl=self.options.client_ttl,
            remarks=self._remarks(target),
        )
        return self.result("full", plan.reason, written=self.info.rows, copy=copy)

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
