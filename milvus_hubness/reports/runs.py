"""The files of a diagnosis for evaluators: both rankings, and the judgements they are about."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

from milvus_hubness.basics.defaults import RUN_DEPTH
from milvus_hubness.basics.files.runs import expect_columns, write_qrels, write_rankings
from milvus_hubness.basics.files.writing import check_writable, expect_different
from milvus_hubness.correction.banks.stored import Key
from milvus_hubness.correction.kernels.checks import whole_number
from milvus_hubness.errors import InvalidInput
from milvus_hubness.jobs.common.judgements import Judgements
from milvus_hubness.quality.rankings import Ranking
from milvus_hubness.quality.retrieval import Measure

RUN_OPTION = "--save-run"
QRELS_OPTION = "--save-qrels"


@dataclass(frozen=True)
class RunFiles:
    """The files that a diagnosis writes for evaluators.

    Names that end in .json get a dictionary {query id: {key: score}}, all others the lines of TREC:
    query id, Q0, key, rank, score and tag.
    """

    raw: str | PathLike[str]
    """The ranking of each query without correction."""

    corrected: str | PathLike[str]
    """That with correction."""

    qrels: str | PathLike[str] | None = None
    """The judgements that the figures are about: with the keys of the collection, without what is
    left out. None for no file.
    """

    depth: int = RUN_DEPTH
    """How many rows of each query the rankings have."""

    @property
    def named(self) -> list[tuple[str, Path]]:
        """The files, each with its option; the qrels last."""
        files = [(RUN_OPTION, Path(self.raw)), (RUN_OPTION, Path(self.corrected))]
        return files if self.qrels is None else [*files, (QRELS_OPTION, Path(self.qrels))]

    @property
    def paths(self) -> list[Path]:
        """The files, the qrels last."""
        return [path for _, path in self.named]

    def check(self, judgements: Judgements | None) -> None:
        """Check before the work that the files can be written, and take the ids and grades.

        judgements: of the diagnosis; without, queries have numbers. Raises InvalidParameter,
        InvalidInput and UnreadableFile.
        """
        whole_number("the depth of a run", self.depth)
        expect_different(self.named)
        for path in self.paths:
            check_writable(path)
            if judgements is not None:
                expect_columns(judgements.names, "query id", path)
        if self.qrels is None:
            return

        if judgements is None:
            raise InvalidInput(f"{QRELS_OPTION} needs right answers: pass --pairs")
        for name, keys, grades in zip(
            judgements.names, judgements.keys, judgements.grades, strict=True
        ):
            for key, grade in zip(keys, grades, strict=True):
                if not grade.is_integer():
                    raise InvalidInput(
                        f"query {name} has the grade {grade:g} for {key}: evaluators read whole "
                        f"grades only, so multiply them, or leave out {QRELS_OPTION}"
                    )

    def check_keys(self, keys: Iterable[Key]) -> None:
        """Check that the files take the keys of a collection. Raises InvalidInput."""
        texts = [key for key in keys if isinstance(key, str)]
        for path in self.paths:
            expect_columns(texts, "key", path)

    def write_qrels(self, judged: Judgements) -> None:
        """Write the judgements about the rows of a collection. Raises UnreadableFile."""
        if self.qrels is not None:
            write_qrels(
                Path(self.qrels),
                (
                    (name, {str(key): int(grade) for key, grade in zip(keys, grades, strict=True)})
                    for name, keys, grades in zip(
                        judged.names, judged.keys, judged.grades, strict=True
                    )
                ),
            )

    def remark(self, measure: str, item_count: int, judgements: Judgements) -> str | None:
        """Return why evaluators may have another measure than the diagnosis, if they may."""
        if judgements.weights is not None or judgements.counts is not None:
            return (
                "evaluators count each query of the runs once, and the diagnosis as often as users "
                "send it, so that their figures differ"
            )
        chosen = Measure.of(measure)
        if self.depth >= item_count or (chosen.k is not None and chosen.k <= self.depth):
            return None
        return (
            f"the runs have the first {self.depth:,} of {item_count:,} rows, so that evaluators "
            f"miss what {measure} counts behind them: pass --run-depth {item_count}"
        )


@dataclass(frozen=True, eq=False)
class RunWriter:
    """Writes rankings as runs."""

    files: RunFiles

    ids: Sequence[str]
    """Of the queries."""

    keys: Sequence[Key]
    """Of the items."""

    def write(self, path: str | PathLike[str], rankings: Iterable[Ranking]) -> None:
        """Write the rankings of all queries to one of the files. Raises UnreadableFile."""
        write_rankings(
            Path(path),
            (
                (
                    query_id,
                    {
                        str(self.keys[item]): score
                        for item, score in zip(
                            ranking.items.tolist(), ranking.scores.tolist(), strict=True
                        )
                    },
                )
                for query_id, ranking in zip(self.ids, rankings, strict=True)
            ),
        )
