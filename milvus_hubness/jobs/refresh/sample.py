"""The sample of rows on which a refresh judges its bank, fits layouts and evaluates biases."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from milvus_hubness.basics.defaults import DEFAULT_MEASURE
from milvus_hubness.basics.progress import Progress
from milvus_hubness.correction.banks.stored import Key
from milvus_hubness.correction.codec.arrays import Floats
from milvus_hubness.correction.items import Items
from milvus_hubness.correction.kinds import KindNumbers, KindRule
from milvus_hubness.correction.prior import Prior
from milvus_hubness.jobs.common.fits import FittedRow, fitted_rows
from milvus_hubness.jobs.common.gallery import FitRows
from milvus_hubness.jobs.common.judgements import Judgements
from milvus_hubness.jobs.common.progress import key_chunks, key_pages
from milvus_hubness.jobs.common.stored_biases import StoredBiases
from milvus_hubness.quality.labelled import LabelledQueries

MOST_ROWS = 20_000
"""Number of rows of a sample, apart from those that labels name."""
MOST_JUDGED_ROWS = 50_000
"""The same with labels, whose measure is higher among fewer rows: up to so many it is that of all."""


class Sample(NamedTuple):
    """Sampled rows with a usable vector."""

    keys: list[Key]
    vectors: Floats
    """(n, d), as users see them."""
    rows: Sequence[Mapping[str, Any]] = ()
    """The fields of each row that the prior and the kinds read; none without these."""
    partitions: Sequence[str | None] = ()
    """The partition of each row."""
    are_drawn: Sequence[bool] = ()
    """Whether each row was drawn at random; the others are named by labels."""
    key_count: int = 0
    """The number of keys from which they were drawn."""

    @property
    def fitted(self) -> list[FittedRow]:
        """Some of the rows, drawn at random, for the note of a fit."""
        drawn = np.flatnonzero(self.are_drawn).tolist()
        partitions = [self.partitions[row] for row in drawn]
        return fitted_rows(partitions, [self.keys[row] for row in drawn], self.vectors[drawn])

    @property
    def items(self) -> Items:
        """The rows for a prior and for kinds."""
        return Items(self.keys, self.rows)

    def kinds(self, rule: KindRule | None) -> KindNumbers | None:
        """Return the kinds of the rows, (n,); None without kinds."""
        return None if rule is None else rule.numbers_of(self.vectors, self.items)

    def fit_rows(self, rule: KindRule | None) -> FitRows:
        """Return the rows as a verdict on a bank takes them."""
        return FitRows(self.vectors, kinds=self.kinds(rule))

    def labelled(
        self, judgements: Judgements, collection: str, measure: str = DEFAULT_MEASURE
    ) -> LabelledQueries | None:
        """Return the queries with right rows in the sample; None if they are fewer than two.

        Raises InvalidInput if there is none.
        """
        judged = judgements.within(self.keys, collection).labelled(self.keys, measure)
        return judged if len(judged.as_sent()) > 1 else None


def sampled(
    stored: StoredBiases,
    judgements: Judgements | None,
    progress: Progress,
    prior: Prior | None = None,
) -> Sample:
    """Return about 20,000 rows, 50,000 with labels, or all if there are fewer, and the judged rows.

    prior: that of the new biases.
    """
    info = stored.info
    state = stored.state
    rng = np.random.default_rng(0)
    most = MOST_JUDGED_ROWS if judgements else MOST_ROWS
    share = most / max(1, info.rows)
    named = judgements.possible_keys if judgements else set()
    read = {prior.field} if prior is not None else set()
    if state.kinds is not None:
        read.add(state.kinds.field)
    keys: list[Key] = []
    vectors: list[Floats] = []
    fields: list[Mapping[str, Any]] = []
    partitions: list[str | None] = []
    are_drawn: list[bool] = []
    # Labels name few rows, so these take little memory.
    undrawn: set[tuple[str | None, Key]] = set()
    key_counts: list[int] = []

    def chosen(partition: str | None) -> Iterator[list[Key]]:
        for page in key_pages(stored.store, info.name, partition, rows=info.rows):
            draws = rng.random(len(page)) < share
            is_drawn = dict(zip(page, draws.tolist(), strict=True))
            key_counts.append(len(is_drawn))
            undrawn.update((partition, key) for key in page if key in named and not is_drawn[key])
            yield [key for key in page if is_drawn[key] or key in named]

    for partition, chunk in key_chunks(
        stored.store, info, "reading a sample", progress, chosen, min(info.rows, most)
    ):
        rows = stored.read(chunk, partition)
        valid = ~state.layout.invalid(rows.vectors)
        usable = rows.batch.take(np.flatnonzero(valid).tolist())
        keys += usable.keys
        partitions += [partition] * len(usable)
        are_drawn += [(partition, key) not in undrawn for key in usable.keys]
        if read:
            # No more of the rows: other vectors and texts would take far more memory.
            fields += [{name: row.get(name) for name in read} for row in usable.rows]
        vectors.append(rows.vectors[valid])

    return Sample(
        keys,
        state.layout.stacked(vectors),
        fields,
        partitions,
        are_drawn,
        sum(key_counts),
    )


def rows_beside(
    stored: StoredBiases, sample: Sample, progress: Progress
) -> Iterator[tuple[Floats, KindNumbers | None]]:
    """Yield the rows that are not in the sample, with their kinds."""
    state = stored.state
    sampled_keys = set(zip(sample.partitions, sample.keys, strict=True))
    for partition, chunk in key_chunks(
        stored.store, stored.info, "measuring among all rows", progress
    ):
        keys = [key for key in chunk if (partition, key) not in sampled_keys]
        if not keys:
            continue
        rows = stored.read(keys, partition)
        valid = ~state.layout.invalid(rows.vectors)
        numbers = None
        if state.kinds is not None:
            numbers = state.kinds.numbers_of(rows.vectors, rows.batch)[valid]
        yield rows.vectors[valid], numbers
