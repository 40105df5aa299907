"""What goes along with messages: which of it is passed on, and what it says."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from milvus_hubness.proxy.parameters import Overrides

Metadata = tuple[tuple[str, str | bytes], ...]
STRENGTH, PROFILE = "hubness-strength", "hubness-profile"
_OF_THE_CONNECTION = frozenset({"user-agent", "te", "content-type", "date", "server", STRENGTH, PROFILE})


def passed_on(metadata: Iterable[Any] | None) -> Metadata:
    """All but what belongs to the connection that it came by, or is for this package."""
    return tuple(
        (name, value)
        for name, value in metadata or ()
        if name not in _OF_THE_CONNECTION and not name.startswith(("grpc-", ":"))
    )


def word(metadata: Iterable[Any] | None, name: str) -> str:
    """The last value of that name, empty where there is none."""
    found = [value for key, value in metadata or () if key == name]
    last = found[-1] if found else ""
    return last.decode(errors="replace") if isinstance(last, bytes) else str(last)


def overrides_in(metadata: Iterable[Any] | None) -> Overrides:
    """How searches are to be corrected that say nothing themselves. Raises InvalidParameter."""
    return Overrides.parsed(word(metadata, STRENGTH), word(metadata, PROFILE))
