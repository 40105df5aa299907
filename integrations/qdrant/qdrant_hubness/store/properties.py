"""Properties of collections: in their metadata, or in a collection on servers without metadata.

No alias can fence a write of metadata: Qdrant takes it by the name of the collection alone. So each
holder of a lease writes a property under keys of its own, such as `hubness@17`. Before the text stand
its fencing token and the number of its write: `3.1 {…}`. Readers take the text with the highest
numbers, so that nobody reads what a former holder sent, however late it arrives. Each write empties
the keys that it saw.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping
from typing import Any, NamedTuple

from qdrant_client import QdrantClient, models

from qdrant_hubness.store.requests import (
    WHOLE_SERVER,
    is_local,
    is_missing,
    keeps_metadata,
    translated,
    turn,
)

STATES = "hubness_state"
"""The collection that holds the properties of all others, on servers without metadata."""

PREFIX = "hubness"
"""With this begin the properties of this package, among the user's own metadata."""

KEYS = 64
"""Keys in metadata of one property, besides its own name. They are used again in turn: a write that
arrives after those of eight further holders would be read for the newest one."""
KEYS_OF_TOKEN = 8
"""Keys for the writes of one holder, which changes a property less often than that."""

_KEY = re.compile(r"(?P<name>.+)@\d+")
_TEXT = re.compile(r"(?P<token>\d+)\.(?P<number>\d+) (?P<text>.*)", re.DOTALL)

PAYLOAD_KEYS = "hubness_payload_keys"
"""The property that lists the keys which jobs write into payloads, as JSON: clients hide them.

It is written before the first key, and stays until a job has deleted all of them: a collection
state comes later and goes sooner.
"""

_NAMES = uuid.UUID("f7a2c0de-6d0e-4a52-9a86-0b1f1f0a4c11")
"""The namespace of `point_id`: with another one, nothing that was stored is found again."""


def point_id(text: str) -> str:
    """Return the id of the point for a text."""
    return str(uuid.uuid5(_NAMES, text))


class Properties:
    """Reads and writes properties."""

    def __init__(self, client: QdrantClient) -> None:
        self._client = client
        with translated(WHOLE_SERVER):
            self.in_metadata = is_local(client) or keeps_metadata(client.info().version)
        """Whether the database has metadata of collections."""

    def of(self, name: str, described: Any) -> dict[str, str]:
        """Return the properties of a collection, given its real name and its description."""
        if self.in_metadata:
            return of_metadata(described)

        with turn(self._client), translated(STATES):
            try:
                points = self._client.retrieve(STATES, [point_id(name)])
            except Exception as error:
                # Assumes that nothing was ever corrected here: the collection of all properties
                # does not exist.
                if is_missing(error):
                    return {}

                raise

        if not points:
            return {}
        return dict((points[0].payload or {})["properties"])

    def alter(self, name: str, changed: Mapping[str, str], token: int = 0) -> None:
        """Change these properties; the others stay.

        token: the fencing token of the caller's lease; 0 for none. What was written by a later one keeps
        that: so the caller has to hold the lease at this moment.
        """
        # Either request changes single keys, so jobs and clients do not undo each other.
        with turn(self._client), translated(name):
            if self.in_metadata:
                metadata = self._client.get_collection(name).config.metadata or {}
                self._client.update_collection(name, metadata=_merged(metadata, changed, token))
                return

        self._create(name)
        with turn(self._client), translated(STATES):
            self._client.set_payload(
                STATES,
                dict(changed),
                [point_id(name)],
                key="properties",
                wait=True,
                ordering=models.WriteOrdering.STRONG,
            )

    def forget(self, name: str) -> None:
        """Delete the properties of a collection that was dropped."""
        if self.in_metadata:
            return
        with translated(STATES):
            if self._client.collection_exists(STATES):
                self._client.delete(STATES, [point_id(name)], wait=True)

    def _create(self, name: str) -> None:
        """Create the record of a collection's properties, if it does not exist."""
        with translated(STATES):
            if not self._client.collection_exists(STATES):
                self._client.create_collection(STATES, vectors_config={})
            if not self._client.retrieve(STATES, [point_id(name)]):
                payload = {"collection": name, "properties": {}}
                point = models.PointStruct(id=point_id(name), vector={}, payload=payload)
                self._client.upsert(STATES, [point], wait=True)


def of_metadata(described: Any) -> dict[str, str]:
    """Return the properties of this package in the metadata of a collection."""
    newest: dict[str, _Written] = {}
    for written in _written_in(described.config.metadata or {}):
        newest[written.name] = max(written, newest.get(written.name, written))
    return {name: written.text for name, written in newest.items() if written.text}


class _Written(NamedTuple):
    """A property under one key of metadata."""

    token: int
    """The fencing token of the writer; 0 for none."""
    number: int
    """The number of the write by this token."""
    name: str
    text: str

    @property
    def key(self) -> str:
        if not self.token:
            return self.name
        return f"{self.name}@{(KEYS_OF_TOKEN * self.token + self.number) % KEYS}"

    @property
    def value(self) -> str:
        return f"{self.token}.{self.number} {self.text}" if self.token else self.text


def _written_in(metadata: Mapping[str, Any]) -> list[_Written]:
    """Return what is written under the keys of this package."""
    found = []
    for key, value in metadata.items():
        if not key.startswith(PREFIX) or not isinstance(value, str):
            continue

        in_key = _KEY.fullmatch(key)
        in_text = _TEXT.fullmatch(value)
        if in_key is not None and in_text is not None:
            token = int(in_text["token"])
            number = int(in_text["number"])
            found.append(_Written(token, number, in_key["name"], in_text["text"]))
        # A key that a later write has emptied says nothing.
        elif in_key is None or value:
            found.append(_Written(0, 0, key, value))
    return found


def _merged(metadata: Mapping[str, Any], changed: Mapping[str, str], token: int) -> dict[str, str]:
    """Return the metadata to merge into a collection's, so that these properties change."""
    merged: dict[str, str] = {}
    for name, text in changed.items():
        stored = [written for written in _written_in(metadata) if written.name == name]
        newest = max(stored, default=_Written(0, 0, name, ""))

        # Without a token, and by an older one than the newest, the text follows on the newest.
        follows = newest.token >= max(token, 1)
        number = newest.number + 1 if follows else 0
        written = _Written(max(token, newest.token), number, name, text)

        # What a former holder sent may still arrive under its key; it is the older text then, too.
        merged |= dict.fromkeys((former.key for former in stored), "")
        merged[written.key] = written.value
    return merged


def payload_keys_in(properties: Mapping[str, str]) -> tuple[str, ...]:
    """Return the keys of payloads that the properties of
    a collection list; those of a broken list are ignored.
    """
    try:
        keys = json.loads(properties.get(PAYLOAD_KEYS) or "[]")
    except ValueError:
        return ()

    if not isinstance(keys, list):
        return ()
    return tuple(key for key in keys if isinstance(key, str) and key.startswith(PREFIX))
