"""The migrator: it carries a migration from its plan to the cutover, continues it, and takes it back."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from milvus_hubness.basics.logs import log
from milvus_hubness.basics.notebooks import ShownAsTable
from milvus_hubness.basics.waiting import wait_seconds
from milvus_hubness.errors import NotCaughtUp, ResumeRefused, StoreError, WrongPhase
from milvus_hubness.jobs.common.corrections import NONE_READ, Banks, keep_nearest
from milvus_hubness.jobs.common.fits import DrawnKeys, note_fits
from milvus_hubness.jobs.common.lease import Lease
from milvus_hubness.jobs.common.lease_records import now
from milvus_hubness.jobs.common.plan import Plan
from milvus_hubness.jobs.migration.catch_up import (
    Pass,
    expect_chunks,
    pair_of,
    run_pass,
    validate_index,
    verified,
    warm,
)
from milvus_hubness.jobs.migration.clean import drop_copy
from milvus_hubness.jobs.migration.compare import Pair
from milvus_hubness.jobs.migration.copy import (
    KEYS_NAMED,
    Recorder,
    carry_samples,
    copy_chunks,
    prepared,
)
from milvus_hubness.jobs.migration.corrected import has_moved, is_half_switched
from milvus_hubness.jobs.migration.ledger import (
    Ledger,
    Migration,
    Switch,
    chosen_switch,
    switch_of_refresh,
)
from milvus_hubness.jobs.migration.plan import MigrationOptions, PlannedCopy
from milvus_hubness.jobs.migration.presence import (
    identified,
    require_collections,
    require_copy,
    require_source,
)
from milvus_hubness.jobs.migration.rights import carry_grants
from milvus_hubness.jobs.store.helpers import (
    complete_rename,
    list_bank,
    list_helpers,
    prepare_rename,
)
from milvus_hubness.jobs.store.ownership import LEDGER, CollectionId
from milvus_hubness.jobs.store.protocols import (
    Renaming,
    capability,
    confirm_bank,
)
from milvus_hubness.jobs.store.records import DUAL_WRITE_PROPERTY, CollectionInfo, DualWrite

MOST_PASSES = 5
"""How often all rows are compared before the copy counts as one that does not catch up."""

UNFINISHED = {"copying", "catching up", "verified", "rolled back"}
"""Phases from which a run copies, catches up and verifies. A verification holds only for the moment
of its end.
"""
POSTPONED_SECONDS = 30
"""Seconds between two passes while the cutover is postponed."""


@dataclass(frozen=True)
class Rollback(ShownAsTable):
    """The result of a rollback."""

    alias: str
    """It leads to `source` again, unless it is its own name."""
    source: str
    target: str
    """The copy; `source` itself if the biases are beside the vectors."""
    carried: int
    """Number of rows written since the cutover that were carried back."""
    reason: str = "the switch to the copy was taken back"
    """What was taken back."""

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain data."""
        return asdict(self)


