"""A refresh of biases beside the vectors: new ones are written row by row, into the slot that no
search reads, and then the slots change their roles.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from pydantic import ValidationError

from milvus_hubness.basics.bounds import Count, FrozenModel
from milvus_hubness.basics.waiting import wait_seconds
from milvus_hubness.correction.banks.stored import Key
from milvus_hubness.correction.codec.arrays import Floats
from milvus_hubness.correction.codec.base import RowBiases
from milvus_hubness.correction.fitted import Correction, epoch_of_new_rows, measured_kinds
from milvus_hubness.correction.kinds import Kinds, kinds_from
from milvus_hubness.correction.state import (
    BankReference,
    CollectionState,
    Former,
    Incoming,
    Profile,
)
from milvus_hubness.errors import Cancelled
from milvus_hubness.jobs.common.bias_backends import BiasBackend
from milvus_hubness.jobs.common.corrections import (
    NONE_READ,
    Banks,
    keep_nearest,
    load_correction,
    load_corrections,
)
from milvus_hubness.jobs.common.fits import forget_fits
from milvus_hubness.jobs.common.inputs import read_gallery
from milvus_hubness.jobs.common.lease_records import now
from milvus_hubness.jobs.common.progress import key_chunks, key_pages
from milvus_hubness.jobs.common.row_writer import rewriting
from milvus_hubness.jobs.enable.plan import measure
from milvus_hubness.jobs.refresh.biases import Sample, fit
from milvus_hubness.jobs.refresh.plan import RefreshOptions, RefreshPlan
from milvus_hubness.jobs.refresh.refreshing import Action, Refreshing, RefreshResult
from milvus_hubness.jobs.store.ownership import LEDGER
from milvus_hubness.jobs.store.protocols import Store
from milvus_hubness.jobs.store.records import Record


class InPlace(Refreshing):
    """Carries out the refresh of biases beside the vectors."""

    def unchanged(self, plan: RefreshPlan) -> RefreshResult:
        """Give the present biases to rows without one; that makes all biases up to date."""
        count = self.waiting
        if not self.options.plan:
            count = self._fill(plan)
            renewed = {"refreshed_at": now(), "evidence": self.evidence(plan)}
            fresh = self.state.profile.model_copy(update=renewed)
            state = self._without_outgoing(self.state).with_profile(fresh)
            self.write_state(keep_nearest(self.store, self.info.name, state))

        action: Action = "pending" if count else "none"
        return self.result(
            action, "bank and parameters are unchanged", scanned=count, written=count
        )

    def expect_possible(self) -> None:
        """New biases can always be written."""

    def fitted(self, plan: RefreshPlan, sample: Sample) -> Correction:
        layout = self.state.layout
        kinds = self._kinds(plan, sample)
        correction = fit(self.store, self.info, self.state, layout, plan, self.options, kinds)
        numbers = sample.kinds(self.state.kinds)
        biases = correction.centred(sample.vectors, kinds=numbers)
        mean_bias = plan.mean_bias
        prior = plan.prior
        if plan.reference is None:
            mean_bias = steady_mean(self.state.profile.mean_bias, biases)
            if prior is not None:
                prior = prior.with_factor(correction.spread(sample.vectors, numbers))
        correction = replace(correction, mean_bias=mean_bias, prior=prior, clicks=plan.bank.clicks)
        return correction.measured(sample.vectors, numbers)

    def planned(self, plan: RefreshPlan, correction: Correction) -> RefreshResult:
        return self.result("full", plan.reason, written=self.info.rows)

    def adopt(self, plan: RefreshPlan, fresh: Profile, correction: Correction) -> RefreshResult:
        old = self.state.profile
        former = Former(**old.model_dump(include=set(Former.model_fields)))
        changes = {
            "slot": old.standby,
            "standby": old.slot,
            "former": former,
        }
        return self._announced(fresh.model_copy(update=changes))._write(plan)

    def continued(self, plan: RefreshPlan) -> RefreshResult:
        if self.options.plan:
            return self.result("full", plan.reason, written=self.info.rows)
        self.lease.check()
        return self._write(plan)

    def _fill(self, plan: RefreshPlan) -> int:
        """Write the biases of the plan's bank to rows without one; return how many were."""
        backend = BiasBackend(self.store, self.info, self.state)
        # After a killed refresh, the repair may restore rows without a bias.
        was_killed = self.info.intent_log is not None
        count = 0
        # Each step mostly waits for the database.
        with ThreadPoolExecutor(2, "refresh") as executor:
            steps: list[Future[None]] = []
            if self.state.incoming is None:
                steps.append(executor.submit(Renewal.forget, self.store, self.info.name))
            if self.waiting or was_killed:
                with self._renewing({self.state.profile.bank: plan.bank}) as renewal:
                    count = renewal.fill_pending(self.waiting)
                    # This can run while the write-intent log is being closed.
                    steps.append(executor.submit(backend.wait_visible))
            else:
                backend.wait_visible()

            for step in steps:
                step.result()
        return count

    def _kinds(self, plan: RefreshPlan, sample: Sample) -> Kinds | None:
        """Return the means of kinds of the new biases; None without kinds."""
        rule = self.state.kinds
        if rule is None or plan.kinds is None:
            return None
        present = kinds_from(rule, plan.kinds, self.state.dim)
        if plan.reference is not None:
            return present
        layout = self.state.layout
        numbers = sample.kinds(rule)
        new = measured_kinds(layout, rule, sample.vectors, numbers, plan.bank.queries)
        return steady_kinds(present, new)

    def _announced(self, fresh: Profile) -> InPlace:
        """Have clients write old and new biases with every
        row from now on; return the job with the new state.
        """
        abandoned = self.state.incoming
        incoming = Incoming(name=self.state.active, profile=fresh)
        state = self.state.model_copy(update={"incoming": incoming, "outgoing": None})

        # The note comes first: a killed job must not leave a bank that nobody knows of.
        self.spare.note([abandoned.profile.bank] if abandoned else [])
        self.write_state(state)
        self.spare.drop(self.spare.noted(), state)
        if abandoned:
            self._forget_fit(abandoned.profile, abandoned.name, state)
        Renewal.forget(self.store, self.info.name)
        return replace(self, state=state)

    def _write(self, plan: RefreshPlan) -> RefreshResult:
        """Write the announced biases, and switch to them."""
        incoming = self.state.incoming
        assert incoming is not None, "the biases are announced before"
        with self._renewing() as renewal:
            filled = renewal.fill_pending(self.waiting)
            scanned, written = renewal.run(incoming.profile)
            renewal.backend.wait_visible()

            # Clients with an older cached state still read the former slot, so new rows get a bias
            # in it too.
            leaving = Incoming(name=incoming.name, profile=self.state.profile)
            fresh = incoming.profile.model_copy(update={"refreshed_at": now()})
            moved = {"incoming": None, "outgoing": leaving}
            state = self.state.model_copy(update=moved).with_profile(fresh, incoming.name)
            state = self._with_miss_rate(state, plan)
            state = keep_nearest(self.store, self.info.name, state)

            # The switch is one write of one property, so that each search reads either
            # only old biases or only new ones. The note of the replaced bank precedes it.
            self.spare.note({*self.state.profile.banks} - {*state.profile.banks})
            self.write_state(state)

        state = self._without_outgoing(state)
        self.spare.drop(self.spare.noted(), state)
        self._forget_fit(self.state.profile, self.state.active, state)
        Renewal.forget(self.store, self.info.name)
        return self.result(
            "full", plan.reason, scanned=scanned, written=written + filled, epoch=fresh.epoch
        )

    def _without_outgoing(self, state: CollectionState) -> CollectionState:
        """Wait until all clients have read the new state, then
        write and return a state without the former biases.
        """
        if state.outgoing is None:
            return state

        awaited = f"all clients to read the new state of {self.info.name!r}"
        if wait_seconds(awaited, self.options.client_ttl, self.options.stop):
            return state

        renewed = state.model_copy(update={"outgoing": None})
        self.write_state(renewed)
        return renewed

    def _forget_fit(self, profile: Profile, name: str, state: CollectionState) -> None:
        """Delete the note of a fit that the present state does not name."""
        former = state.model_copy(update={"profiles": {name: profile}, "active": name})
        changes = [change for change in (state.incoming, state.outgoing) if change is not None]
        changed = [state.with_profile(change.profile, change.name) for change in changes]
        forget_fits(self.store, [former], [state, *changed])

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
            state.codec.side_collection,
            self.store.most_candidates(self.info),
        )
        return state.model_copy(update={"reranking": measured})

    @contextmanager
    def _renewing(self, banks: Banks = NONE_READ) -> Iterator[Renewal]:
        """Have clients note their writes within the block, and yield the writer of the biases.
        banks: read already.
        """
        ttl = self.options.client_ttl
        stop = self.options.stop
        with (
            rewriting(self.lease, self.info, self.state, client_ttl=ttl, stop=stop) as writer,
            self.lease.explained(),
        ):
            backend = BiasBackend(self.store, self.info, self.searchable(self.state), writer)
            yield Renewal(backend, self.state.active == self.active, self.options, banks)


