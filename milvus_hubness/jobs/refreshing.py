"""A refresh carried out: the rows without a bias filled, or all judged, announced, written and switched."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import Any

import numpy as np

from milvus_hubness.beyond import fit_on_ray
from milvus_hubness.correction import Correction
from milvus_hubness.errors import InvalidInput
from milvus_hubness.estimators import from_dict, to_dict
from milvus_hubness.estimators.registry import is_same
from milvus_hubness.jobs.aims import Aim
from milvus_hubness.jobs.enable import measure
from milvus_hubness.jobs.engines import Engine
from milvus_hubness.jobs.gallery import read_gallery
from milvus_hubness.jobs.migration.ledger import Migration
from milvus_hubness.jobs.migration.steering import Steering, as_events
from milvus_hubness.jobs.migration.throttle import Throttle
from milvus_hubness.jobs.nearest import keep_nearest
from milvus_hubness.jobs.placement import Placement, placement_of
from milvus_hubness.jobs.progress import Progress, chunks
from milvus_hubness.jobs.rebuild import abandon, begin, carry_out, rebuildings, unfinished, way
from milvus_hubness.jobs.renewal import Renewal, Waiting
from milvus_hubness.jobs.restored import NONE_READ, Banks, restored
from milvus_hubness.jobs.sample import Labels, Sample, labelled_in, sampled
from milvus_hubness.jobs.shadow import Shadow, Standing, judge
from milvus_hubness.jobs.spare_banks import SpareBanks
from milvus_hubness.layout import Floats
from milvus_hubness.operations.lease import Lease
from milvus_hubness.operations.row_writer import RowWriter
from milvus_hubness.operations.write_intents import rewriting
from milvus_hubness.state import BankReference, CollectionState, Former, Incoming, Profile
from milvus_hubness.stores.bank_generations import reference_to
from milvus_hubness.stores.base import CollectionInfo, Store, StoredBank


@dataclass(frozen=True)
class Refreshing:
    """A refresh whose aim is known, carried out.

    state: with the profile to be renewed as the active one. active: the one that is. is_new: whether that
    to be renewed is none of the collection's yet."""

    store: Store
    info: CollectionInfo
    asked_for: str
    state: CollectionState
    active: str
    is_new: bool
    tolerance: float
    client_ttl: float
    throttle: Throttle
    stop: threading.Event
    lease: Lease
    plan: bool
    engine: Engine
    progress: Progress

    # -- rows without a bias ----------------------------------------------------------------------------

    def pending(self, aim: Aim, waiting: Waiting) -> dict[str, Any]:
        placement = placement_of(self.store, self.info, self.state)
        written = sum(map(len, waiting.values())) if self.plan else 0
        if self.plan:
            return self._told_of_pending(written)
        with ThreadPoolExecutor(2, "refresh") as beside:
            if any(waiting.values()) or self._left_behind():
                with self._rewriting() as writer:
                    known = {self.state.profile.bank: aim.bank}
                    # The repair of a killed refresh may have brought back rows without a bias.
                    written = self._renewal(writer, known).fill_pending(
                        None if self._left_behind() else waiting
                    )
                    last = self._settling(placement, beside)
            else:
                last = self._settling(placement, beside)
            for each in last:
                each.result()
        fresh = self.state.profile.model_copy(update={"refreshed_at": _now()})
        state = self._let_go(self.state).with_profile(fresh)
        self._write_state(keep_nearest(self.store, self.info.name, state))
        return self._told_of_pending(written)

    def _settling(self, placement: Placement, beside: ThreadPoolExecutor) -> list[Future[None]]:
        """What is done beside the end of the journal."""
        return [beside.submit(placement.settle), beside.submit(self._forget_unless_unfinished)]

    def _forget_unless_unfinished(self) -> None:
        if self.state.incoming is None:
            Renewal.forget(self.store, self.info.name)

    def _left_behind(self) -> bool:
        """Whether a refresh that was killed left a journal, from which its rows are yet to be put right."""
        return self.info.journal is not None

    def _told_of_pending(self, rows: int) -> dict[str, Any]:
        return {
            "mode": "pending",
            "reason": "bank and parameters are unchanged",
            "scanned": rows,
            "written": rows,
            "epoch": self.state.profile.epoch,
        }

    # -- all rows -----------------------------------------------------------------------------------------

    def full(self, aim: Aim, labels: Labels | None, force: bool, rebuild_share: float) -> dict[str, Any]:
        if aim.carries_on and self.plan:
            return self._told_of(aim, "rebuilt" if aim.rebuilding else "full", aim.reason, self.info.rows)
        if aim.carries_on:
            self.lease.check()
            return self._rebuilt(aim, aim.rebuilding) if aim.rebuilding else self._carried_out(aim)
        sample = sampled(self.store, self.info, self.state, labels, self.progress)
        judged = None if self.is_new else self._judged(aim, sample, labels)
        if judged and judged.objection and not force:
            reason = f"{aim.reason}, but {judged.objection}"
            return {**self._told_of(aim, "refused", reason, 0), "judged": judged}
        centre, correction = aim.centre, None
        if aim.reference is None:
            correction = self._fitted(aim)
            centre = _settled(self.state.profile.centre, correction.centred(sample.vectors))
        rebuilds, why = self._way(aim, sample, correction, centre, rebuild_share)
        reason = f"{aim.reason}; {why}" if why else aim.reason
        if self.plan:
            told = self._told_of(aim, "rebuilt" if rebuilds else "full", reason, self.info.rows)
            return {**told, "judged": judged}
        self.lease.check()
        fresh = self._fresh(aim, correction, centre)
        if left := unfinished(rebuildings(self.store), self.info.name):
            abandon(self.lease, left)
        if rebuilds:
            state = self._told(self.state.with_profile(fresh))
            state = state.model_copy(update={"incoming": None, "outgoing": None})
            done = self._rebuilt(aim, begin(self.store, self.info, state, progress=self.progress))
        else:
            done = self._announced(fresh)._carried_out(aim)
        return {**done, "reason": reason, "judged": judged}

    def _told_of(self, aim: Aim, mode: str, reason: str, rows: int) -> dict[str, Any]:
        return {
            "mode": mode,
            "reason": reason,
            "scanned": self.info.rows,
            "written": rows,
            "epoch": self.state.profile.epoch,
        }

    def _way(
        self, aim: Aim, sample: Sample, correction: Correction | None, centre: float, threshold: float
    ) -> tuple[bool, str]:
        """Whether to rebuild, and why; by the share of the sample whose standby slot is off."""
        if self.is_new:
            return False, ""
        if correction is None:
            correction = Correction.restore(
                self.state.layout,
                aim.estimator,
                aim.bank.queries,
                aim.bank.potentials,
                target_bank=aim.bank.targets,
            )
        wanted = correction.centred(sample.vectors) - np.float32(centre)
        off = np.abs(wanted - sample.biases[:, self.state.profile.standby]) > self.tolerance
        return way(self.info, self.asked_for, self.state, float(off.mean()) if len(off) else 0.0, threshold)

    def _rebuilt(self, aim: Aim, migration: Migration) -> dict[str, Any]:
        events = as_events(self.progress)
        how = Steering(client_ttl=self.client_ttl, throttle=self.throttle, events=events)
        done = carry_out(self.store, migration, how, self.lease)
        epoch = done.corrected().profile.epoch
        rows = (done.verified or {}).get("rows", 0)
        told = {"reason": aim.reason, "scanned": rows, "written": rows, "epoch": epoch}
        return {"mode": "rebuilt", "collection": done.target, **told}

    def _judged(self, aim: Aim, sample: Sample, labels: Labels | None) -> Shadow | None:
        profile = self.state.profile
        bank = self.store.load_bank(profile.bank, checked=False)
        old = Standing(from_dict(profile.estimator), bank, profile.strength)
        new = Standing(aim.estimator, aim.bank, aim.strength)
        known = labelled_in(sample, labels) if labels else None
        return judge(self.state.layout, sample.vectors, old, new, known)

    def _fresh(self, aim: Aim, correction: Correction | None, centre: float) -> Profile:
        """The profile as it will be, its bank kept."""
        old, reference = self.state.profile, aim.reference
        if reference is None and correction is not None:
            fitted = StoredBank(aim.bank.queries, correction.fitted.potentials, aim.bank.targets)
            self.lease.check()
            reference = self._referenced(fitted)
        return old.model_copy(
            update={
                "estimator": to_dict(correction.fitted.estimator if correction else aim.estimator),
                "slot": old.standby,
                "standby": old.slot,
                "centre": centre,
                "bank": reference,
                "epoch": old.epoch + 1,
                "strength": aim.strength,
                "refreshed_at": _now(),
                "former": None if self.is_new else _former(old),
            }
        )

    def _announced(self, fresh: Profile) -> Refreshing:
        """This job with the new biases announced: whoever writes a row from now on gives it both."""
        abandoned = self.state.incoming
        incoming = Incoming(name=self.state.active, profile=fresh)
        state = self.state.model_copy(update={"incoming": incoming, "outgoing": None})
        self._spare.note([abandoned.profile.bank] if abandoned else [])
        self._write_state(state)
        self._spare.drop(self._spare.noted())
        Renewal.forget(self.store, self.info.name)
        return replace(self, state=state)

    def _referenced(self, bank: StoredBank) -> BankReference:
        """Save the bank, and return the reference to it. The generation in use stays, and is returned where
        it is the same one."""
        old = self.state.profile.bank
        reference = reference_to(old.collection, bank)
        is_old = reference.generation == old.generation
        if not is_old:
            self._spare.note([reference])
        self.store.save_bank(old.collection, bank, self.state.metric)
        return old if is_old else reference

    def _carried_out(self, aim: Aim) -> dict[str, Any]:
        incoming = self.state.incoming
        if incoming is None:
            raise InvalidInput("no biases are on their way")
        with self._rewriting() as writer:
            renewal = self._renewal(writer)
            filled = renewal.fill_pending()
            scanned, written = renewal.run()
            placement_of(self.store, self.info, self._told(self.state)).settle()
            fresh = incoming.profile.model_copy(update={"refreshed_at": _now()})
            leaving = None if self.is_new else Incoming(name=incoming.name, profile=self.state.profile)
            moved = {"incoming": None, "outgoing": leaving}
            state = self.state.model_copy(update=moved).with_profile(fresh, incoming.name)
            state = self._measured_anew(state, aim)
            state = keep_nearest(self.store, self.info.name, state)
            unused = {*self.state.profile.banks} - {*state.profile.banks}
            self._spare.note(unused)
            self._write_state(state)
        self._let_go(state)
        self._spare.drop(self._spare.noted())
        Renewal.forget(self.store, self.info.name)
        return {
            "mode": "full",
            "reason": aim.reason,
            "scanned": scanned,
            "written": written + filled,
            "epoch": fresh.epoch,
        }

    def _let_go(self, state: CollectionState) -> CollectionState:
        """The state without biases that no client reads any more, once all have heard of the new ones."""
        if state.outgoing is None:
            return state
        if self.stop.wait(self.client_ttl):
            return state
        renewed = state.model_copy(update={"outgoing": None})
        self._write_state(renewed)
        return renewed

    @property
    def _spare(self) -> SpareBanks:
        return SpareBanks(self.store, self.info.name)

    def _fitted(self, aim: Aim) -> Correction:
        """On the bank, and on the gallery where the estimator learns from that; warm where it is the same
        estimator as before."""
        info, parts = self.info, []
        placement = placement_of(self.store, info, self.state)
        for partition in info.partitions if aim.estimator.needs_gallery else ():
            keys = self.store.keys(info.name, partition=partition)
            for part in chunks(keys, self.store.chunk_rows(info), "reading the gallery", self.progress):
                parts.append(placement.read(part, partition).vectors)
        return Correction.fit(
            self.state.layout,
            aim.estimator,
            aim.bank.queries,
            gallery=np.concatenate(parts) if parts else None,
            target_bank=aim.bank.targets,
            start=aim.bank.potentials if is_same(aim.estimator, self.state.profile.estimator) else None,
            fit=fit_on_ray if self.engine == "ray" else None,
        )

    def _measured_anew(self, state: CollectionState, aim: Aim) -> CollectionState:
        """The state with what candidates miss of the answers that these biases give."""
        if state.beside is None:
            return state
        gallery = read_gallery(self.store, self.info, state.field, progress=self.progress)
        correction = restored(self.store, state, state.profile)
        candidates, missed, measured = measure(
            gallery, correction, aim.bank.queries, state.profile.strength, state.beside.allowed
        )
        found = {"candidates": candidates, "missed": missed[candidates], "queries": measured}
        return state.model_copy(update={"beside": state.beside.model_copy(update=found)})

    # -- what all of it needs -----------------------------------------------------------------------------

    @contextmanager
    def _rewriting(self) -> Iterator[RowWriter]:
        ttl = self.client_ttl
        with (
            rewriting(self.lease, self.info, self.state, client_ttl=ttl, stop=self.stop) as writer,
            self.lease.explained(),
        ):
            yield writer

    def _renewal(self, writer: RowWriter, banks: Banks = NONE_READ) -> Renewal:
        return Renewal(
            store=self.store,
            info=self.info,
            state=self._told(self.state),
            names_epoch=self.state.active == self.active,
            tolerance=self.tolerance,
            writer=writer,
            lease=self.lease,
            throttle=self.throttle,
            stop=self.stop,
            progress=self.progress,
            banks=banks,
            engine=self.engine,
        )

    def _write_state(self, state: CollectionState) -> None:
        self.lease.check()
        self.store.write_state(self.info.name, self._told(state))

    def _told(self, state: CollectionState) -> CollectionState:
        """What the collection says: searches know no profile that has no biases yet."""
        known = dict(state.profiles)
        if self.is_new and state.incoming is not None:
            known.pop(state.incoming.name, None)
        return state.model_copy(update={"active": self.active, "profiles": known})


def _settled(old: float, biases: Floats) -> float:
    """The old centre while it is within one standard deviation of the new mean, so that rows whose bias did
    not move need no rewriting; else the new mean."""
    if not len(biases):
        return old
    mean, spread = float(biases.mean(dtype=np.float64)), float(biases.std(dtype=np.float64))
    return old if abs(mean - old) <= spread else mean


def _former(profile: Profile) -> Former:
    return Former(
        estimator=profile.estimator, centre=profile.centre, strength=profile.strength, bank=profile.bank
    )


def _now() -> datetime:
    return datetime.now(timezone.utc)
