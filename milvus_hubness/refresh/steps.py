"""The steps of a refresh: fill missing biases; or evaluate, announce, write and switch."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import Any

import numpy as np

from milvus_hubness.banks.generations import StoredBank, reference_to
from milvus_hubness.codec.arrays import Floats
from milvus_hubness.correction import Correction
from milvus_hubness.distributed.ray_gallery import fit_on_ray
from milvus_hubness.enable.enable import measure
from milvus_hubness.errors import InvalidInput
from milvus_hubness.estimators import from_dict, to_dict
from milvus_hubness.estimators.registry import is_same
from milvus_hubness.migration.ledger import Migration
from milvus_hubness.migration.plan import MigrationOptions, as_events
from milvus_hubness.operations.bias_backends import BiasBackend
from milvus_hubness.operations.engines import NONE_READ, Banks, Engine, load_correction
from milvus_hubness.operations.lease import Lease
from milvus_hubness.operations.progress import Progress, Throttle, chunks
from milvus_hubness.operations.reading import keep_nearest, read_gallery
from milvus_hubness.operations.row_writer import RowWriter
from milvus_hubness.operations.write_intents import rewriting
from milvus_hubness.refresh.evaluate import (
    Labels,
    RefreshEvaluation,
    Sample,
    Standing,
    judge,
    labelled_in,
    sampled,
)
from milvus_hubness.refresh.plan import RefreshPlan, SpareBanks
from milvus_hubness.refresh.write import (
    Renewal,
    Waiting,
    abandon,
    begin,
    carry_out,
    choose_rebuild,
    rebuildings,
    unfinished,
)
from milvus_hubness.state import BankReference, CollectionState, Former, Incoming, Profile
from milvus_hubness.stores.protocols import Store
from milvus_hubness.stores.records import CollectionInfo


@dataclass(frozen=True)
class Refreshing:
    """Carries out a refresh plan.

    state: with the profile to refresh as the active one. active: the profile that searches use. is_new:
    whether the collection lacks the profile to refresh so far.
    """

    store: Store
    info: CollectionInfo
    requested: str
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

    def pending(self, refresh_plan: RefreshPlan, waiting: Waiting) -> dict[str, Any]:
        bias_location = BiasBackend(self.store, self.info, self.state)
        written = sum(map(len, waiting.values())) if self.plan else 0
        if self.plan:
            return self._told_of_pending(written)
        with ThreadPoolExecutor(2, "refresh") as executor:
            if any(waiting.values()) or self._left_behind():
                with self._rewriting() as writer:
                    known = {self.state.profile.bank: refresh_plan.bank}
                    # The repair after a killed refresh may have restored rows without a bias.
                    written = self._renewal(writer, known).fill_pending(
                        None if self._left_behind() else waiting
                    )
                    last = self._waiting_visible(bias_location, executor)
            else:
                last = self._waiting_visible(bias_location, executor)
            for each in last:
                each.result()
        fresh = self.state.profile.model_copy(update={"refreshed_at": _now()})
        state = self._release_lease(self.state).with_profile(fresh)
        self._write_state(keep_nearest(self.store, self.info.name, state))
        return self._told_of_pending(written)

    def _waiting_visible(
        self, bias_location: BiasBackend, executor: ThreadPoolExecutor
    ) -> list[Future[None]]:
        """Start the steps that can run while the write-intent log is being closed."""
        return [executor.submit(bias_location.wait_visible), executor.submit(self._forget_unless_unfinished)]

    def _forget_unless_unfinished(self) -> None:
        if self.state.incoming is None:
            Renewal.forget(self.store, self.info.name)

    def _left_behind(self) -> bool:
        """Whether a killed refresh left a write-intent log whose rows need repair."""
        return self.info.intent_log is not None

    def _told_of_pending(self, rows: int) -> dict[str, Any]:
        return {
            "mode": "pending",
            "reason": "bank and parameters are unchanged",
            "scanned": rows,
            "written": rows,
            "epoch": self.state.profile.epoch,
        }

    # -- all rows -----------------------------------------------------------------------------------------

    def full(
        self, refresh_plan: RefreshPlan, labels: Labels | None, force: bool, rebuild_share: float
    ) -> dict[str, Any]:
        if refresh_plan.carries_on and self.plan:
            return self._told_of(
                refresh_plan,
                "rebuilt" if refresh_plan.rebuilding else "full",
                refresh_plan.reason,
                self.info.rows,
            )
        if refresh_plan.carries_on:
            self.lease.check()
            return (
                self._rebuilt(refresh_plan, refresh_plan.rebuilding)
                if refresh_plan.rebuilding
                else self._carried_out(refresh_plan)
            )
        sample = sampled(self.store, self.info, self.state, labels, self.progress)
        judged = None if self.is_new else self._judged(refresh_plan, sample, labels)
        if judged and judged.objection and not force:
            reason = f"{refresh_plan.reason}, but {judged.objection}"
            return {**self._told_of(refresh_plan, "refused", reason, 0), "judged": judged}
        mean_bias, correction = refresh_plan.mean_bias, None
        if refresh_plan.reference is None:
            correction = self._fitted(refresh_plan)
            mean_bias = _settled(self.state.profile.mean_bias, correction.centred(sample.vectors))
        rebuilds, why = self._choose_rebuild(refresh_plan, sample, correction, mean_bias, rebuild_share)
        reason = f"{refresh_plan.reason}; {why}" if why else refresh_plan.reason
        if self.plan:
            told = self._told_of(refresh_plan, "rebuilt" if rebuilds else "full", reason, self.info.rows)
            return {**told, "judged": judged}
        self.lease.check()
        fresh = self._fresh(refresh_plan, correction, mean_bias)
        if left := unfinished(rebuildings(self.store), self.info.name):
            abandon(self.lease, left)
        if rebuilds:
            state = self._told(self.state.with_profile(fresh))
            state = state.model_copy(update={"incoming": None, "outgoing": None})
            done = self._rebuilt(refresh_plan, begin(self.store, self.info, state, progress=self.progress))
        else:
            done = self._announced(fresh)._carried_out(refresh_plan)
        return {**done, "reason": reason, "judged": judged}

    def _told_of(self, refresh_plan: RefreshPlan, mode: str, reason: str, rows: int) -> dict[str, Any]:
        return {
            "mode": mode,
            "reason": reason,
            "scanned": self.info.rows,
            "written": rows,
            "epoch": self.state.profile.epoch,
        }

    def _choose_rebuild(
        self,
        refresh_plan: RefreshPlan,
        sample: Sample,
        correction: Correction | None,
        mean_bias: float,
        threshold: float,
    ) -> tuple[bool, str]:
        """Return whether to rebuild, and why; this depends on the share of the sample whose standby slot is
        off."""
        if self.is_new:
            return False, ""
        if correction is None:
            correction = Correction.restore(
                self.state.layout,
                refresh_plan.estimator,
                refresh_plan.bank.queries,
                refresh_plan.bank.potentials,
                target_bank=refresh_plan.bank.targets,
            )
        wanted = correction.centred(sample.vectors) - np.float32(mean_bias)
        off = np.abs(wanted - sample.biases[:, self.state.profile.standby]) > self.tolerance
        return choose_rebuild(
            self.info, self.requested, self.state, float(off.mean()) if len(off) else 0.0, threshold
        )

    def _rebuilt(self, refresh_plan: RefreshPlan, migration: Migration) -> dict[str, Any]:
        events = as_events(self.progress)
        how = MigrationOptions(client_ttl=self.client_ttl, throttle=self.throttle, events=events)
        done = carry_out(self.store, migration, how, self.lease)
        epoch = done.corrected().profile.epoch
        rows = (done.verified or {}).get("rows", 0)
        told = {"reason": refresh_plan.reason, "scanned": rows, "written": rows, "epoch": epoch}
        return {"mode": "rebuilt", "collection": done.target, **told}

    def _judged(
        self, refresh_plan: RefreshPlan, sample: Sample, labels: Labels | None
    ) -> RefreshEvaluation | None:
        profile = self.state.profile
        bank = self.store.load_bank(profile.bank, checked=False)
        old = Standing(from_dict(profile.estimator), bank, profile.strength)
        new = Standing(refresh_plan.estimator, refresh_plan.bank, refresh_plan.strength)
        known = labelled_in(sample, labels) if labels else None
        return judge(self.state.layout, sample.vectors, old, new, known)

    def _fresh(self, refresh_plan: RefreshPlan, correction: Correction | None, mean_bias: float) -> Profile:
        """Save the bank, and return the profile as it will be after the refresh."""
        old, reference = self.state.profile, refresh_plan.reference
        if reference is None and correction is not None:
            fitted = StoredBank(
                refresh_plan.bank.queries, correction.fitted.potentials, refresh_plan.bank.targets
            )
            self.lease.check()
            reference = self._referenced(fitted)
        return old.model_copy(
            update={
                "estimator": to_dict(correction.fitted.estimator if correction else refresh_plan.estimator),
                "slot": old.standby,
                "standby": old.slot,
                "mean_bias": mean_bias,
                "bank": reference,
                "epoch": old.epoch + 1,
                "strength": refresh_plan.strength,
                "refreshed_at": _now(),
                "former": None if self.is_new else _former(old),
            }
        )

    def _announced(self, fresh: Profile) -> Refreshing:
        """Announce the new biases: from now on clients write old and new biases with every row. Return the
        job with the new state."""
        abandoned = self.state.incoming
        incoming = Incoming(name=self.state.active, profile=fresh)
        state = self.state.model_copy(update={"incoming": incoming, "outgoing": None})
        self._spare.note([abandoned.profile.bank] if abandoned else [])
        self._write_state(state)
        self._spare.drop(self._spare.noted())
        Renewal.forget(self.store, self.info.name)
        return replace(self, state=state)

    def _referenced(self, bank: StoredBank) -> BankReference:
        """Save the bank, and return the reference to it. The current generation stays; if the bank equals it,
        return its reference."""
        old = self.state.profile.bank
        reference = reference_to(old.collection, bank)
        is_old = reference.generation == old.generation
        if not is_old:
            self._spare.note([reference])
        self.store.save_bank(old.collection, bank, self.state.metric)
        return old if is_old else reference

    def _carried_out(self, refresh_plan: RefreshPlan) -> dict[str, Any]:
        incoming = self.state.incoming
        if incoming is None:
            raise InvalidInput("no biases are on their way")
        with self._rewriting() as writer:
            renewal = self._renewal(writer)
            filled = renewal.fill_pending()
            scanned, written = renewal.run()
            BiasBackend(self.store, self.info, self._told(self.state)).wait_visible()
            fresh = incoming.profile.model_copy(update={"refreshed_at": _now()})
            leaving = None if self.is_new else Incoming(name=incoming.name, profile=self.state.profile)
            moved = {"incoming": None, "outgoing": leaving}
            state = self.state.model_copy(update=moved).with_profile(fresh, incoming.name)
            state = self._measured_anew(state, refresh_plan)
            state = keep_nearest(self.store, self.info.name, state)
            unused = {*self.state.profile.banks} - {*state.profile.banks}
            self._spare.note(unused)
            self._write_state(state)
        self._release_lease(state)
        self._spare.drop(self._spare.noted())
        Renewal.forget(self.store, self.info.name)
        return {
            "mode": "full",
            "reason": refresh_plan.reason,
            "scanned": scanned,
            "written": written + filled,
            "epoch": fresh.epoch,
        }

    def _release_lease(self, state: CollectionState) -> CollectionState:
        """Wait until all clients have read the new state, then write and return a state without the former
        biases."""
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

    def _fitted(self, refresh_plan: RefreshPlan) -> Correction:
        """Fit the estimator on the bank, and on the gallery if it needs that. Start from the stored
        potentials if the estimator is unchanged."""
        info, parts = self.info, []
        bias_location = BiasBackend(self.store, info, self.state)
        for partition in info.partitions if refresh_plan.estimator.needs_gallery else ():
            keys = self.store.keys(info.name, partition=partition)
            for part in chunks(keys, self.store.chunk_rows(info), "reading the gallery", self.progress):
                parts.append(bias_location.read(part, partition).vectors)
        return Correction.fit(
            self.state.layout,
            refresh_plan.estimator,
            refresh_plan.bank.queries,
            gallery=np.concatenate(parts) if parts else None,
            target_bank=refresh_plan.bank.targets,
            start=refresh_plan.bank.potentials
            if is_same(refresh_plan.estimator, self.state.profile.estimator)
            else None,
            fit=fit_on_ray if self.engine == "ray" else None,
        )

    def _measured_anew(self, state: CollectionState, refresh_plan: RefreshPlan) -> CollectionState:
        """Return the state with a new measurement of the corrected answers that candidates miss."""
        if state.reranking is None:
            return state
        gallery = read_gallery(self.store, self.info, state.field, progress=self.progress)
        correction = load_correction(self.store, state, state.profile)
        candidates, missed, measured = measure(
            gallery, correction, refresh_plan.bank.queries, state.profile.strength, state.reranking.allowed
        )
        found = {"candidates": candidates, "missed": missed[candidates], "queries": measured}
        return state.model_copy(update={"reranking": state.reranking.model_copy(update=found)})

    # -- helpers ------------------------------------------------------------------------------------------

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
        """Return the state to write: it lists no profile that has no biases yet, so searches cannot use
        one."""
        known = dict(state.profiles)
        if self.is_new and state.incoming is not None:
            known.pop(state.incoming.name, None)
        return state.model_copy(update={"active": self.active, "profiles": known})


def _settled(old: float, biases: Floats) -> float:
    """Return the old mean bias if it is within one standard deviation of the new mean, so that rows with an
    unchanged bias need no write; else return the new mean."""
    if not len(biases):
        return old
    mean, spread = float(biases.mean(dtype=np.float64)), float(biases.std(dtype=np.float64))
    return old if abs(mean - old) <= spread else mean


def _former(profile: Profile) -> Former:
    return Former(
        estimator=profile.estimator, mean_bias=profile.mean_bias, strength=profile.strength, bank=profile.bank
    )


def _now() -> datetime:
    return datetime.now(timezone.utc)
