"""The migrator: it carries a migration from its plan to the cutover, continues it, and takes it back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from milvus_hubness.basics.notebooks import ShownAsTable
from milvus_hubness.errors import NotCaughtUp, ResumeRefused, StoreError, WrongPhase
from milvus_hubness.jobs.common.corrections import NONE_READ, Banks, keep_nearest
from milvus_hubness.jobs.common.fits import DrawnKeys, note_fits
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
from milvus_hubness.jobs.migration.corrected import is_half_switched
from milvus_hubness.jobs.migration.ledger import Migration, Switch
from milvus_hubness.jobs.migration.plan import PlannedCopy
from milvus_hubness.jobs.migration.presence import (
    identified,
    require_collections,
    require_copy,
    require_source,
)
from milvus_hubness.jobs.migration.rights import carry_grants
from milvus_hubness.jobs.migration.switching import Switching
from milvus_hubness.jobs.store.helpers import list_bank, list_helpers
from milvus_hubness.jobs.store.ownership import LEDGER, CollectionId
from milvus_hubness.jobs.store.protocols import confirm_bank
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


class Migrator(Switching):
    """Carries one migration out, under its lease. migration: as in the ledger."""

    _saved_banks: Banks = NONE_READ
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


def _stuck_row(pair: Pair) -> str:
    return (
        "That row was carried over before and nobody has written it since: "
        f"{pair.copy.collection!r} cannot hold it as it is, so change the row, and run the "
        "migration again"
    )
