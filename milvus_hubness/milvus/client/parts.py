"""Requests in parts, where a plain collection would take them at once. No I/O.

Augmented vectors are wider than the user's, rows have hidden fields, a gate asks each query twice,
and candidates are more hits than the user wants. So a request that is within the server's limits
as the user made it may exceed them as the client sends it. The client then divides it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import grpc
from pymilvus.client.types import OmitZeroDict
from pymilvus.exceptions import MilvusException

from milvus_hubness.errors import PartialWrite
from milvus_hubness.milvus.client.held_errors import recovered_from
from milvus_hubness.milvus.client.messages import Write
from milvus_hubness.milvus.client.steps import Operation
from milvus_hubness.milvus.store.server import exceeds_limit

REFUSALS = (MilvusException, grpc.RpcError)
"""The errors by which pymilvus reports that a request exceeds a limit."""
SENT_IN_PARTS = "a request on %r exceeds a limit of the server (%s): it was sent in parts"
"""The record in place of the refusal, about a collection and a reason."""


def in_two(items: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    middle = len(items) // 2
    return items[:middle], items[middle:]


def write_in_parts(
    write: Write, rows: Sequence[Any], put: Callable[[Any], Operation[dict[str, Any]]]
) -> Operation[dict[str, Any]]:
    """Write rows by `put`, in order, in as few parts as the server takes; return one answer.

    Raises PartialWrite if a later part fails, and the error of pymilvus if the first one does.
    """
    answers: list[dict[str, Any]] = []
    row_count = 0
    waiting = [rows]  # The next part is at the end.

    while waiting:
        part = waiting.pop()
        try:
            answers.append((yield from put(part)))
        except REFUSALS as error:
            # The server refuses such a request before it reads it, so nothing is written twice.
            if len(part) > 1 and exceeds_limit(error):
                recovered_from(error, write.collection, SENT_IN_PARTS)
                waiting += reversed(in_two(part))
                continue

            if not answers:
                raise

            raise _stopped_at(write, row_count, len(rows), answers, error) from error

        row_count += len(part)

    return joined_answers(answers)


def _stopped_at(
    write: Write, row_count: int, total: int, answers: Sequence[dict[str, Any]], error: Exception
) -> PartialWrite:
    again = "upsert" if write.method == "insert" else write.method
    failed = PartialWrite(
        f"the first {row_count:,} of {total:,} rows were written to {write.collection!r}; the rows "
        "with their biases exceed what the server takes at once, so they were sent in parts, and "
        f"the next part failed: {error}. Write the rows from number {row_count} on again, by "
        f"{again}, as some of them may have arrived"
    )
    failed.row_count = row_count
    failed.answer = joined_answers(answers)
    return failed


def joined_answers(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the answers to the parts of a write as one, with the sums of counts and all keys."""
    if len(answers) == 1:
        return answers[0]

    joined: dict[str, Any] = OmitZeroDict(answers[0])
    for answer in answers[1:]:
        for name, value in answer.items():
            so_far = joined.get(name)
            joined[name] = value if so_far is None else _added(so_far, value)

    return joined


def _added(so_far: Any, value: Any) -> Any:
    if isinstance(value, int | float):
        return so_far + value
    return [*so_far, *value]
