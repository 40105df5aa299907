"""Judgements: queries with the keys of their right rows, with grades."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from milvus_hubness.basics.logs import log
from milvus_hubness.correction.banks.bank import BankLike, QueryBank
from milvus_hubness.correction.banks.stored import Key
from milvus_hubness.errors import InvalidInput, name_some
from milvus_hubness.jobs.common.judgement_files import (
    JudgedRows,
    QueryVectors,
    as_grades,
    as_keys,
    as_query_ids,
    read_query_vectors,
    read_rows,
    rows_of_table,
)
from milvus_hubness.quality.measures import checked_weights

WHOLE_NUMBER = re.compile(r"[+-]?\d+", re.ASCII)
"""A text that is the key of a row whose keys are whole numbers."""


@dataclass(frozen=True, eq=False)
class Judgements:
    """Queries, and for each the keys of its right rows, with grades.

    Made by `load`, `of`, `from_frame` or `from_dict`, which do the following.

    **Queries.** All rows of a source about one query become one query with several right rows. With
    query ids, rows of one id are about one query; without, rows of equal vectors are. If each row
    were a query of its own, as it used to be, then of two right rows only one could be first, and
    each would count as a failure of the other's query.

    **Weights.** A log of clicks repeats a query because users send it often, and a list of
    judgements because several rows are right, and both look alike. The keys tell them apart. With a
    weight in each row, the weight of a query is their sum. Without, it is 1, and a row that names
    only keys that the query has already adds 1, since no judge says the same twice; a row with a
    further key says that this one is right too, and adds nothing. So queries with many right rows
    count no more than others, as in trec_eval, and what users send often counts as often. Files
    that are judgements by their format, such as qrels, never give weights.

    **Grades.** A key with a grade of 0 or less was judged as not relevant, so it is left out. Of a
    key that is judged twice for a query, the higher grade counts.
    """

    queries: QueryBank
    """n queries, each of them once."""

    keys: Sequence[tuple[Key, ...]]
    """For each query the keys of its right rows, at least one, none of them twice."""

    grades: Sequence[tuple[float, ...]]
    """For each of these keys how right its row is, above 0; 1 where the source has no grades."""

    clicks: Sequence[tuple[float, ...]]
    """For each of these keys how often users wanted it: the weights of the rows that name it. A row
    that names several shares its weight among them, by their grades.
    """

    weights: npt.NDArray[np.float64] | None = None
    """How often users send each query, (n,); None for equally often."""

    ids: Sequence[str] | None = None
    """The ids of the queries in the source, if it has some."""

    texts: Sequence[str] | None = None
    """The texts of the queries, if they were read."""

    left_out: tuple[str, ...] = ()
    """What of the source is left out, a sentence for each reason."""

    def __len__(self) -> int:
        return len(self.queries)
