"""The verdict on a bank before a job relies on it: a stored one, or one that is made in seconds.

A job that gets a bank reads some rows, has `judged` look at both, and stops before its first write
if the verdict is "leave it alone". Verdicts are stored for each bank, so that the next job, and
`status`, need not judge it again.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import cast

from milvus_hubness.basics.defaults import FEWEST_QUERIES, VERDICT_VARIABLE, VerdictMode
from milvus_hubness.basics.logs import audit, log
from milvus_hubness.basics.words import expect_word
from milvus_hubness.correction.banks.bank import BankLike, QueryBank, not_among, optional_bank
from milvus_hubness.correction.codec.arrays import Floats
from milvus_hubness.correction.codec.index_hints import with_mean
from milvus_hubness.correction.codec.layout import Layout
from milvus_hubness.correction.fitted import gallery_kinds
from milvus_hubness.correction.kinds import KindRule
from milvus_hubness.errors import CorrectionNotRecommended, InvalidInput
from milvus_hubness.jobs.common.gallery import FitRows
from milvus_hubness.jobs.store.protocols import Store
from milvus_hubness.jobs.store.records import TUNING_PROPERTY, CollectionInfo, TuningRecord
from milvus_hubness.quality.tuning import LEAVE, NOT_PROVEN, judge_bank

FEWEST_ITEMS = 50
"""Rows below which nothing is judged: a top ten is then a good part of them."""


@dataclass(frozen=True)
class Judging:
    """How a job has its bank judged. Raises InvalidInput, InvalidParameter."""

    mode: VerdictMode
    queries: QueryBank | None = None
    """Real queries of the application, apart from the bank; None to hold out half of the bank."""

    @classmethod
    def of(cls, mode: VerdictMode | None, queries: BankLike | None = None) -> Judging:
        """Return the judging that a caller asks for; without a mode, that of the environment."""
        if mode is None:
            mode = _mode_of_environment()
        expect_word("verdict", mode, VerdictMode)

        judging = cls(mode, optional_bank(queries))
        if judging.queries is not None and len(judging.queries) < FEWEST_QUERIES:
            raise InvalidInput(
                f"{len(judging.queries)} queries cannot judge a bank: {FEWEST_QUERIES} are needed"
            )
        return judging

    def refuses(self, verdict: TuningRecord | None) -> bool:
        """Whether `require` raises for this verdict."""
        against = verdict is not None and verdict.verdict == LEAVE
        return against and self.mode == "require"

    def is_overruling(self, verdict: TuningRecord | None) -> bool:
        """Whether this verdict is against the bank, and the caller goes on all the same."""
        return verdict is not None and verdict.verdict == LEAVE and self.mode == "warn"

    def require(
        self, verdict: TuningRecord | None, collection: str, *, is_last: bool = True
    ) -> None:
        """Raise CorrectionNotRecommended if the verdict is against the bank and counts; say so in
        the log if its gain is not proven, which stops nothing.

        is_last: whether the job writes now. If it overrules the verdict, the audit log has a line.
        """
        if self.mode == "skip" or verdict is None:
            return
        if self.refuses(verdict):
            raise CorrectionNotRecommended.because(_advice(verdict, collection))

        report(verdict, collection)
        if is_last and self.is_overruling(verdict):
            audit("forced", collection, over=[verdict.reason])


def report(verdict: TuningRecord, collection: str) -> None:
    """Log a verdict that is against the bank, or whose gain is not proven."""
    if verdict.verdict == NOT_PROVEN:
        # The expected gain is above 0, and the raw ranking stays one parameter away.
        log.warning(
            "the gain of this bank for %r is not proven: %s; this goes on all the same, and "
            "searches with strength=0 have the raw ranking",
            collection,
            verdict.reason,
        )
    if verdict.verdict == LEAVE:
        log.warning("%s", _advice(verdict, collection))


def _advice(verdict: TuningRecord, collection: str) -> str:
    return f"the verdict on this bank is to leave {collection!r} alone: {verdict.reason}"


def _mode_of_environment() -> VerdictMode:
    """Return what $MILVUS_HUBNESS_VERDICT says, else "require"."""
    text = os.environ.get(VERDICT_VARIABLE) or "require"
    expect_word(f"${VERDICT_VARIABLE}", text, VerdictMode)
    return cast(VerdictMode, text)


def stored_verdict(
    info: CollectionInfo, field: str, bank: QueryBank, judging: Judging, kind: str
) -> TuningRecord | None:
    """Return the stored verdict on a bank that counts; None if the bank is to be judged.

    kind: the field of the kinds, or "auto"; empty for none.
    """
    record = info.verdicts.of(field, bank.fingerprint, kind)
    # New real queries may know better than a verdict that had no labels.
    is_outdone = judging.queries is not None and record is not None and not record.labelled
    return None if is_outdone else record


def judged(
    layout: Layout,
    rows: FitRows,
    field: str,
    bank: QueryBank,
    judging: Judging,
    rule: KindRule | None = None,
) -> TuningRecord | None:
    """Return the verdict on a bank from some rows; None if they are too few.

    rule: that of their kinds, with whose means they are compared then. It says nothing of methods: it
    is that of the default one.
    """
    valid = ~layout.invalid(rows.vectors)
    vectors = rows.vectors[valid]
    if len(vectors) < FEWEST_ITEMS:
        return None

    layout = with_mean(layout, vectors)
    queries = _apart_from(bank, judging.queries)
    if queries is not None:
        bank.expect_dim(queries.shape[1], "a query")
        queries = layout.reduce_queries(queries)
    numbers = None if rows.kinds is None else rows.kinds[valid]
    judgement = judge_bank(
        replace(bank, vectors=layout.reduce_queries(bank.vectors)),
        layout.reduce_items(vectors),
        queries=queries,
        kinds=gallery_kinds(layout, rule, vectors, numbers, bank),
    )
    return TuningRecord(
        field=field,
        verdict=judgement.verdict,
        choice=None,
        strength=judgement.strength,
        reason=judgement.reason,
        labelled=False,
        real_queries=0 if queries is None else len(queries),
        bank_fingerprint=bank.fingerprint,
        kind="" if rule is None else rule.source,
        tuned_at=datetime.now(timezone.utc),
    )


def _apart_from(bank: QueryBank, queries: QueryBank | None) -> Floats | None:
    """Return the queries that are not in the bank; None if they are too few to judge it."""
    if queries is None:
        return None
    # A bias must not be judged by the queries that it was fitted on.
    others = queries.vectors[not_among(queries.vectors, bank.vectors)]
    return others if len(others) >= FEWEST_QUERIES else None


def store_verdict(
    store: Store, collection: str, record: TuningRecord | None, *, replaces: bool = False
) -> TuningRecord | None:
    """Store the verdict on a bank, if there is one; those on other banks stay.

    A stored one that rests on more stays too and is returned, unless `replaces`.
    """
    if record is None:
        return None
    # Read again: another process may have judged a bank meanwhile.
    verdicts = store.info(collection, counted=False).verdicts
    if record in verdicts.records:
        return None
    staying = None if replaces else verdicts.outweighing(record)
    if staying is None:
        store.write_property(collection, TUNING_PROPERTY, verdicts.with_record(record))
    return staying