def steady_kinds(old: Kinds | None, new: Kinds | None) -> Kinds | None:
    """Return the old means of kinds if the new ones are near them, which spares all rows a write."""
    if old is None or new is None or not new.is_near(old):
        return new
    return old


def steady_mean(old: float, biases: Floats) -> float:
    """Return the old mean bias if it is within one standard deviation of the new mean, which spares
    rows with an unchanged bias a write; else the new mean.
    """
    if not len(biases):
        return old
    mean = float(biases.mean(dtype=np.float64))
    spread = float(biases.std(dtype=np.float64))
    return old if abs(mean - old) <= spread else mean


REFRESHES = "refreshes"
"""The group of the ledger's records of how far refreshes are."""

CHUNKS_PER_RECORD = 8
"""A record is written after so many chunks; a killed refresh repeats that many at most."""


class _Reached(FrozenModel):
    """The progress of a refresh. Its bank and its slot identify the refresh."""

    bank: BankReference
    slot: Count
    after: tuple[tuple[str | None, Key], ...] = ()
    """The last finished key, by partition."""
    scanned: Count = 0
    """Number of rows read so far."""
    written: Count = 0
    """Number of rows written so far."""


@dataclass(frozen=True)
class Renewal:
    """Writes the biases of a refresh."""

    backend: BiasBackend
    """Reads and writes the rows; its state has the new biases."""
    names_epoch: bool
    """Whether rows get the epoch of their biases."""
    options: RefreshOptions
    banks: Banks
    """Banks that are read already."""

    def fill_pending(self, waiting: int) -> int:
        """Write the biases of all profiles, and those of an unfinished
        refresh, to the rows without a bias; return the number of rows.
        waiting: their expected number. Raises Cancelled, LeaseLost.
        """
        backend = self.backend
        doing = "computing missing biases"
        count = 0
        chunks = key_chunks(
            backend.store, backend.info, doing, self.options.progress, backend.pending, waiting
        )
        for partition, chunk in chunks:
            self._admit(len(chunk))
            count += backend.write(
                chunk, partition, self._for_new_rows, epoch_of_new_rows(backend.state)
            )

        return count

    def run(self, incoming: Profile) -> tuple[int, int]:
        """Write the new biases of this profile; return the numbers of scanned and of written rows,
        with earlier runs of this refresh. Raises Cancelled, LeaseLost.
        """
        reached = self._reached(incoming)
        info = self.backend.info
        store = self.backend.store
        last_keys = dict(reached.after)
        scanned = reached.scanned
        written = reached.written

        def remaining(partition: str | None) -> Iterator[list[Key]]:
            after = last_keys.get(partition)
            return key_pages(store, info.name, partition, after=after, rows=info.rows)

        rows_left = max(0, info.rows - scanned)
        chunks = key_chunks(
            store, info, "writing biases", self.options.progress, remaining, rows_left
        )
        for number, (partition, chunk) in enumerate(chunks, 1):
            written += self._renew(chunk, partition, incoming)
            scanned += len(chunk)
            last_keys[partition] = chunk[-1]

            # A killed refresh begins again at its last record; a record of each chunk costs more.
            if number % CHUNKS_PER_RECORD == 0:
                progress = {
                    "after": tuple(last_keys.items()),
                    "scanned": scanned,
                    "written": written,
                }
                body = reached.model_copy(update=progress).model_dump_json()
                store.put_records(LEDGER, [Record(_key(info.name), REFRESHES, body)])

        return scanned, written

    def _renew(self, keys: Sequence[Key], partition: str | None, incoming: Profile) -> int:
        """Write the new biases to rows where they differ, and all biases to rows without any;
        return how many rows the database acknowledged.
        """
        self._admit(0)
        backend = self.backend
        corrections = self._corrections
        rows = backend.read(keys, partition)
        biases = corrections[incoming.slot].centred(rows.vectors, rows.batch)
        moves = np.abs(biases - rows.biases[:, incoming.slot])
        differ = (moves > self.options.tolerance) & ~rows.incomplete

        count = 0
        if differ.any():
            changed = rows.only(differ)
            self._admit(len(changed.batch))
            epoch = incoming.epoch if self.names_epoch else None
            new_biases = RowBiases({incoming.slot: biases[differ]}, epoch)
            count += backend.put(changed, partition, new_biases)
            backend.repair(changed, partition, corrections, epoch)

        # Clients write rows without a bias while the job runs, also behind
        # the key that it has reached; the next refresh fills those.
        pending = rows.only(rows.incomplete).batch.keys
        if pending:
            self._admit(len(pending))
            count += backend.write(pending, partition, corrections, backend.state.profile.epoch)

        return count

    @cached_property
    def _for_new_rows(self) -> dict[int, Correction]:
        """The corrections for rows that are newer than
        the fits; that of the new biases covers all rows.
        """
        incoming = self.backend.state.incoming
        fitted_slot = incoming.profile.slot if incoming else None
        # Several slots may have one correction, and its parts are computed once for all of them.
        as_new = {
            id(correction): replace(correction, are_new=True)
            for correction in self._corrections.values()
        }
        return {
            slot: correction if slot == fitted_slot else as_new[id(correction)]
            for slot, correction in self._corrections.items()
        }

    @cached_property
    def _corrections(self) -> dict[int, Correction]:
        # A refresh replaces the biases of the active
        # profile, whose bank may have been edited by hand.
        store = self.backend.store
        state = self.backend.state
        return load_corrections(
            store, state, self.options.engine, self.banks, unchecked=[state.active]
        )

    @staticmethod
    def forget(store: Store, collection: str) -> None:
        """Delete the progress of a refresh of this collection."""
        store.drop_records(LEDGER, REFRESHES, [_key(collection)])

    def _admit(self, rows: int) -> None:
        if self.options.stop.is_set():
            raise Cancelled(
                f"stopped as requested: the next refresh of {self.backend.info.name!r} carries on "
                "from here"
            )

        if rows:
            self.options.throttle.admit(rows)

    def _reached(self, incoming: Profile) -> _Reached:
        """Return the progress of an earlier run of this refresh."""
        record = self.backend.store.record(LEDGER, _key(self.backend.info.name))
        try:
            reached = _Reached.model_validate_json(record.body) if record else None
        except ValidationError:
            # The refresh then begins at the first row again, which costs time and nothing else.
            reached = None

        if reached and (reached.bank.generation, reached.slot) == (
            incoming.bank.generation,
            incoming.slot,
        ):
            return reached

        return _Reached(bank=incoming.bank, slot=incoming.slot)


def _key(collection: str) -> str:
    return f"{REFRESHES}/{collection}"