class Migrator:
    """Carries one migration out, under its lease. migration: as in the ledger."""

    def __init__(self, lease: Lease, migration: Migration, options: MigrationOptions) -> None:
        self.migration = migration
        self._lease = lease
        self._options = options
        self._store = lease.store
        self._ledger = Ledger(lease.store)
        self._saved_banks: Banks = NONE_READ
        """The bank that this run has saved."""

    def run(
        self,
        plan: Plan[PlannedCopy] | None = None,
        *,
        alias: str | None = None,
        rename: bool = False,
    ) -> Migration:
        """Run the steps that are left; the last, cutover, only with alias or rename, or if this is a
        refresh, which moves all names of its source.

        plan: of a new migration.
        """
        migration = self.migration
        options = self._options
        migration.expect_name(alias, rename)
        self._require_collections()
        if migration.phase != "preparing":
            self._report_continuing()
        if migration.phase == "rolling back":
            self.roll_back()
            return self.migration

        named = self._named_by_switch()
        if self._step_back():
            # The names that this run is to move are those that the killed one was to move.
            alias, rename = named
            migration = self.migration

        moves_name = migration.is_refresh or alias is not None or rename
        if migration.phase in {"preparing", *UNFINISHED}:
            source = self._store.info(migration.source_now, counted=False)
            self._require_unchanged(source)
            if moves_name:
                self._switch(source, alias, rename)

        if migration.phase == "preparing":
            self._prepare(plan, source)
        if self.migration.phase in UNFINISHED:
            source = self._store.info(migration.source)
            if self.migration.phase == "copying":
                self._create_copy(source)
            self._announce(migration.source, migration.target)
            if self.migration.phase == "copying":
                self._copy(source, plan)
            if moves_name and options.confirm is None and not self._is_postponed:
                self._verify_and_cut_over(source, alias, rename)
                return self.migration

            self._wait_for_clients()
            self._verify(source, self._pair())

        # A name that has begun to move must arrive, whoever would decide otherwise now.
        is_switching = self.migration.phase == "switching"
        if is_switching or (moves_name and self._is_confirmed()):
            self.cut_over(alias, rename)
        return self.migration

    def _verify_and_cut_over(self, source: CollectionInfo, alias: str | None, rename: bool) -> None:
        """Verify a copy and let a name move to it at once, with one comparison of all rows for both.

        Without `_writes_to_both`, a second one would have to look for writes that miss the copy.
        """
        pair = self._pair()
        with self._writes_to_both(pair):
            self._verify(source, pair)
            warm(self._store, self.migration)
            switch = self._last_switch(alias, rename)
            # The control file may have postponed the cutover meanwhile.
            is_postponed = self._is_postponed
            if not is_postponed:
                self._report("before-cutover", alias=switch.name)

        if is_postponed:
            self._announce(pair.origin.collection, pair.copy.collection)
            self.cut_over(alias, rename)
            return

        self._write(phase="switching", switch=switch)
        self._move_name()

    def _last_switch(self, alias: str | None, rename: bool) -> Switch:
        """Return the switch that comes now, of the names that the source has now.

        The copy is like the source of the beginning: raises ResumeRefused if somebody has changed its
        schema, partitions or indexes since. Grants that were given since are carried over.
        """
        source = self._store.info(self.migration.source_now)
        self._require_unchanged(source)
        if self.migration.is_refresh:
            carry_grants(self._store, source.name, self.migration.target)
        switch = self._switch(source, alias, rename)

        # A late call of another migration would lead one of these names to its own copy.
        for other in self._ledger.migrations(source.name):
            if other.id != self.migration.id and not other.moving.isdisjoint(switch.names):
                other.expect_no_move()
        return switch

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

    def _named_by_switch(self) -> tuple[str | None, bool]:
        """Return the alias that a killed run was to move, and whether it was to rename the source."""
        switch = self.migration.switch
        if switch is None or self.migration.is_refresh:
            return None, False
        if switch.source_renamed is not None:
            return None, True
        return switch.name, False

    def _has_moved_back(self, switch: Switch) -> bool:
        """Whether a name has moved back to the source, or the source has its own name already."""
        renamed = switch.source_renamed
        if renamed is not None and not self._store.exists(renamed):
            return True
        source = renamed or self.migration.source
        return any(self._store.alias_target(name) == source for name in switch.names)

    def _switch(self, source: CollectionInfo, alias: str | None, rename: bool) -> Switch:
        """Return the switch that is to come. Raises as `chosen_switch` and `switch_of_refresh`."""
        migration = self.migration
        if migration.is_refresh:
            renames = bool(migration.arguments["rename"])
            return switch_of_refresh(self._store, source, rename=renames)
        return chosen_switch(self._store, migration.source, migration.target, alias, rename)

    def _is_confirmed(self) -> bool:
        """Whether the name may move: to a copy that is verified only if the caller agrees."""
        confirm = self._options.confirm
        return self.migration.phase != "verified" or confirm is None or confirm(self.migration)

    def _report_continuing(self) -> None:
        """Report how far earlier runs came: listeners of this run have not heard of it."""
        migration = self.migration
        chunks = self._ledger.chunks(self.migration)
        copied = migration.rows
        if migration.phase == "copying":
            copied = sum(chunk.rows for chunk in chunks if chunk.seconds is not None)
        self._report("continuing", phase=migration.phase, rows=copied, rows_total=migration.rows)

    def _require_collections(self) -> None:
        """Raise CollectionNotFound or CollectionExists if the ledger's record is no longer true."""
        migration = self.migration
        store = self._store
        if migration.phase == "preparing":
            return

        require_source(store, migration)
        # Before the first chunk is copied, the copy may not exist yet.
        if migration.phase != "copying" or any(
            chunk.seconds for chunk in self._ledger.chunks(migration)
        ):
            require_copy(store, migration)

    def _write(self, **changes: Any) -> None:
        self.migration = self._ledger.write(self.migration, **changes)

    def _report(self, event: str, **facts: Any) -> None:
        self._options.events.report(
            event, source=self.migration.source, target=self.migration.target, **facts
        )

    # -- plan, prepare, copy -----------------------------------------------------------------

    def _require_unchanged(self, source: CollectionInfo) -> None:
        schema = self.migration.arguments["schema"]
        if schema != self._store.schema_facts(source):
            remedy = "use --restart"
            if self.migration.is_refresh:
                remedy = "refresh again, which makes another copy"
            raise ResumeRefused(
                f"the schema, the partitions or the indexes of {source.name!r} have changed since the "
                f"migration began: {remedy}"
            )

    def _prepare(self, plan: Plan[PlannedCopy] | None, source: CollectionInfo) -> None:
        if plan is None:
            raise ResumeRefused(
                f"the migration of {self.migration.source!r} ended before anything was copied: "
                "pass its bank again"
            )

        self._write(source_identity=identified(self._store, source))
        self.migration, self._saved_banks = prepared(
            self._store, self._ledger, plan, self.migration
        )
        self._options.throttle.check()

    def _create_copy(self, source: CollectionInfo) -> None:
        migration = self.migration
        field = self.migration.field
        planned = migration.indexed(source)
        self._store.validate_index(planned.vector_fields[field], source.vector_fields[field])
        if migration.is_refresh:
            # Whoever may use the source is to write to the copy as soon as it is announced.
            carry_grants(self._store, source.name, migration.target)
        # Before the copy exists, which nobody may read without them; then with its number.
        self._list_banks(source, CollectionId(name=migration.target))
        self._store.create_copy(planned, migration.target, migration.corrected())

        for bank, stored in self._saved_banks.items():
            confirm_bank(self._store, bank, stored, migration.corrected().metric)

        copy = self._store.info(migration.target, counted=False)
        self._list_banks(source, copy.collection_id)
        self._lease.fence(migration.target)

    def _list_banks(self, source: CollectionInfo, copy: CollectionId) -> None:
        """List the banks of the copy, which has the states of the source's other fields too."""
        list_bank(self._store, copy, self.migration.bank_collection)
        list_helpers(self._store, [], source.states.values(), source.collection_id, copy)

    def _copy(self, source: CollectionInfo, plan: Plan[PlannedCopy] | None) -> None:
        options = self._options
        target = self.migration.target
        self._report("before-copy", rows_total=self.migration.rows)
        # A scan may lag behind; a count, which is strongly consistent, lets the server catch up.
        self._store.count(source.name)

        # The bank that this run has just saved and read back is not read a second time. The
        # verification reads it from the database.
        pair = pair_of(self._store, self.migration, banks=self._saved_banks)
        recorder = Recorder(self.migration, self._ledger, options.events)
        page_rows = plan.body.survey.page_rows if plan else self._store.chunk_rows(source)
        alone = options.no_writers and self.migration.announced_at is None
        copy_chunks(pair, recorder, options.throttle, page_rows=page_rows, alone=alone)
        self._store.flush(target)
        self._report("after-copy", rows=self.migration.rows)

        keys = tuple(key for chunk in recorder.chunks for key in chunk.invalid_keys)
        invalid = sum(chunk.invalid for chunk in recorder.chunks)
        self._write(phase="catching up", invalid=invalid, invalid_keys=keys[: 4 * KEYS_NAMED])

    # -- catch up, verify --------------------------------------------------------------------

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

    def _pass(self, pair: Pair, partitions: Sequence[str | None]) -> Pass:
        number = self.migration.passes + 1
        done = run_pass(pair, partitions, self.migration, self._options, number=number)
        self._write(passes=number)
        return done

    def _until_equal(self, pair: Pair, partitions: Sequence[str | None]) -> tuple[Pass, int]:
        """Run passes until one finds no difference.

        Return it, and the number of carried rows. Raises NotCaughtUp.
        """
        carried = 0
        missed = 0
        example = ""
        former_example = ""
        for number in range(MOST_PASSES):
            done = self._pass(pair, partitions)
            if not done.differing:
                return done, carried

            carried += done.differing
            # What differs after the first pass was written since, and to the origin alone.
            missed += done.differing if number else 0
            former_example = example
            example = done.example

        # A row that is carried over and differs as before was not written in between.
        is_stuck = bool(example) and example == former_example
        raise NotCaughtUp(
            f"{pair.copy.collection!r} does not catch up with {pair.origin.collection!r}: each of "
            f"{MOST_PASSES} passes found rows that differ, the last {done.differing}, among them "
            f"{', '.join(done.defects)}{example and f'; {example}'}. "
            f"{_stuck_row(pair) if is_stuck else self._writes_to_one(pair, missed)}"
        )

    def _writes_to_one(self, pair: Pair, missed: int) -> str:
        """Return why rows differ again and again, as the likely cause, and the remedy."""
        origin = pair.origin.collection
        if self._options.no_writers:
            return (
                f"{missed:,} rows were written while this ran, and --no-writers says that nobody "
                "writes: stop the clients, or leave it out"
            )
        return (
            f"{missed:,} rows were written to {origin!r} and by no dual write, though all clients "
            f"have had {self._options.client_ttl:g} s to read that they are to write to both. The "
            f"likely cause is a client without the rights to write to {pair.copy.collection!r} or "
            f"to read {LEDGER!r} (its log says so), one with an old version or a longer state_ttl, "
            "or one that is no HubnessClient: grant it the rights, or stop it, and run the "
            "migration again"
        )

    @contextmanager
    def _writes_to_both(self, pair: Pair) -> Iterator[None]:
        """Have writes fail if they do not reach both collections, from the start of this block on; not
        any more if it fails or is stopped.
        """
        origin = pair.origin.collection
        copy = pair.copy.collection
        try:
            self._announce(origin, copy, required=True)
            self._wait_for_clients()
            yield
        except BaseException:
            # Without a cutover, the application's writes need not reach the copy.
            if not self._options.no_writers:
                self._store.write_property(origin, DUAL_WRITE_PROPERTY, DualWrite(collection=copy))
            raise

    def _pair(self) -> Pair:
        """Return both collections, whose bank is read from the database."""
        return pair_of(self._store, self.migration)

    def _verify(self, source: CollectionInfo, pair: Pair) -> None:
        validate_index(self._store, self.migration, source)
        equal, _ = self._until_equal(pair, source.partitions)

        self._report("before-verify", rows_total=self.migration.rows)
        expect_chunks(self._ledger, self.migration)
        result = asdict(verified(pair, source.partitions, equal))

        state = keep_nearest(self._store, self.migration.target, self.migration.corrected())
        state = state.model_copy(update={"phase": "ready"})
        self._store.write_property(self.migration.target, state.property_name, state)
        copy = self._store.info(self.migration.target, counted=False)
        note_fits(self._store, copy, state, DrawnKeys(equal.rows, equal.sample.by_partition()))
        if self.migration.is_refresh:
            carry_samples(self._store, source, copy)
        self._options.events.report("verified", **result)
        self._write(phase="verified", state=state, rows=equal.rows, verified=result)

    # -- cut over, roll back -----------------------------------------------------------------

    def cut_over(self, alias: str | None, rename: bool) -> None:
        """Move the name of a verified migration to the copy, or complete that step."""
        self._step_back()
        migration = self.migration
        store = self._store
        if migration.phase == "verified":
            source = store.info(migration.source)
            name = self._switch(source, alias, rename).name
            warm(store, migration)

            pair = self._pair()
            self._await_release(pair, source.partitions)
            self._report("before-cutover", alias=name)
            with self._writes_to_both(pair):
                self._until_equal(pair, source.partitions)
                switch = self._last_switch(alias, rename)

            # Catch-up may have changed what is nearest to the bank since the verification.
            state = keep_nearest(store, migration.target, self.migration.corrected())
            if state != self.migration.state:
                store.write_property(migration.target, state.property_name, state)
            self._write(phase="switching", switch=switch, state=state)

        if self.migration.phase == "switching":
            self._move_name()

    @property
    def _is_postponed(self) -> bool:
        """Whether the cutover waits for its release."""
        release = self._options.release
        return release is not None and not release.is_set()

    def _await_release(self, pair: Pair, partitions: Sequence[str | None]) -> None:
        release = self._options.release
        if release is None or release.is_set():
            return

        self._report("postponed")
        while True:
            for _ in range(POSTPONED_SECONDS):
                self._options.throttle.admit(0)
                if release.wait(1):
                    return

            self._pass(pair, partitions)

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

    def _await_clients(self) -> None:
        """Wait until all clients have read the state again."""
        if not self._options.no_writers:
            self._write(announced_at=now())
            # A name has begun to move: soon it has arrived.
            self._wait_for_clients(can_stop=False)

    def _end_dual_writes(self) -> None:
        for name in (self.migration.target, self.migration.source_now):
            self._store.write_property(name, DUAL_WRITE_PROPERTY, None)

    def end_refresh_of_copy(self) -> None:
        """Drop what a refresh of the copy has made that was killed as it was about to move its first
        name: a call that is still under way finds no collection then to which it could lead the name.

        Raises WrongPhase if names have moved.
        """
        target = self.migration.target
        for other in self._ledger.migrations(target):
            if not (other.moving and other.is_refresh and other.source == target):
                continue
            if is_half_switched(self._store, other):
                raise WrongPhase(
                    f"some names have moved between {other.source_now!r} and {other.target!r}: repeat "
                    f"the refresh or the rollback of {other.target!r} first"
                )
            self._lease.include(other.target)
            drop_copy(self._lease, self._ledger, other)

    def roll_back(self) -> Rollback:
        """Move the name back to the source, or complete that step."""
        self.migration.require("switched", "rolling back", step="rollback")
        migration = self.migration
        store = self._store
        switch = migration.switch
        source = migration.source
        target = migration.target
        require_collections(store, migration)
        if switch is None:
            raise StoreError(
                f"the ledger has lost the name that moved from {source!r} to {target!r}: move it "
                f"back yourself, and then drop {target!r}"
            )

        if migration.phase == "rolling back" and not self._has_moved_back(switch):
            # What was written since the killed run carried the rows back is to be carried, too.
            self._write(phase="switched")

        carried = 0
        if self.migration.phase == "switched":
            self._require_in_use(switch)
            switch = self._with_further_aliases(switch)
            self._report("before-rollback", alias=switch.name)
            carried = self._carry_back()
            self._write(phase="rolling back", switch=switch)

        # A run that was killed in this phase begins here again: each step looks whether it is done.
        self._lease.check()
        self._move_name_back(switch)

        state = self.migration.corrected().model_copy(update={"source": source})
        if switch.source_renamed:
            store.write_property(target, state.property_name, state)
        for name in (target, source):
            store.write_property(name, DUAL_WRITE_PROPERTY, None)
        self._write(phase="rolled back", switch=None, state=state)
        self._report("after-rollback", alias=switch.name, carried=carried)
        return Rollback(switch.name, source, target, carried)

    def _point(self, alias: str, collection: str) -> None:
        """Let an alias lead to one collection of the migration, unless it does already."""
        if self._store.alias_target(alias) != collection:
            self._store.point_alias(alias, collection)
            self._confirm(alias, collection)

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

    def _carry_back(self) -> int:
        """Have clients write to the source too, and carry over what it lacks.

        Return the number of carried rows.
        """
        migration = self.migration
        pair = pair_of(self._store, migration, back=True)
        partitions = self._store.info(migration.source_now).partitions
        if migration.is_refresh:
            carry_grants(self._store, migration.target, migration.source_now)
        self._announce(migration.target, migration.source_now)
        self._wait_for_clients()

        # Most rows are carried while writes need not reach
        # both collections, the last ones while they must.
        _, carried = self._until_equal(pair, partitions)
        with self._writes_to_both(pair):
            _, carried_last = self._until_equal(pair, partitions)
        return carried + carried_last

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

    def _confirm(self, alias: str, collection: str) -> None:
        behind = self._store.alias_target(alias)
        if behind != collection:
            raise StoreError(
                f"alias {alias!r} leads to {behind!r}, not to {collection!r}: repeat the command"
            )


def _stuck_row(pair: Pair) -> str:
    return (
        "That row was carried over before and nobody has written it since: "
        f"{pair.copy.collection!r} cannot hold it as it is, so change the row, and run the "
        "migration again"
    )
