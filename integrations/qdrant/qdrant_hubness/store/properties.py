"""Properties of collections: in their metadata, or in a collection on servers without metadata."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from typing import Any

from qdrant_client import QdrantClient, models

from qdrant_hubness.store.requests import is_local, is_missing, keeps_metadata, translated, turn

STATES = "hubness_state"
"""The collection that holds the properties of all others, on servers without metadata."""

PREFIX = "hubness"
"""With this begin the properties of this package, among the user's own metadata."""

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

    def alter(self, name: str, changed: Mapping[str, str]) -> None:
        """Change these properties; the others stay."""
        # Both kinds of request change single keys, so jobs and clients do not undo each other.
        with turn(self._client), translated(name):
            if self.in_metadata:
                self._client.update_collection(name, metadata=dict(changed))
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
        if not self.in_metadata and self._client.collection_exists(STATES):
            with translated(STATES):
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
    metadata = described.config.metadata or {}
    return {
        name: text
        for name, text in metadata.items()
        if name.startswith(PREFIX) and isinstance(text, str)
    }


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
