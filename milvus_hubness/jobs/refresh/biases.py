"""The new biases of a refresh: their fit, and what they are compared with before they are adopted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from milvus_hubness.basics.progress import Progress, silent
from milvus_hubness.correction.codec.arrays import Floats
from milvus_hubness.correction.codec.layout import Layout
from milvus_hubness.correction.estimators.base import is_same
from milvus_hubness.correction.fitted import Correction, measured_kinds
from milvus_hubness.correction.kinds import KindNumbers, Kinds
from milvus_hubness.errors import EmptyBank
from milvus_hubness.jobs.common.progress import key_chunks
from milvus_hubness.jobs.common.stored_biases import StoredBiases
from milvus_hubness.jobs.refresh.evaluation import ReducedSample, RefreshEvaluation, judge
from milvus_hubness.jobs.refresh.options import RefreshOptions
from milvus_hubness.jobs.refresh.plan import RefreshPlan, choice_in_use
from milvus_hubness.jobs.refresh.sample import Sample, rows_beside
from milvus_hubness.quality.labelled import LabelledQueries


def evaluate(
    stored: StoredBiases,
    plan: RefreshPlan,
    sample: Sample,
    labelled: LabelledQueries | None,
    queries: Floats | None = None,
    progress: Progress = silent,
) -> RefreshEvaluation | None:
    """Evaluate the biases in use and those of the plan, as `judge` does; None without the bank in use.

    labelled: queries with right rows in the sample; the measure is that among all rows, which are read
    for it if they are not all in the sample. queries: (m, d) real ones of the application,
    which may be in a bank too.
    """
    state = stored.state
    profile = state.profile
    try:
        bank = stored.store.load_bank(profile.bank, checked=False)
    except EmptyBank:
        return None
    in_use = RefreshPlan(**vars(choice_in_use(profile)), bank=bank, reason="")
    numbers = sample.kinds(state.kinds)
    kinds = measured_kinds(state.layout, state.kinds, sample.vectors, numbers, plan.bank.queries)
    others: Iterable[tuple[Floats, KindNumbers | None]] = ()
    has_gate = in_use.gate is not None or plan.gate is not None
    is_part = sample.key_count > len(sample.keys)
    # A gate compares with the best row of all, and scores of several vectors take long.
    if labelled is not None and is_part and not has_gate and not state.layout.multi_vectors:
        others = rows_beside(stored, sample, progress)
    return judge(
        ReducedSample.of(state.layout, sample.vectors, kinds, numbers),
        in_use,
        plan,
        labelled,
        queries,
        others,
    )


def fit(
    stored: StoredBiases,
    layout: Layout,
    plan: RefreshPlan,
    options: RefreshOptions,
    kinds: Kinds | None = None,
) -> Correction:
    """Fit the estimator on the bank, and on the gallery if it needs that, from the stored
    potentials if the estimator is unchanged.

    layout: that of the rows to write. kinds: the means to compare with.
    """
    bank = plan.bank
    state = stored.state
    gallery = None
    numbers: list[KindNumbers] = []

    def vectors_by_chunk() -> Iterator[Floats]:
        doing = "reading the gallery"
        for partition, chunk in key_chunks(stored.store, stored.info, doing, options.progress):
            rows = stored.read(chunk, partition)
            if state.kinds is not None:
                numbers.append(state.kinds.numbers_of(rows.vectors, rows.batch))
            yield rows.vectors

    if plan.estimator.needs_gallery:
        gallery = state.layout.stacked(vectors_by_chunk())

    is_unchanged = is_same(plan.estimator, state.profile.estimator)
    return Correction.fit(
        layout,
        plan.estimator,
        bank.queries,
        gallery=gallery,
        target_bank=bank.targets,
        start=bank.potentials if is_unchanged else None,
        kinds=kinds,
        gallery_kinds=np.concatenate(numbers) if numbers else None,
    )
