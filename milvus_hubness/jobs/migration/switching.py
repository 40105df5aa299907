"""The names of a migration: how they move to the copy and back, with clients that write to both sides."""

from __future__ import annotations

import time
from typing import Any

from milvus_hubness.basics.logs import log
from milvus_hubness.basics.waiting import wait_seconds
from milvus_hubness.errors import StoreError, WrongPhase
from milvus_hubness.jobs.common.lease import Lease
from milvus_hubness.jobs.common.lease_records import now
from milvus_hubness.jobs.migration.corrected import has_moved
from milvus_hubness.jobs.migration.ledger import (
    Ledger,
    Migration,
    Switch,
    chosen_switch,
    switch_of_refresh,
)
from milvus_hubness.jobs.migration.options import MigrationOptions
from milvus_hubness.jobs.store.helpers import complete_rename, prepare_rename
from milvus_hubness.jobs.store.protocols import Renaming, capability
from milvus_hubness.jobs.store.records import DUAL_WRITE_PROPERTY, CollectionInfo, DualWrite


class Switching:
    """Moves the names of one migration, under its lease. migration: as in the ledger."""

    def __init__(self, lease: Lease, migration: Migration, options: MigrationOptions) -> None:
        self.migration = migration
        self._lease = lease
        self._options = options
        self._store = lease.store
        self._ledger = Ledger(lease.store)

    def _write(self, **changes: Any) -> None:
        self.migration = self._ledger.write(self.migration, **changes)

    def _report(self, event: str, **facts: Any) -> None:
        self._options.events.report(
            event, source=self.migration.source, target=self.migration.target, **facts
        )

    # -- what clients know -------------------------------------------------------------------

    def _announce(
        self, origin: str, copy: str, *, required: bool = False, former: bool = False
    ) -> None:
        """Have clients that write to `origin` write to `copy` too.

        `_wait_for_clients` waits until all clients do.
        """
        dual_write = DualWrite(collection=copy, required=required, former=former)
        if self._options.no_writers:
            return

        if self._store.info(origin).dual_write != dual_write:
            self._write(announced_at=None)
            self._store.write_property(origin, DUAL_WRITE_PROPERTY, dual_write)

        if self.migration.announced_at is None:
            self._write(announced_at=now())

    def _wait_for_clients(self, *, can_stop: bool = True) -> None:
        """Wait until all clients have read the last announcement. can_stop: raise what the throttle was
        stopped with, as soon as it is.
        """
        announced_at = self.migration.announced_at
        if announced_at is None or self._options.no_writers:
            return

        throttle = self._options.throttle
        seconds = self._options.client_ttl - (now() - announced_at).total_seconds()
        awaited = f"all clients to read the new state of {self.migration.source!r}"
        if wait_seconds(awaited, max(0.0, seconds), throttle.stopped if can_stop else None):
            throttle.check()

    def _await_clients(self) -> None:
        """Wait until all clients have read the state again."""
        if not self._options.no_writers:
            self._write(announced_at=now())
            # A name has begun to move: soon it has arrived.
            self._wait_for_clients(can_stop=False)

    def _end_dual_writes(self) -> None:
        for name in (self.migration.target, self.migration.source_now):
            self._store.write_property(name, DUAL_WRITE_PROPERTY, None)

    # -- to the copy -------------------------------------------------------------------------

    def _switch(self, source: CollectionInfo, alias: str | None, rename: bool) -> Switch:
        """Return the switch that is to come. Raises as `chosen_switch` and `switch_of_refresh`."""
        migration = self.migration
        if migration.is_refresh:
            renames = bool(migration.arguments["rename"])
            return switch_of_refresh(self._store, source, rename=renames)
        return chosen_switch(self._store, migration.source, migration.target, alias, rename)

    def _named_by_switch(self) -> tuple[str | None, bool]:
        """Return the alias that a killed run was to move, and whether it was to rename the source."""
        switch = self.migration.switch
        if switch is None or self.migration.is_refresh:
            return None, False
        if switch.source_renamed is not None:
            return None, True
        return switch.name, False

    def _step_back(self) -> bool:
        """Go back to the verified copy if a killed run was about to move the first name; return
        whether it was. All rows are compared again then: clients may have ended to write to both sides
        since, as another job announced its own copy, and plain clients write to one side.
        """
        if self.migration.phase != "switching" or has_moved(self._store, self.migration):
            return False
        # Without its switch, by which the source would be called by the name that it has not got yet.
        self._write(phase="verified", switch=None)
        return True

    def _move_name(self) -> None:
        store = self._store
        switch = self.migration.switch
        target = self.migration.target
        if switch is None:
            raise StoreError(
                f"the ledger has lost the name that moves from {self.migration.source!r}: clean, "
                "and start again"
            )

        renamed = switch.source_renamed
        if renamed:
            self._lease.include(renamed)

        self._lease.check()
        window = 0.0
        if renamed is not None:
            window = self._rename_source(switch.name, renamed)

        began = time.perf_counter()
        self._move_aliases(switch, origin=self.migration.source_now, to=target)
        if renamed is None:
            window = time.perf_counter() - began

        source = self.migration.source_now
        state = self.migration.corrected().model_copy(update={"source": source})
        if switch.source_renamed:
            store.write_property(target, state.property_name, state)
            self._lease.fence(switch.source_renamed)

        self._end_dual_writes()
        done = switch.model_copy(update={"window": round(window, 4), "at": now()})
        self._write(phase="switched", switch=done, state=state)
        self._options.events.report(
            "after-cutover", source=source, target=target, alias=done.name, window=done.window
        )

    def _rename_source(self, name: str, renamed: str) -> float:
        """Rename the source, and let its own name lead to it as an alias; return the seconds for
        which the name led nowhere.

        Clients send their requests to the name that they read. Once all of them have read the new
        one, nobody asks by `name` what is meant for the source, and the alias may move.
        """
        store = self._store
        window = 0.0
        # A run that continues may find any of these steps done.
        if not store.exists(renamed):
            prepare_rename(store, name, renamed)
            began = time.perf_counter()
            capability(store, Renaming).rename(name, renamed)
            store.point_alias(name, renamed)
            window = time.perf_counter() - began
        elif store.alias_target(name) is None:
            store.point_alias(name, renamed)

        complete_rename(store, name, renamed)
        if store.alias_target(name) != self.migration.target:
            self._await_clients()
        return window

    def _move_aliases(self, switch: Switch, *, origin: str, to: str) -> None:
        """Move aliases from one side of the migration to the other, one by one, and wait until every
        client has read where they lead to.

        Meanwhile some clients still read and write `origin`: both sides get the writes of all. An alias
        that its owner has moved away or dropped meanwhile stays so, unless that is true of all.
        """
        names = self._movable(switch)
        # Before an alias moves: clients that follow it find this at once.
        self._announce(to, origin, former=True)
        for name in names:
            self._lease.check()
            self._point(name, to)
        self._await_clients()

    def _movable(self, switch: Switch) -> list[str]:
        """Return the aliases that lead to one collection of the migration, or are to be created.

        Raises WrongPhase if none does.
        """
        migration = self.migration
        sides = {migration.source, migration.source_now, migration.target, switch.source_renamed}
        # The alias of a first migration may be new.
        new = switch.name if migration.phase == "switching" and not migration.is_refresh else None
        leads_to = {name: self._store.alias_target(name) for name in switch.names}
        movable = []
        for name, behind in leads_to.items():
            if (behind is not None and behind in sides) or (behind is None and name == new):
                movable.append(name)
            else:
                log.warning("%s", self._stray(name, behind))

        if not movable:
            raise WrongPhase(
                f"{self._stray(switch.name, leads_to[switch.name])}: let it lead to one of these, and "
                "repeat the command"
            )
        return movable

    def _stray(self, alias: str, behind: str | None) -> str:
        """Return what is said of an alias that leads to no collection of the migration any more."""
        migration = self.migration
        where = "nowhere since somebody dropped it"
        if behind is not None:
            where = f"to {behind!r} since somebody moved it"
        return (
            f"{alias!r} leads {where}, and not to {migration.source_now!r} or {migration.target!r}"
        )

    def _point(self, alias: str, collection: str) -> None:
        """Let an alias lead to one collection of the migration, unless it does already."""
        if self._store.alias_target(alias) != collection:
            self._store.point_alias(alias, collection)
            self._confirm(alias, collection)

    def _confirm(self, alias: str, collection: str) -> None:
        behind = self._store.alias_target(alias)
        if behind != collection:
            raise StoreError(
                f"alias {alias!r} leads to {behind!r}, not to {collection!r}: repeat the command"
            )

    # -- and back ----------------------------------------------------------------------------

    def _has_moved_back(self, switch: Switch) -> bool:
        """Whether a name has moved back to the source, or the source has its own name already."""
        renamed = switch.source_renamed
        if renamed is not None and not self._store.exists(renamed):
            return True
        source = renamed or self.migration.source
        return any(self._store.alias_target(name) == source for name in switch.names)

    def _require_in_use(self, switch: Switch) -> None:
        """Raise WrongPhase if no name leads to the copy: newer writes are elsewhere, and only the copy's
        would be carried back.
        """
        target = self.migration.target
        leads_to = {name: self._store.alias_target(name) for name in switch.names}
        if target in leads_to.values() or set(leads_to.values()) == {None}:
            return
        for name, behind in leads_to.items():
            if behind is not None:
                raise WrongPhase(
                    f"{name!r} leads to {behind!r}, where newer writes may be, and not to the copy "
                    f"{target!r}: roll back {name!r} itself, or let it lead to {target!r} first"
                )

    def _with_further_aliases(self, switch: Switch) -> Switch:
        """Return the switch with the aliases that the copy was given since: who reads by them would
        be left with a copy that gets no writes any more.
        """
        aliases = self._store.info(self.migration.target, counted=False).aliases
        further = sorted(set(aliases) - set(switch.names))
        return switch.model_copy(update={"others": (*switch.others, *further)})

    def _move_name_back(self, switch: Switch) -> None:
        """Give a renamed source its own name back, and point the aliases at the source."""
        store = self._store
        migration = self.migration
        renamed = switch.source_renamed
        if renamed is None:
            self._move_aliases(switch, origin=migration.target, to=migration.source)
            return

        # A run that was killed may have renamed the source already.
        if store.exists(renamed):
            # At first as an alias: a client that still asks the copy does so by the copy's name.
            if store.alias_target(switch.name) is not None:
                self._move_aliases(switch, origin=migration.target, to=renamed)
                # The alias has the source's own name, which must be free for the renaming.
                store.drop_alias(switch.name)
            prepare_rename(store, renamed, switch.name)
            capability(store, Renaming).rename(renamed, switch.name)
        complete_rename(store, renamed, switch.name)
