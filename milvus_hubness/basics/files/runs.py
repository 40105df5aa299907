"""Runs and qrels: rankings and judgements in the forms that evaluators read.

A TREC file has blanks between its columns and no way to escape one. A .json file has the same as a
dictionary, and takes any id.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from milvus_hubness.basics.bounds import shown
from milvus_hubness.basics.files.writing import whole_file
from milvus_hubness.errors import InvalidInput

JSON = ".json"
"""The suffix of files with a dictionary {query id: {key: score}}; all others are TREC's."""

TAG = "milvus-hubness"
"""What a TREC run is called in its last column."""

Run = dict[str, dict[str, float]]
"""{query id: {key: score}}, as ranx, ir-measures, pytrec_eval and MTEB take it."""


def to_run(results: Iterable[Iterable[Any]], query_ids: Sequence[str | int] | None = None) -> Run:
    """Return the results of a search as a run, {query id: {key: score}}.

    results: what `search` or `hybrid_search` of a MilvusClient, a HubnessClient or their
    asynchronous kin returns, one list of hits for each query. query_ids: of these queries; by
    default their numbers. The score says only the order of the hits, from their number down to 1,
    since distances rise in one metric and fall in another. A key that is a hit twice counts where
    it is first. Raises InvalidInput.
    """
    of_queries = list(results)
    ids = list(map(str, range(len(of_queries)) if query_ids is None else query_ids))
    if len(ids) != len(of_queries):
        raise InvalidInput(
            f"{len(of_queries)} lists of hits have {len(ids)} query ids: pass one for each"
        )
    _expect_distinct(ids)

    run: Run = {}
    for query_id, hits in zip(ids, of_queries, strict=True):
        keys = list(dict.fromkeys(str(_key_of(hit)) for hit in hits))
        run[query_id] = {key: float(len(keys) - place) for place, key in enumerate(keys)}
    return run


def write_run(
    path: str | PathLike[str], run: Mapping[str, Mapping[str, float]], tag: str = TAG
) -> None:
    """Write a run {query id: {key: score}}, of each query the highest score first.

    In a TREC file the columns are query id, Q0, key, rank, score and tag; a .json file has the
    dictionary. Raises InvalidInput for a blank in an id, a key or the tag of a TREC file, and
    UnreadableFile.
    """
    path = Path(path)
    expect_columns([tag], "tag", path)
    expect_columns(run, "query id", path)
    for scores in run.values():
        expect_columns(scores, "key", path)
    write_rankings(
        path,
        (
            (query_id, dict(sorted(scores.items(), key=lambda hit: hit[1], reverse=True)))
            for query_id, scores in run.items()
        ),
        tag,
    )


def write_rankings(
    path: Path, rankings: Iterable[tuple[str, Mapping[str, float]]], tag: str = TAG
) -> None:
    """Write {key: score} of each query, best first, whose ids and keys `expect_columns` has passed.

    Raises UnreadableFile.
    """

    def lines(query_id: str, scores: Mapping[str, float]) -> Iterator[str]:
        for rank, (key, score) in enumerate(scores.items(), 1):
            yield f"{query_id} Q0 {key} {rank} {score!r} {tag}\n"

    _write(path, rankings, lines)


def write_qrels(path: Path, qrels: Iterable[tuple[str, Mapping[str, int]]]) -> None:
    """Write {key: grade} of each query, whose ids and keys `expect_columns` has passed.

    Raises UnreadableFile.
    """

    def lines(query_id: str, grades: Mapping[str, float]) -> Iterator[str]:
        for key, grade in grades.items():
            yield f"{query_id} 0 {key} {grade}\n"

    _write(path, qrels, lines)


def is_json(path: Path) -> bool:
    """Return whether a file has a dictionary, and takes any id."""
    return path.suffix.lower() == JSON


def expect_columns(values: Iterable[object], what: str, path: Path) -> None:
    """Check that each of these ids or keys can be a column of the file. Raises InvalidInput."""
    if is_json(path):
        return
    for value in values:
        text = str(value)
        # Readers in Python split at any blank of Unicode, those in C end at \0.
        if text.split() != [text] or "\0" in text or not _has_bytes(text):
            raise InvalidInput(
                f"the {what} {shown(text)} cannot be in {path}, since TREC files have blanks "
                f"between columns: name a {JSON} file, which takes every {what}"
            )


def _has_bytes(text: str) -> bool:
    """Return whether a text is all of characters: JSON may hold halves of surrogate pairs."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _write(
    path: Path,
    of_queries: Iterable[tuple[str, Mapping[str, float]]],
    lines: Callable[[str, Mapping[str, float]], Iterator[str]],
) -> None:
    """Write a number for each key of each query.

    lines: yields those of a query in a TREC file. One query at a time is in memory: a run may be
    larger.
    """
    with whole_file(path) as file:
        if is_json(path):
            file.writelines(_json_lines(of_queries))
            return
        for query_id, numbers in of_queries:
            file.writelines(lines(query_id, numbers))


def _json_lines(of_queries: Iterable[tuple[str, Mapping[str, float]]]) -> Iterator[str]:
    separator = "{"
    for query_id, scores in of_queries:
        yield f"{separator}\n{json.dumps(query_id)}: {json.dumps(scores)}"
        separator = ","
    yield "{}\n" if separator == "{" else "\n}\n"


def _key_of(hit: Any) -> str | int:
    """Return the key of a hit, whose field has any name: pymilvus has it as `id` all the same."""
    if isinstance(hit, Mapping) and not hasattr(hit, "id"):
        if "id" in hit:
            key: str | int = hit["id"]
            return key
        raise InvalidInput(
            f"the hit {shown(dict(hit))} has no key as 'id': pass the results as the client "
            "returns them"
        )
    return hit.id  # type: ignore[no-any-return]


def _expect_distinct(ids: Sequence[str]) -> None:
    if len(set(ids)) < len(ids):
        twice = next(query_id for query_id in ids if ids.count(query_id) > 1)
        raise InvalidInput(
            f"the query id {shown(twice)} is there twice: each query needs one of its own"
        )
