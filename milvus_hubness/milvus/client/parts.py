"""Requests in parts, where a plain collection would take them at once. No I/O.

Augmented vectors are wider than the user's, rows have hidden fields, a gate asks each query twice,
and candidates are more hits than the user wants. So a request that is within the server's limits
as the user made it may exceed them as the client sends it. The client then divides it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grpc
from pymilvus.exceptions import MilvusException

REFUSALS = (MilvusException, grpc.RpcError)
"""The errors by which pymilvus reports that a request exceeds a limit."""
SENT_IN_PARTS = "a request on %r exceeds a limit of the server (%s): it was sent in parts"
"""The record in place of the refusal, about a collection and a reason."""


def in_two(items: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    middle = len(items) // 2
    return items[:middle], items[middle:]
