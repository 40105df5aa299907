"""Corrections: estimators fitted for the vectors of a collection, or loaded from its bank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import ValidationError

from milvus_hubness.basics.bounds import problem_in
from milvus_hubness.correction.banks.bank import BankLike, QueryBank
from milvus_hubness.correction.banks.stored import StoredBank
from milvus_hubness.correction.codec.arrays import Floats, lengths_of
from milvus_hubness.correction.codec.base import RowBiases
from milvus_hubness.correction.codec.index_hints import (
    NEAR,
    columns,
    coordinates,
    evenly,
    landmark_rows,
)
from milvus_hubness.correction.codec.layout import Layout
from milvus_hubness.correction.estimators import Estimator, FittedBias, from_dict, to_dict
from milvus_hubness.correction.estimators.base import ITEMS, TargetBank, score_spread
from milvus_hubness.correction.estimators.products import MOST_PRODUCTS
from milvus_hubness.correction.guard import (
    MOST_MEASURED,
    Evidence,
    reach_of,
)
from milvus_hubness.correction.items import ItemRows
from milvus_hubness.correction.kernels import topk
from milvus_hubness.correction.kernels.policy import resolve_device, uses_numpy
from milvus_hubness.correction.kernels.rows import all_scores, as_floats, has_numbers, longest
from milvus_hubness.correction.kernels.token_rows import is_token_rows
from milvus_hubness.correction.kinds import GalleryKinds, KindNumbers, KindRule, Kinds
from milvus_hubness.correction.near_copies import with_groups
from milvus_hubness.correction.prior import Clicks, Prior, Values
from milvus_hubness.correction.state import BankReference, CollectionState, Profile
from milvus_hubness.errors import InvalidInput, InvalidParameter, ZeroVectors

Biases = npt.NDArray[np.floating[Any]]

BIAS_TOLERANCE = 1e-5
"""How much two computations of one bias may differ, relative to a centred bias of at least 1."""
ROUNDING = 2.0**-20
"""How much they may differ relative to the numbers that they add up.

It is eight units in the last place of float32.
"""


class RowMeasures(NamedTuple):
    """What is measured of n rows that are written."""

    biases: Floats
    """(n,), centred, without a prior."""
    reaches: Floats | None
    """(n,) shares of the bank, see `reach_of`; None if the estimator keeps no scores of the gallery."""


class _Landmarks(NamedTuple):
    """The m bank queries that items are compared with for their locality hints."""

    directions: Floats
    """(m, d): the queries at length 1."""
    coordinates: Floats
    """(m, c): their coordinates in the locality hint columns."""
    lengths: Floats
    """(m,): the lengths of the queries in the bank; 1 in place of 0."""
    reach: float
    """The length of an item's hints."""


