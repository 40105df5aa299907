"""Banks in memory, and the biases of rows by them, for the clients of any database. No I/O."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Any

from milvus_hubness.clients.states import CachedStates, expect_number_of
from milvus_hubness.clients.steps import Compute, Operation
from milvus_hubness.correction.banks.stored import StoredBank
from milvus_hubness.correction.codec.arrays import Floats
from milvus_hubness.correction.codec.base import RowBiases
from milvus_hubness.correction.items import ItemRows
from milvus_hubness.correction.state import CollectionState, Profile

if TYPE_CHECKING:
    from milvus_hubness.correction.fitted import Correction, RowMeasures

Name = tuple[str, str, int]
"""Collection, field, and the slot that searches of the profile read, which a refresh switches."""


BYTES_PER_CLICK = 150
"""About what an entry of a dictionary with its key and its number takes."""


@dataclass(eq=False)
class CachedBank:
    """The bank of a profile, and its fitted estimator once that was needed."""

    profile: Profile
    bank: StoredBank
    _fitted: Correction | None = None
    _lock: Lock = field(default_factory=Lock, repr=False)

    @property
    def size(self) -> int:
        """The bytes of its vectors, potentials and clicks."""
        targets = self.bank.targets.vectors.nbytes if self.bank.targets else 0
        clicks = BYTES_PER_CLICK * len(self.bank.clicks)
        return self.bank.queries.vectors.nbytes + self.bank.potentials.nbytes + targets + clicks

    def correction(self, state: CollectionState) -> Correction:
        """Return the fitted estimator of the bank, restored once per layout of a state."""
        from milvus_hubness.correction.fitted import Correction

        # The first writes of a client come at once, and each of them would restore it.
        with self._lock:
            fitted = self._fitted
            if fitted is None or fitted.layout != state.layout:
                fitted = Correction.of_profile(state, self.profile, self.bank)
                self._fitted = fitted
            return fitted


class BankCache:
    """Banks by profile, up to `budget` bytes; those in use stay, whatever their size.

    Raises InvalidParameter for a budget that is no number of at least 0.
    """

    def __init__(self, budget: int) -> None:
        expect_number_of("bytes", "bank_budget", budget)
        self.budget = budget
        self._cached: OrderedDict[Name, CachedBank] = OrderedDict()

    def get(self, name: Name, profile: Profile) -> CachedBank | None:
        """Return the bank of exactly this profile; None if it is not in the cache."""
        cached = self._cached.get(name)
        if cached is None or cached.profile != profile:
            return None

        # The bank used last is at the end. Threads share the cache: another one may have dropped
        # the bank meanwhile.
        self._cached.pop(name, None)
        self._cached[name] = cached
        return cached

    def keep(
        self, name: Name, profile: Profile, bank: StoredBank, in_use: Collection[Name] = ()
    ) -> CachedBank:
        """Keep a bank, and evict others but those in use."""
        cached = CachedBank(profile, bank)
        self._cached.pop(name, None)
        self._cached[name] = cached
        self.evict({name, *in_use})
        return cached

    @property
    def size(self) -> int:
        """The bytes of all banks."""
        return sum(entry.size for entry in list(self._cached.values()))

    def clear(self) -> None:
        self._cached.clear()

    def evict(self, in_use: Collection[Name]) -> None:
        """Evict the banks that were not used for longest, until the budget has room for the rest.

        A bank in use stays.
        """
        # A copy, as other threads may change the cache.
        entries = list(self._cached.items())
        size = sum(entry.size for _, entry in entries)
        for name, entry in entries:
            if size <= self.budget:
                break
            if name not in in_use:
                self._cached.pop(name, None)
                size -= entry.size


class BankBiases:
    """Banks in memory, and the biases of vectors in every profile of their field.

    states: reads the banks. bank_budget: bytes of banks in memory. Raises as BankCache does.
    """

    def __init__(self, states: CachedStates[Any], bank_budget: int) -> None:
        self._states = states
        self.banks = BankCache(bank_budget)

    def bank(
        self, collection: str, state: CollectionState, profile: Profile
    ) -> Operation[StoredBank]:
        """Return the bank of a profile, from the cache or the database."""
        return (yield from self._cached(collection, state, profile)).bank

    def _cached(
        self,
        collection: str,
        state: CollectionState,
        profile: Profile,
        in_use: Collection[Name] = (),
    ) -> Operation[CachedBank]:
        """Return a bank with its fit. in_use: banks that must not be evicted for it."""
        name = (collection, state.field, profile.slot)
        cached = self.banks.get(name, profile)
        if cached is not None:
            return cached

        yield from self._states.expect_banks(collection, state)
        # Another task may have read it meanwhile.
        cached = self.banks.get(name, profile)
        if cached is not None:
            return cached
        bank = yield from self._states.load_bank(profile.bank)
        # Of those that waited for one reading, the first one keeps it, and all share its fit.
        return self.banks.get(name, profile) or self.banks.keep(name, profile, bank, in_use)

    def of_vectors(
        self,
        collection: str,
        state: CollectionState,
        vectors: Floats,
        rows: ItemRows,
        *,
        are_new: bool = False,
        with_measures: bool = False,
    ) -> Operation[tuple[RowBiases, RowMeasures | None]]:
        """Return the biases of rows with vectors (n, d) by slot, with their epoch, locality hints and
        kinds; and what is measured of the rows by the active profile, if that is wanted.

        are_new: whether these rows are inserted together. While a job computes all biases, new rows
        get the biases that the job would give them: in a generation and in a copy that are being
        filled.
        """
        state.expect_values(rows.rows)
        kinds = None if state.kinds is None else state.kinds.numbers_of(vectors, rows)
        are_last = are_new and state.phase == "ready"
        profiles = state.written_profiles

        # Every write needs all of these banks. They must not evict each other: each would be read
        # from the database again at the next write.
        in_use = {(collection, state.field, profile.slot) for profile in profiles}

        biases: dict[int, Floats] = {}
        locality_hints: Floats | None = None
        measures: RowMeasures | None = None
        epoch = state.profile.epoch
        for profile in profiles:
            cached = yield from self._cached(collection, state, profile, in_use)
            is_active = profile is state.profile
            # A job that fills a generation gives all rows the biases of its formula.
            are_apart = are_last and profile is not state.filling
            # A fit is restored and evaluated in a thread: both may take long.
            work = partial(
                _of_written, cached, state, vectors, rows, are_apart, with_measures and is_active
            )
            column, hints, row_measures, leaves_room = yield Compute(work)
            biases[profile.slot] = column
            if are_apart and leaves_room:
                epoch = -state.profile.epoch

            # The index is shaped by the queries of the active profile alone.
            if is_active:
                locality_hints = hints
                measures = row_measures

        # The banks of all profiles may be larger than the budget by the one that a refresh
        # replaces. As soon as no state names that, it goes.
        self.banks.evict(in_use)
        return RowBiases(biases, epoch, locality_hints, kinds), measures


def _of_written(
    cached: CachedBank,
    state: CollectionState,
    vectors: Floats,
    rows: ItemRows,
    are_new: bool,
    is_wanted: bool,
) -> tuple[Floats, Floats, RowMeasures | None, bool]:
    """Return what `Correction.of_written` does, and whether the fit leaves room for new rows."""
    correction = cached.correction(state)
    written = correction.of_written(vectors, rows, are_new=are_new, with_measures=is_wanted)
    return (*written, correction.leaves_room)
