"""Biases of new rows, from banks in memory or by searches over banks in the database. No I/O."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from milvus_hubness.correction.banks.stored import StoredBank
from milvus_hubness.correction.codec.arrays import Floats
from milvus_hubness.correction.codec.base import PENDING, RowBiases
from milvus_hubness.correction.state import BankReference, CollectionState, Profile
from milvus_hubness.errors import (
    BankTooLarge,
    EmptyBank,
    InvalidInput,
    InvalidParameter,
    StateError,
)
from milvus_hubness.jobs.store.generations import QUERIES, TARGETS
from milvus_hubness.milvus.client.messages import Bias
from milvus_hubness.milvus.client.state_cache import BankCache, CachedBank, Name, StateCache
from milvus_hubness.milvus.client.steps import Ask, ClientPolicy, Compute, LoadBank, Operation
from milvus_hubness.milvus.store.banks import bank_rows

if TYPE_CHECKING:
    from milvus_hubness.correction.estimators.nearest import Doubles, Nearest, Needs
    from milvus_hubness.correction.fitted import Correction

VECTORS_PER_REQUEST = 100
WIDENING = 4


class BankSummary(NamedTuple):
    """The values that the estimator needs of a bank that is searched on the server instead of read. mean: (d,) of the
    reduced queries. masses: (p,) τ·log Σ exp(f_i/τ) of the potentials. targets: number of targets."""

    mean: Doubles | None
    masses: Doubles
    targets: int


@dataclass(frozen=True)
class _ServerBank:
    """A bank in the database, which is read and searched within the limits of `policy`."""

    state: CollectionState
    reference: BankReference
    policy: ClientPolicy
    timeout: float | None

    def rounds(self, needs: Needs, targets: int) -> Iterator[Needs]:
        """Yield the numbers of nearest rows to request; the last round requests all rows, if they are not too many."""
        window, queries = self.policy.window, self.reference.count
        while max(needs.queries, needs.targets) <= window:
            yield needs
            wider = needs._replace(
                queries=min(needs.queries * WIDENING, window),
                targets=min(needs.targets * WIDENING, window),
            )
            if wider == needs:
                break
            needs = wider
        if max(queries, targets) <= self.policy.whole:
            yield needs._replace(queries=queries if needs.queries else 0, targets=targets)

    def nearest(
        self, needs: Needs, summary: BankSummary, vectors: Floats
    ) -> Operation[tuple[Nearest, Nearest | None]]:
        """Return the nearest queries of vectors (m, d) and, if needed, their nearest targets."""
        from milvus_hubness.correction.estimators.nearest import Nearest

        count, columns = self.reference.count, len(summary.masses)
        scores, potentials = np.empty((len(vectors), 0)), np.empty((len(vectors), 0, columns))
        means, targets = np.empty(0), None
        if summary.mean is not None:
            means = self.state.layout.reduce_items(vectors) @ summary.mean
        if needs.queries:
            scores, potentials = yield from self._search(
                QUERIES, count, needs.queries, vectors, columns
            )
        queries = Nearest(scores, max(count - needs.queries, 0), means, potentials, summary.masses)
        if needs.targets:
            scores, no_potentials = yield from self._search(
                TARGETS, summary.targets, needs.targets, vectors, 0
            )
            rest = max(summary.targets - needs.targets, 0)
            targets = Nearest(scores, rest, np.empty(0), no_potentials, np.empty(0))
        return queries, targets

    def _search(
        self, part: str, count: int, per_vector: int, vectors: Floats, columns: int
    ) -> Operation[tuple[Doubles, Doubles]]:
        """Return the falling scores (m, N) and the potentials (m, N, p) of the nearest of the `count` rows of a part,
        by one request if one answer can have all rows needed."""
        distances, potentials = [], []
        window = self.policy.window
        size = count if per_vector <= window else window
        request = {
            "data": list(vectors),
            "limit": min(per_vector, window),
            "anns_field": "vector",
            "output_fields": ["potentials"] if columns else None,
            "timeout": self.timeout,
        }
        for start in range(0, count, size):
            where = bank_rows(self.reference, [part], start, start + size)
            answers = yield Ask(
                "search", (self.reference.collection,), {**request, "filter": where}
            )
            distances.append([[hit["distance"] for hit in hits] for hits in answers])
            block = np.empty((len(vectors), len(answers[0]), columns))
            if columns:
                block[:] = [[hit["entity"]["potentials"] for hit in hits] for hits in answers]
            potentials.append(block)
        scores = np.concatenate(distances, axis=1) * (-0.5 if self.state.metric == "L2" else 1.0)
        if not scores.shape[1]:
            raise self._empty("rows")
        order = np.argsort(-scores, axis=1, kind="stable")
        ranked: Doubles = np.take_along_axis(scores, order, 1)
        return ranked, np.take_along_axis(np.concatenate(potentials, axis=1), order[..., None], 1)

    def summary(self, needs: Needs) -> Operation[BankSummary]:
        """Read the part of the whole bank that the estimator needs, page by page. Raises EmptyBank, and StateError if
        some queries are missing."""
        from milvus_hubness.correction.estimators.nearest import masses

        bank = self.reference
        count = yield from self._count(QUERIES)
        if count != bank.count:
            raise StateError(
                f"bank {bank.collection!r} has {count:,} queries and the collection state names {bank.count:,}: "
                "run refresh with --bank FILE to replace them, or run refresh to use them as they are"
            )
        total: Doubles | None = None
        mass = np.full(len(needs.temperatures), -np.inf)
        fields = ["vector"] * needs.mean + ["potentials"] * bool(needs.temperatures)
        numbers = needs.mean * self.state.dim + len(needs.temperatures)
        rows = min(self.policy.window, self.policy.numbers_per_page // max(1, numbers))
        for start in range(0, bank.count if fields else 0, rows):
            page = yield self._query(bank_rows(bank, [QUERIES], start, start + rows), fields)
            if needs.mean and page:
                queries = self.state.layout.reduce_queries([row["vector"] for row in page])
                sums = queries.sum(0, dtype=np.float64)
                total = sums if total is None else total + sums
            if needs.temperatures and page:
                mass = masses(self._potentials(page, len(mass)), needs.temperatures, mass)
        targets = (yield from self._count(TARGETS)) if needs.targets else 0
        return BankSummary(None if total is None else total / bank.count, mass, targets)

    def _count(self, part: str) -> Operation[int]:
        [counted] = yield self._query(bank_rows(self.reference, [part]), ["count(*)"])
        if not counted["count(*)"]:
            raise self._empty(part)
        return int(counted["count(*)"])

    def _query(self, where: str, fields: list[str]) -> Ask:
        options = {"filter": where, "output_fields": fields, "timeout": self.timeout}
        return Ask("query", (self.reference.collection,), options)

    def _potentials(self, page: Sequence[Mapping[str, Any]], columns: int) -> Doubles:
        potentials = [row.get("potentials", []) for row in page]
        if any(len(row) != columns for row in potentials):
            raise InvalidInput(
                f"{self.reference.collection!r} must keep {columns} potentials with every query"
            )
        return np.array(potentials, np.float64)

    def _empty(self, part: str) -> EmptyBank:
        return EmptyBank(
            f"bank {self.reference.collection!r} has no {part} of generation {self.reference.generation}: "
            "refresh with --bank FILE"
        )


def _size(state: CollectionState, profile: Profile) -> int:
    return 4 * state.dim * profile.bank.count


class Biases:
    """Banks, and the biases of vectors in every profile of their field. bank_budget: bytes of banks in memory; larger
    banks are searched on the server."""

    def __init__(self, states: StateCache, bank_budget: int) -> None:
        self._states = states
        self._banks = BankCache(bank_budget)
        self._summaries: dict[Name, tuple[Profile, BankSummary]] = {}

    def bank(
        self, collection: str, state: CollectionState, profile: Profile
    ) -> Operation[StoredBank]:
        """Return the bank of a profile, from the cache or the database."""
        return (yield from self._cached(collection, state, profile)).bank

    def _cached(
        self, collection: str, state: CollectionState, profile: Profile
    ) -> Operation[CachedBank]:
        name = (collection, state.field, profile.slot)
        cached = self._banks.get(name, profile)
        return cached or self._banks.keep(name, profile, (yield LoadBank(profile.bank)))

    def of_rows(
        self,
        collection: str,
        state: CollectionState,
        vectors: Floats,
        bias: Bias,
        timeout: float | None,
        *,
        are_new: bool,
    ) -> Operation[RowBiases]:
        """Return the biases of vectors (n, d) by slot, with their epoch and locality hints.

        are_new: whether these rows are inserted together. While a job computes all biases, new rows get the biases that
        the job would give them: for incoming profiles, and for a copy or a second field that is being filled. If the
        bank is too large, the hints are zeros, which a refresh fills.
        """
        if bias not in ("compute", "pending"):
            raise InvalidParameter(f'bias must be "compute" or "pending", not {bias!r}')
        locality_hints = np.zeros((len(vectors), state.layout.locality_hint_count), np.float32)
        if bias == "pending":
            none = np.zeros(len(vectors), np.float32)
            return RowBiases(dict.fromkeys(range(state.slots), none), PENDING, locality_hints)
        budget, are_last = self._banks.budget, are_new and state.phase == "ready"
        work: list[tuple[Profile, tuple[int, ...], int, bool]] = [
            (profile, (profile.slot, profile.standby), budget, are_last)
            for profile in state.profiles.values()
        ]
        for moving in (state.outgoing, state.incoming):
            if moving is None:
                continue
            # Two banks that would evict each other from memory at every write are searched on the server.
            other = state.profiles.get(moving.name)
            budget -= _size(state, other) if other and _size(state, other) <= budget else 0
            work.append((moving.profile, (moving.profile.slot,), budget, False))
        biases: dict[int, Floats] = {}
        for profile, slots, room, new in work:
            if _size(state, profile) > room:
                column = yield from self._by_search(
                    collection, state, profile, vectors, timeout, are_new=new
                )
            else:
                cached = yield from self._cached(collection, state, profile)
                correction: Correction = yield Compute(partial(cached.correction, state.layout))
                column, hints = yield Compute(partial(correction.of_rows, vectors, are_new=new))
                locality_hints = hints if profile is state.profile else locality_hints
            biases |= dict.fromkeys(slots, column)
        epoch = state.profile.epoch
        if are_last:
            from milvus_hubness.correction.fitted import epoch_of_new_rows

            epoch = epoch_of_new_rows(state)
        return RowBiases(biases, epoch, locality_hints)

    def _by_search(
        self,
        collection: str,
        state: CollectionState,
        profile: Profile,
        vectors: Floats,
        timeout: float | None,
        *,
        are_new: bool,
    ) -> Operation[Floats]:
        """Return biases (n,) of vectors (n, d) in a profile, within the estimator's tolerance, by exact searches. They
        request more and more of a vector's nearest rows, until the others can add no more than the tolerance. are_new:
        every row is treated as the only new one. Raises BankTooLarge, and EmptyBank if the bank has no rows."""
        from milvus_hubness.correction.estimators import from_dict

        estimator = from_dict(profile.estimator)
        yield from self._states.ensure_loaded(profile.bank.collection, timeout)
        tolerance, name = estimator.needs.tolerance, (collection, state.field, profile.slot)
        bank, window = (
            _ServerBank(state, profile.bank, self._states.policy, timeout),
            self._states.policy.window,
        )
        summarised, summary = self._summaries.get(name, (None, None))
        if summary is None or summarised != profile:
            summary = yield from bank.summary(estimator.needs)
            self._summaries[name] = (profile, summary)
        rounds = list(bank.rounds(estimator.needs, summary.targets))
        if not rounds:
            raise self._too_large(profile, f"the {estimator.needs.queries:,} nearest")
        biases = np.full(len(vectors), profile.mean_bias)
        open_rows = np.flatnonzero(~state.layout.invalid(vectors))
        for needs in rounds:
            uncertain = [open_rows[:0]]
            at_once = max(
                1, min(VECTORS_PER_REQUEST, window // max(needs.queries, needs.targets, 1))
            )
            for start in range(0, len(open_rows), at_once):
                rows = open_rows[start : start + at_once]
                queries, targets = yield from bank.nearest(needs, summary, vectors[rows])
                result = estimator.from_nearest(replace(queries, are_new=are_new), targets)
                if needs is rounds[-1] and result.errors.max() > tolerance:
                    raise self._too_large(
                        profile,
                        f"more of it: the {window:,} nearest give a bias to {result.errors.max():.1e} and "
                        f"not to {tolerance:.0e}",
                    )
                biases[rows] = result.biases
                uncertain.append(rows[result.errors > tolerance])
            open_rows = np.concatenate(uncertain)
        centred = (biases - profile.mean_bias).astype(np.float32)
        if not np.isfinite(centred).all():
            raise InvalidInput(
                f"{estimator!r} gives biases that are not finite in float32: refresh with another one"
            )
        return centred

    def _too_large(self, profile: Profile, needed: str) -> BankTooLarge:
        return BankTooLarge(
            f"the bank {profile.bank.collection!r} of {profile.bank.count:,} queries is larger than "
            f"bank_budget, {self._banks.budget:,} bytes, and {profile.estimator['name']} needs {needed}. "
            'Give a larger budget, or write with bias="pending" and refresh'
        )
