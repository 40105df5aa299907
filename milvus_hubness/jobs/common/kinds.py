"""The kinds of items of a job: what the caller asks for, and what the rows say of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from milvus_hubness.basics.progress import Progress, silent
from milvus_hubness.basics.texts import field_words
from milvus_hubness.correction.banks.bank import QueryBank
from milvus_hubness.correction.codec.arrays import Floats, lengths_of, rows_as_text, unit_directions
from milvus_hubness.correction.codec.index_hints import room_for_hints
from milvus_hubness.correction.codec.layout import Layout
from milvus_hubness.correction.codec.parts import KindColumns
from milvus_hubness.correction.items import ItemRows
from milvus_hubness.correction.kinds import (
    AUTO,
    FEWEST_OF_A_KIND,
    LEAST_PREFERENCE,
    MOST_KINDS,
    Identity,
    KindCounts,
    KindRule,
    expect_room,
    identity_of,
    preferred,
    rule_of_field,
)
from milvus_hubness.errors import CannotMigrate, InvalidInput
from milvus_hubness.jobs.common.progress import key_chunks
from milvus_hubness.jobs.store.protocols import Store
from milvus_hubness.jobs.store.records import CollectionInfo
from milvus_hubness.quality.clusters import clusters_of

FEWEST_ROWS = 200
"""Fewer rows show no clusters."""
STARTS = 3
"""Number of starts of k-means, of which the best one counts."""
FRACTION = 1 / 16
"""Size of the number in the column of a kind, in lengths of an item: two items of one kind get its
square in their inner product, by which a graph links them.
"""


@dataclass(frozen=True)
class KindRequest:
    """The kinds that the caller of a job asks for."""

    name: str | None = None
    """A field of the rows, or AUTO; None for no kinds."""

    @classmethod
    def of(cls, kind: str | None) -> KindRequest:
        """Return the request of a caller. Raises InvalidInput."""
        if kind is not None and (not isinstance(kind, str) or not kind):
            raise InvalidInput(
                f"kind is the name of a field of the rows, or {AUTO!r}, not {kind!r}"
            )
        return cls(kind)

    def expect_possible(self, layout: Layout, field: str) -> None:
        """Raise CannotMigrate if vectors in this layout have no columns for kinds."""
        if self.name is None:
            return
        vectors = field_words(field)
        if layout.multi_vectors:
            raise CannotMigrate(
                f"{vectors} has several vectors a row, of which each would need the offset of its kind: "
                "leave the kinds out"
            )
        if layout.metric == "L2":
            raise CannotMigrate(
                f"{vectors} is compared by L2, under which kinds would change ½‖r‖² of each row: "
                "leave the kinds out, or give it the metric COSINE or IP"
            )
        if layout.slots.spread > 1:
            raise CannotMigrate(
                f"the quantizer of {vectors} rounds all columns alike, and would clip what queries "
                "send for kinds: leave the kinds out, or turn the quantization off"
            )

    def expect_no_targets(self, target_bank: object) -> None:
        """Raise InvalidInput for a target bank, whose items have no kinds."""
        if self.name is not None and target_bank is not None:
            raise InvalidInput(
                "a target bank has no kinds, with whose means its items would be compared: leave "
                "the target bank out, or the kinds"
            )


@dataclass(frozen=True)
class ChosenKinds:
    """The kinds of a plan."""

    rule: KindRule | None = None
    """How rows get their kind; None without kinds."""
    remarks: tuple[str, ...] = ()
    """What the user should know of them."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """Rows by name of their kind, of those that were counted."""

    @property
    def source(self) -> str:
        """What a caller names for them: a field, or AUTO; empty without kinds."""
        return self.rule.source if self.rule is not None else ""

    @property
    def facts(self) -> dict[str, Any] | None:
        """What a plan says of them, as plain data; None without kinds."""
        if self.rule is None:
            return None
        return {
            "field": self.rule.field or None,
            "names": list(self.rule.names),
            "counts": dict(self.counts),
        }


NO_KINDS = ChosenKinds()


def chosen_kinds(
    store: Store,
    info: CollectionInfo,
    request: KindRequest,
    layout: Layout,
    vectors: Floats,
    bank: QueryBank,
    *,
    hidden: frozenset[str] = frozenset(),
    progress: Progress = silent,
) -> ChosenKinds:
    """Return the kinds that the caller asks for.

    vectors: (n, d), a sample, for AUTO. hidden: fields of the rows that are not the user's. Raises
    InvalidInput, in one line, for a field with too many values or without two kinds.
    """
    if request.name is None:
        return NO_KINDS
    if request.name == AUTO:
        return of_clusters(layout, vectors, bank)
    if request.name in hidden or request.name in info.vector_fields:
        raise InvalidInput(
            f"field {request.name!r} of {info.name!r} is a vector, or computed from the bank: name "
            "a field of the application with the kind of each row"
        )

    counted = _counted(store, info, request.name, progress)
    rule = rule_of_field(request.name, info.name, counted)
    expect_room(rule, layout.dim)
    rows_of = {identity_of(value): count for value, count in counted.counts}
    rows_by_kind = [rows_of[identity_of(value)] for value in rule.values]
    counts = dict(zip(rule.names, rows_by_kind, strict=True))
    without = counted.without + sum(rows_of.values()) - sum(rows_by_kind)
    remarks = []
    if without:
        remarks.append(
            f"{without:,} rows have no kind, as their {request.name!r} is missing, rare or no name: "
            "they count as average items"
        )
    return ChosenKinds(rule, tuple(remarks), counts)


def _counted(store: Store, info: CollectionInfo, name: str, progress: Progress) -> KindCounts:
    """Count the values of a field in all rows, until there are too many."""
    counts: Counter[Identity] = Counter()
    without = 0
    doing = f"reading field {name!r}"
    for partition, keys in key_chunks(store, info, doing, progress):
        values = store.values(info.name, name, keys, partition=partition, are_numbers=False)
        for value in values.values():
            identity = identity_of(value)
            if identity is None:
                without += 1
            else:
                counts[identity] += 1
        if len(counts) > MOST_KINDS:
            break
    return KindCounts([(value, count) for (_, value), count in counts.items()], without)


def of_clusters(layout: Layout, vectors: Floats, bank: QueryBank) -> ChosenKinds:
    """Return the kinds that two clusters of vectors (n, d) show; none unless their gap is real.

    It is real if nearly all queries of the bank are nearer to the same cluster.
    """
    items = unit_directions(layout.reduce_items(vectors[~layout.invalid(vectors)]))
    items = items[items.any(axis=1)]
    if len(items) < FEWEST_ROWS:
        return ChosenKinds(remarks=(f"{len(items)} rows are too few to look for kinds",))

    means, numbers = two_means(items)
    preference = preferred(means, unit_directions(layout.reduce_queries(bank.condensed.vectors)))
    counts = np.bincount(numbers, minlength=2)
    if preference < LEAST_PREFERENCE:
        return ChosenKinds(
            remarks=(
                "no kinds were found: queries prefer one of two clusters of the rows by "
                f"{preference:.1f} standard deviations, and kinds need {LEAST_PREFERENCE:g}",
            )
        )

    direction = means[1] - means[0]
    midpoint = 0.5 * float(means[1] @ means[1] - means[0] @ means[0])
    rule = KindRule(direction=rows_as_text(direction[None, :]), threshold=midpoint)
    expect_room(rule, layout.dim)
    remark = (
        f"the rows show two kinds, of {counts[0]:,} and {counts[1]:,} of {len(items):,} rows: "
        f"queries prefer one by {preference:.1f} standard deviations"
    )
    by_name = dict(zip(rule.names, counts.tolist(), strict=True))
    return ChosenKinds(rule, (remark,), by_name)


def two_means(
    items: npt.NDArray[np.float64],
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """Return the means (2, d) of two clusters of items (n, d), and the cluster of each, (n,).

    The larger cluster comes first. The starts are the same every time. Items that are all equal are in
    one cluster, whose mean is both.
    """
    if (items == items[0]).all():
        return np.stack([items[0], items[0]]), np.zeros(len(items), np.int64)

    clusters = clusters_of(items, 2, starts=STARTS)
    means = clusters.means
    numbers, _ = clusters.nearest(items)
    if (numbers == 1).sum() > (numbers == 0).sum():
        return means[::-1], 1 - numbers
    return means, numbers


def with_kinds(layout: Layout, rule: KindRule | None, vectors: Floats) -> Layout:
    """Return the layout with columns for the kinds of a rule. vectors: (n, d), a sample."""
    if rule is None:
        return replace(layout, kinds=None)
    length = 1.0
    if layout.metric == "IP":
        lengths = lengths_of(vectors[~layout.invalid(vectors)])
        length = float(np.median(lengths)) if len(lengths) else 1.0
    scale = 2.0 ** round(np.log2(FRACTION * (length or 1.0)))
    return replace(layout, kinds=KindColumns(rule.count, float(scale)))


def with_kind_offsets(
    layout: Layout, rule: KindRule | None, vectors: Floats, rows: ItemRows
) -> Layout:
    """Return the layout with offsets that bring the kinds together in an index: a graph of vectors as
    they are has few links from one kind to the other, and searches by kind want both.

    The kind with the shortest mean stays where it is, so that its rows are stored as they are, and
    the means of the others come to lie on its mean. Without room for them in the records of a
    migration there are none. vectors: (n, d), a sample. rows: their fields.
    """
    if rule is None or layout.kinds is None:
        return layout

    valid = ~layout.invalid(vectors)
    items = layout.reduce_items(vectors[valid]).astype(np.float64)
    numbers = rule.numbers_of(vectors, rows)[valid]
    means = {
        kind: items[numbers == kind].mean(axis=0)
        for kind in range(rule.count)
        if (numbers == kind).sum() >= FEWEST_OF_A_KIND
    }
    if len(means) < 2:
        return layout

    shortest = min(means.values(), key=lambda mean: float(mean @ mean))
    offsets = np.zeros((rule.count, layout.dim))
    for kind, mean in means.items():
        offsets[kind] = mean - shortest
    moved = replace(layout, kinds=replace(layout.kinds, offsets=rows_as_text(offsets)))
    return moved if room_for_hints(moved) else layout