@dataclass(frozen=True)
class Correction:
    """Biases of a collection's vectors, in its own metric."""

    layout: Layout
    """It reduces the vectors to inner products with the bank."""
    fitted: FittedBias
    """The fit on the reduced bank."""
    mean_bias: float = 0.0
    """c, subtracted from every bias so that the stored column stays near zero, which costs an ANN
    index less recall; no ranking changes."""
    are_new: bool = False
    """Whether the items were added together after the fit, see `FittedBias.new_bias`."""
    queries: QueryBank | None = None
    """The bank as the caller gave it, with its groups; `fitted.bank` has one query for each."""
    prior: Prior | None = None
    """What the numbers of rows get in addition; then `centred` and `of_rows` need these rows."""
    clicks: Clicks = field(default_factory=dict)
    """The clicks of a prior from clicks."""
    kinds: Kinds | None = None
    """The kinds of items with whose means vectors are compared; methods then need the rows of the
    vectors, or their kinds. None for none."""
    evidence: Evidence | None = None
    """Quantiles of the gallery for the hub guard, where a job has measured them."""

    @classmethod
    def fit(
        cls,
        layout: Layout,
        estimator: Estimator,
        bank: BankLike,
        *,
        gallery: npt.ArrayLike | None = None,
        target_bank: BankLike | None = None,
        start: Floats | None = None,
        kinds: Kinds | None = None,
        gallery_kinds: KindNumbers | None = None,
    ) -> Correction:
        """Fit the estimator on the bank, gallery (n, d) and target bank.

        The layout reduces them to inner products. start: potentials of an earlier fit on this bank,
        for iterative estimators. kinds: the means to compare with. gallery_kinds: (n,) those
        of the gallery. Raises DimensionMismatch, BankTooSmall, ZeroVectors for a bank of zero vectors
        only, and InvalidInput if the estimator needs an argument that is missing, or for a target
        bank with kinds.
        """
        reduced = _reduced_bank(layout, bank, kinds)
        inputs: dict[str, Any] = {"gallery": None, "target_bank": None}
        if gallery is not None:
            items = as_floats(gallery)
            valid = ~layout.invalid(items)
            numbers = None if gallery_kinds is None else gallery_kinds[valid]
            inputs["gallery"] = reduced_items(layout, items[valid], kinds, numbers)
        if target_bank is not None:
            _expect_no_targets(kinds)
            inputs["target_bank"] = reduced_targets(layout, target_bank)
        # Potentials of another estimator are no starting point, but no mistake of the user either.
        if start is not None and start.shape == (len(reduced), estimator.potentials):
            inputs["start"] = start

        fitted = estimator.fit(reduced, **inputs)
        return cls(layout, fitted, queries=QueryBank.of(bank), kinds=kinds)

    @classmethod
    def restore(
        cls,
        layout: Layout,
        estimator: Estimator,
        bank: StoredBank,
        mean_bias: float = 0.0,
        prior: Prior | None = None,
        kinds: Kinds | None = None,
    ) -> Correction:
        """Restore an earlier fit from its bank and potentials, without the gallery.

        Raises as `fit` does.
        """
        targets = None if bank.targets is None else reduced_targets(layout, bank.targets)
        queries = _reduced_bank(layout, bank.queries, kinds)
        fitted = estimator.restore(queries, bank.potentials, target_bank=targets)
        return cls(
            layout,
            fitted,
            mean_bias,
            queries=bank.queries,
            prior=prior,
            clicks=bank.clicks,
            kinds=kinds,
        )

    def stored_bank(self, target_bank: QueryBank | None) -> StoredBank:
        """Return the bank of the fit with its potentials, from which `restore` makes the fit again.

        target_bank: that of the fit, if the estimator needs one.
        """
        queries = self.queries
        assert queries is not None, "a correction that is fitted or restored has its queries"
        potentials = queries.of_queries(self.fitted.potentials)
        return StoredBank(queries, potentials, target_bank, clicks=self.clicks)

    @classmethod
    def of_profile(cls, state: CollectionState, profile: Profile, bank: StoredBank) -> Correction:
        """Restore the fit of a profile of this state from its bank. Raises as `fit` does."""
        return cls.restore(
            state.layout,
            from_dict(profile.estimator),
            bank,
            profile.mean_bias,
            profile.prior,
            state.kinds_of(profile),
        )

    @property
    def leaves_room(self) -> bool:
        """Whether items that come together after the fit have other biases than those of the gallery.

        The epoch of such rows is negative.
        """
        return self.fitted.estimator.potentials > 0

    def kinds_of(self, vectors: Floats, rows: ItemRows | None) -> KindNumbers | None:
        """Return the kinds of vectors (n, d), (n,); None without kinds."""
        return None if self.kinds is None else self.kinds.rule.numbers_of(vectors, rows)

    def items_of(self, vectors: Floats, numbers: KindNumbers | None) -> Floats:
        """Return valid vectors (n, d) of these kinds (n,) as the fit compares them."""
        return reduced_items(self.layout, vectors, self.kinds, numbers)

    def locality_hints(
        self,
        vectors: npt.ArrayLike,
        rows: ItemRows | None = None,
        *,
        kinds: KindNumbers | None = None,
    ) -> Floats:
        """Return the c locality hint columns of vectors (n, d), float32 (n, c).

        They follow from the nearest bank queries, and are 0 for vectors that can have no bias. rows,
        kinds: as in `centred`.
        """
        vectors_of_rows = as_floats(vectors)
        valid = ~self.layout.invalid(vectors_of_rows)
        hints = np.zeros((len(vectors_of_rows), self.layout.locality_hint_count), np.float32)
        if hints.size and valid.any():
            landmarks = self._landmarks
            numbers = self.kinds_of(vectors_of_rows, rows) if kinds is None else kinds
            items = self.items_of(vectors_of_rows[valid], _where(valid, numbers))
            count = min(NEAR, len(landmarks.directions))
            near = topk(items, landmarks.directions, count)
            hints[valid] = self._hints_of(np.asarray(near.indices))
        return hints

    def _hints_of(self, near: npt.NDArray[np.int64]) -> Floats:
        """Return the locality hint columns of items by their nearest landmarks (n, k)."""
        return columns(self._landmarks.coordinates[near], self._landmarks.reach)

    def of_rows(
        self, vectors: Floats, rows: ItemRows | None = None, *, are_new: bool
    ) -> tuple[Floats, Floats]:
        """Return what `centred` and `locality_hints` return of vectors (n, d).

        Both follow from one product with the bank if it is of a size that NumPy computes at once.

        are_new: in place of that of the correction.
        """
        biases, hints, _ = self.of_written(vectors, rows, are_new=are_new)
        return biases, hints

    def of_written(
        self,
        vectors: Floats,
        rows: ItemRows | None = None,
        *,
        are_new: bool,
        with_measures: bool = False,
    ) -> tuple[Floats, Floats, RowMeasures | None]:
        """Return what `of_rows` returns, and what is measured of the rows if that is wanted.

        The reach follows from the same product with the bank.
        """
        vectors = as_floats(vectors)
        numbers = self.kinds_of(vectors, rows)
        valid = ~self.layout.invalid(vectors)
        if not self._computes_at_once(len(vectors)):
            correction = replace(self, are_new=are_new)
            neutral = correction._neutral(vectors, valid, numbers)
            biases = self.with_prior(neutral, valid, rows)
            hints = self.locality_hints(vectors, kinds=numbers)
            measures = (
                RowMeasures(neutral, self.reaches(vectors, numbers)) if with_measures else None
            )
            return biases, hints, measures

        neutral = np.zeros(len(vectors), np.float32)
        hints = np.zeros((len(vectors), self.layout.locality_hint_count), np.float32)
        if not valid.any():
            return neutral, hints, None

        items = self.items_of(vectors[valid], _where(valid, numbers))
        products = all_scores(items, self.fitted.bank.vectors)
        uncentred = self.fitted.bias_of_products(products, are_new=are_new)
        neutral[valid] = self._finite(uncentred - np.float32(self.mean_bias))

        biases = self.with_prior(neutral, valid, rows)
        # A prior may be large: whoever plants a hub may also claim that it is popular.
        measures = RowMeasures(neutral, self._reaches(products, valid)) if with_measures else None

        if hints.size:
            # The nearest landmark has the largest product with its direction, not with itself.
            landmarks = self._landmarks
            scores = products[:, landmark_rows(products.shape[1])] / landmarks.lengths
            count = min(NEAR, scores.shape[1])
            near = np.argpartition(scores, -count, axis=1)[:, -count:]
            hints[valid] = self._hints_of(near)
        return biases, hints, measures

    def _reaches(
        self, products: npt.NDArray[np.floating[Any]], valid: npt.NDArray[np.bool_]
    ) -> Floats | None:
        """Return the reach of rows, 0 where `valid` (n,) is false; None if the fit has none.

        products: those of the valid rows with the bank.
        """
        scores = self.fitted.gallery_scores
        if scores is None:
            return None
        reaches = np.zeros(len(valid), np.float32)
        reaches[valid] = reach_of(products, scores)
        return reaches

    def reaches(
        self,
        vectors: npt.ArrayLike,
        kinds: KindNumbers | None = None,
    ) -> Floats | None:
        """Return the reach of vectors (n, d) of these kinds (n,), float32 (n,), 0 for those that can
        have no bias.

        It is the share of bank queries whose ten best scores have a mean below the vector's score;
        None if the estimator keeps no scores of the gallery.
        """
        if self.fitted.gallery_scores is None:
            return None
        items = as_floats(vectors)
        valid = ~self.layout.invalid(items)
        reaches = np.zeros(len(items), np.float32)
        bank = self.fitted.bank.vectors
        size = max(1, MOST_PRODUCTS // len(bank))
        positions = np.flatnonzero(valid)
        for start in range(0, len(positions), size):
            some = positions[start : start + size]
            numbers = None if kinds is None else kinds[some]
            reduced = self.items_of(items[some], numbers)
            products = all_scores(reduced, bank)
            reaches[some] = reach_of(products, self.fitted.gallery_scores)
        return reaches

    def measured(self, vectors: Floats, kinds: KindNumbers | None = None) -> Correction:
        """Return this correction with the quantiles of a gallery (n, d) with these kinds (n,), or of a
        sample of it.
        """
        vectors = as_floats(vectors)
        rows = np.flatnonzero(~self.layout.invalid(vectors))
        if len(rows) > MOST_MEASURED:
            rows = np.sort(np.random.default_rng(0).permutation(rows)[:MOST_MEASURED])
        items = vectors[rows]
        numbers = None if kinds is None else kinds[rows]
        valid = np.ones(len(items), np.bool_)
        biases = replace(self, are_new=False)._neutral(items, valid, numbers)
        return replace(self, evidence=Evidence.of(biases, self.reaches(items, numbers)))

    def _computes_at_once(self, rows: int) -> bool:
        """Whether NumPy should compute all products of so many vectors with the bank at once."""
        bank = self.fitted.bank.vectors
        product_count = rows * len(bank)
        if product_count > MOST_PRODUCTS:
            return False
        if not self.fitted.takes_products:
            return False
        # Only CUDA computes a large product so much faster that two of them take less time.
        is_small = uses_numpy(product_count * bank.shape[1])
        return is_small or resolve_device().type != "cuda"

    @cached_property
    def _landmarks(self) -> _Landmarks:
        bank = self.fitted.bank.vectors
        hints = self.layout.locality_hints
        if hints is None or is_token_rows(bank):
            raise InvalidInput(
                "locality hints are of rows with one vector: use a layout without them"
            )
        directions = evenly(bank)
        lengths = lengths_of(bank[landmark_rows(len(bank))]).astype(np.float32)
        return _Landmarks(
            directions=directions,
            coordinates=coordinates(directions, hints.directions_in(self.layout.dim)),
            lengths=np.where(lengths == 0, 1, lengths),
            reach=hints.reach,
        )

    def centred(
        self,
        vectors: npt.ArrayLike,
        rows: ItemRows | None = None,
        *,
        kinds: KindNumbers | None = None,
    ) -> Floats:
        """Return the numbers that rows store: b(r) − c of vectors (n, d), float32 (n,).

        With a prior, its numbers for these rows are added. They are 0 for vectors that are not
        finite or, under COSINE, zero. kinds: (n,), if the caller has them already; else they follow
        from the vectors or the rows.
        """
        vectors_of_rows = as_floats(vectors)
        valid = ~self.layout.invalid(vectors_of_rows)
        numbers = self.kinds_of(vectors_of_rows, rows) if kinds is None else kinds
        neutral = self._neutral(vectors_of_rows, valid, numbers)
        return self.with_prior(neutral, valid, rows)

    def _neutral(
        self, vectors: Floats, valid: npt.NDArray[np.bool_], numbers: KindNumbers | None
    ) -> Floats:
        """Return b(r) − c of vectors (n, d) of these kinds (n,), 0 where `valid` (n,) is false: without
        a prior.
        """
        neutral = np.zeros(len(vectors), np.float32)
        if valid.any():
            items = self.items_of(vectors[valid], _where(valid, numbers))
            neutral[valid] = self._finite(self._biases(items) - np.float32(self.mean_bias))
        return neutral

    def with_prior(
        self,
        biases: Floats,
        valid: npt.NDArray[np.bool_],
        rows: ItemRows | None,
        values: Values | None = None,
    ) -> Floats:
        """Return biases (n,) with the numbers of the prior, if there is one, where `valid` (n,).

        values: (n,), if the caller has them already; else they are read from the rows. Raises as
        `Prior.values_of` does.
        """
        if self.prior is None:
            return biases
        if values is None:
            # A caller that forgot the rows would store numbers without the prior.
            if rows is None:
                raise RuntimeError("a correction with a prior needs the rows of the vectors")
            values = self.prior.values_of(rows, self.clicks)
        return np.where(valid, self._finite(biases + self.prior.of(values)), biases)

    def spread(self, vectors: Floats, kinds: KindNumbers | None = None) -> float:
        """Return the spread of the bank's scores over vectors (n, d) of these kinds (n,), see
        `score_spread`.
        """
        vectors = as_floats(vectors)
        rows = np.flatnonzero(~self.layout.invalid(vectors))
        if not len(rows):
            return 0.0
        # It is measured on so many: the others need not be copied.
        some = rows[np.linspace(0, len(rows) - 1, min(ITEMS, len(rows)), dtype=np.int64)]
        items = self.items_of(vectors[some], None if kinds is None else kinds[some])
        return score_spread(self.fitted.bank, items)

    def allowed_differences(
        self,
        vectors: Floats,
        centred: Floats,
        tolerance: float = BIAS_TOLERANCE,
        rows: ItemRows | None = None,
    ) -> Floats:
        """Return how much stored biases may differ from those computed now, (n,).

        Similarities, and biases before they are centred, may be far larger than centred biases, if
        vectors are long or far from the bank. Their float32 rounding depends on the other rows of
        the same computation, so that it is allowed too.

        vectors: (n, d). centred: (n,), their biases. tolerance: relative to centred biases of at
        least 1. rows: as in `centred`.
        """
        vectors = as_floats(vectors)
        valid = ~self.layout.invalid(vectors)
        size = np.zeros(len(vectors))
        if valid.any():
            # At least as large as the sum of sizes of the terms of any inner product.
            numbers = self.kinds_of(vectors, rows)
            items = self.items_of(vectors[valid], _where(valid, numbers))
            terms = _largest_terms(items, self.fitted.bank.vectors)
            size[valid] = np.maximum(terms, np.abs(centred[valid] + self.mean_bias))

        of_biases = tolerance * np.maximum(1, np.abs(centred))
        return np.maximum(of_biases, ROUNDING * size)

    def _finite(self, biases: Biases) -> Floats:
        """Return the biases as float32.

        Raises InvalidInput for NaN and infinity, which a database would store and rank by.
        """
        with np.errstate(over="ignore"):
            rounded = np.asarray(biases, np.float32)
        if not np.isfinite(rounded).all():
            raise InvalidInput(
                f"{self.fitted.estimator!r} gives biases that are not finite in float32: "
                "choose other parameters"
            )
        return rounded

    def _biases(self, items: Floats) -> Biases:
        """Return the biases (n,) of items (n, d) as `items_of` returns them."""
        bias = self.fitted.new_bias if self.are_new else self.fitted.bias
        return bias(items)


def _largest_terms(items: Floats, bank: Floats) -> Biases:
    """Return at least the sum of sizes of the terms of each item's score with any bank query, (n,)."""
    if is_token_rows(items):
        return np.asarray(longest(items) * longest(bank).max())
    return np.asarray(np.abs(items) @ np.abs(bank).max(axis=0))


def row_biases(
    corrections: Mapping[int, Correction],
    vectors: Floats,
    rows: ItemRows,
    state: CollectionState,
    epoch: int | None,
) -> RowBiases:
    """Return the biases of rows with vectors (n, d) from the corrections by slot.

    The locality hints are those of the active profile.
    """
    kinds = None if state.kinds is None else state.kinds.numbers_of(vectors, rows)
    by_slot = {
        slot: correction.centred(vectors, rows, kinds=kinds)
        for slot, correction in corrections.items()
    }

    active = corrections[state.profile.slot]
    return RowBiases(by_slot, epoch, active.locality_hints(vectors, kinds=kinds), kinds)


def initial_state(
    layout: Layout,
    estimator: Estimator,
    bank: BankReference,
    *,
    mean_bias: float = 0.0,
    strength: float = 1.0,
    gate: int | None = None,
    prior: Prior | None = None,
    kinds: Kinds | None = None,
    evidence: Evidence | None = None,
    **others: Any,
) -> CollectionState:
    """Return the first state of a field: one profile, refreshed now.

    others: further fields of the state. Raises InvalidParameter for values that no reader of the
    state accepts.
    """
    created_at = datetime.now(timezone.utc)
    try:
        profile = Profile(
            estimator=to_dict(estimator),
            slot=0,
            mean_bias=mean_bias,
            strength=strength,
            gate=gate,
            bank=bank,
            prior=prior,
            kinds=None if kinds is None else kinds.means,
            epoch=1,
            refreshed_at=created_at,
            fitted_at=created_at,
            evidence=evidence,
        )
        return CollectionState(
            layout=layout,
            profiles={"default": profile},
            kinds=None if kinds is None else kinds.rule,
            **others,
        )
    except ValidationError as error:
        raise InvalidParameter(
            f"no collection can be corrected with these values{problem_in(error)}"
        ) from None


def reduced_items(
    layout: Layout, vectors: Floats, kinds: Kinds | None, numbers: KindNumbers | None
) -> Floats:
    """Return valid vectors (n, d) of these kinds (n,) for inner products: less the means of their
    kinds, if there are kinds.
    """
    items = layout.reduce_items(vectors)
    if kinds is None:
        return items
    if is_token_rows(items):
        raise InvalidInput("vectors of many tokens are not compared by kind: leave the kinds out")
    if numbers is None:
        raise RuntimeError("items of several kinds are compared by their kinds")
    return kinds.centred_items(items, numbers)


def reduced_queries(layout: Layout, queries: npt.ArrayLike, kinds: Kinds | None) -> Floats:
    """Return the counterpart of `reduced_items` for queries (m, d)."""
    reduced = layout.reduce_queries(queries)
    return reduced if kinds is None else kinds.centred_queries(reduced)


def measured_kinds(
    layout: Layout,
    rule: KindRule | None,
    vectors: Floats,
    numbers: KindNumbers | None,
    bank: QueryBank,
) -> Kinds | None:
    """Return the kinds with their means of vectors (n, d) of kinds `numbers` (n,); None without a
    rule.

    A bank that is a log repeats what is popular: its near copies count once.
    """
    if rule is None or numbers is None:
        return None
    valid = ~layout.invalid(vectors)
    queries = layout.reduce_queries(bank.condensed.vectors)
    return Kinds.measured(rule, layout.reduce_items(vectors[valid]), numbers[valid], queries)


def gallery_kinds(
    layout: Layout,
    rule: KindRule | None,
    vectors: Floats,
    numbers: KindNumbers | None,
    bank: QueryBank,
) -> GalleryKinds | None:
    """Return the kinds of vectors (n, d) with their means, see `measured_kinds`."""
    kinds = measured_kinds(layout, rule, vectors, numbers, bank)
    return None if kinds is None or numbers is None else GalleryKinds(kinds, numbers)


def _where(valid: npt.NDArray[np.bool_], numbers: KindNumbers | None) -> KindNumbers | None:
    return None if numbers is None else numbers[valid]


def _expect_no_targets(kinds: Kinds | None) -> None:
    if kinds is not None:
        raise InvalidInput(
            "a target bank has no kinds, with whose means its items would be compared: leave the "
            "target bank out, or the kinds"
        )


def grouped(layout: Layout, bank: QueryBank, vectors: npt.ArrayLike) -> QueryBank:
    """Return the bank with the groups of its near copies, as `with_groups` finds them.

    vectors: (n, d), of the gallery or a sample of it; without a valid one, the bank is returned as it
    is. Raises as `Correction.fit` does.
    """
    items = _valid(layout, vectors)
    if bank.groups is not None or not len(items):
        return bank
    # Under L2, a reduced query has more columns, which would hide how near two queries are.
    reduced = with_groups(
        _reduced_bank(layout, bank), layout.reduce_items(items), vectors=bank.vectors
    )
    return replace(bank, groups=reduced.groups)


def _reduced_bank(layout: Layout, bank: BankLike, kinds: Kinds | None = None) -> QueryBank:
    """Reduce the queries of a bank to inner products, less their mean if there are kinds.

    Raises DimensionMismatch, and ZeroVectors if all queries are zero.
    """
    bank = QueryBank.of(bank)
    bank.expect_rows(layout.multi_vectors, "the field")
    bank.expect_dim(layout.dim, "the field")
    if not has_numbers(bank.vectors):
        raise ZeroVectors(
            f"the bank from {bank.source} has only zero vectors, which are near no item: "
            "pass queries as the application sends them"
        )
    return replace(bank, vectors=reduced_queries(layout, bank.vectors, kinds))


def reduced_targets(layout: Layout, bank: BankLike) -> TargetBank:
    """Reduce a target bank to inner products.

    Raises DimensionMismatch, and EmptyBank if it has no valid row.
    """
    bank = QueryBank.of(bank)
    bank.expect_dim(layout.dim, "the field")
    rows = _valid(layout, bank.vectors)
    return TargetBank(layout.reduce_items(rows), bank.source, asking=layout.reduce_queries(rows))


def _valid(layout: Layout, vectors: npt.ArrayLike) -> Floats:
    """Return the rows that are finite and, under COSINE, not zero."""
    rows: Floats = as_floats(vectors)
    valid: Floats = rows[~layout.invalid(rows)]
    return valid
