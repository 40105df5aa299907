"""The metadata of a call: what is passed on, who calls, and what may stand there only once."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping
from typing import Any

Metadata = tuple[tuple[str, str | bytes], ...]

STRENGTH_HEADER = "hubness-strength"
KINDS_HEADER = "hubness-kinds"
PROFILE_HEADER = "hubness-profile"
AUTHORIZATION = "authorization"
DATABASE = "dbname"
SOURCE = "sourceid"
MEMBER = b"@@milvus-member@@"
"""Milvus takes a call with this source, in base64, without a token (util.MemberCredID)."""

CORRECTION_HEADERS = (STRENGTH_HEADER, KINDS_HEADER, PROFILE_HEADER)
"""Entries that set the correction of a search."""

_ONCE = (AUTHORIZATION, SOURCE, DATABASE, *CORRECTION_HEADERS)
"""Entries that the proxy reads.

With two of them, the proxy and Milvus might each obey another one.
"""

_OF_CONNECTION = frozenset(
    {"user-agent", "te", "content-type", "date", "server", *CORRECTION_HEADERS}
)

Identity = Metadata
"""The entries of a call's metadata by which Milvus knows the caller, in one form for each caller."""


def passed_on(metadata: Iterable[Any] | None) -> Metadata:
    """Return the metadata without entries of the incoming connection and for this package."""
    return tuple(
        (name, value)
        for name, value in metadata or ()
        if name not in _OF_CONNECTION and not name.startswith(("grpc-", ":"))
    )


def identity_in(metadata: Metadata) -> Identity:
    """Return the entries, among those passed on, by which Milvus knows the caller.

    Milvus reads the token, and whether the call is of another part of Milvus. What a caller can
    write in several ways, or invent, is left out: it would be a new caller with each call.
    """
    entries = dict(metadata)
    identity = []
    if AUTHORIZATION in entries:
        identity.append((AUTHORIZATION, _canonical(entries[AUTHORIZATION])))

    source = _canonical(entries.get(SOURCE, ""))
    if source == base64.b64encode(MEMBER).decode():
        identity.append((SOURCE, source))

    return tuple(identity)


def _canonical(encoded: str | bytes) -> str | bytes:
    """Return base64 as it is usually written: its last character may have several forms."""
    try:
        return base64.b64encode(base64.b64decode(encoded, validate=True)).decode()
    except ValueError:
        return encoded


def repeated_in(metadata: Iterable[Any] | None) -> str | None:
    """Return the name of an entry that is there twice and must not be; None without one."""
    names = [name for name, _ in metadata or ()]
    return next((name for name in _ONCE if names.count(name) > 1), None)


def header(headers: Mapping[str, str | bytes], name: str) -> str:
    """Return the value of that name; empty if there is none."""
    value = headers.get(name, "")
    return value.decode(errors="replace") if isinstance(value, bytes) else value
