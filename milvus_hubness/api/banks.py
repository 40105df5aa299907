"""Vectors that are in the database: queries that clients sampled, and those of a collection."""

from __future__ import annotations

import inspect
from dataclasses import is_dataclass, replace
from typing import Any

from milvus_hubness.jobs.common.inputs import COLLECTION_PREFIX, read_bank
from milvus_hubness.jobs.common.samples import SAMPLES, sampled_bank
from milvus_hubness.jobs.store.protocols import Store

VECTORS = ("bank", "queries", "target_bank")
"""Parameters that take `collection:NAME`; the first takes `samples` too."""


def read_named(store: Store, arguments: inspect.BoundArguments) -> None:
    """Replace texts that name vectors of the database by these vectors, as the command line does.

    `bank="samples"` are the queries that clients sampled, and "collection:NAME" the vectors of a
    collection with one vector field. Other texts are names of files, and stay. Raises as
    `sampled_bank` and `read_bank` do.
    """
    values = arguments.arguments
    changes = values.get("changes", {})
    named = {**values, **changes}
    collection = named.get("collection") or named.get("source")
    for holder in (values, changes):
        for name in VECTORS:
            if isinstance(text := holder.get(name), str):
                holder[name] = _read(store, name, text, collection, named)

    # Options in one object, of which refresh takes the bank.
    options = values.get("options")
    if options is not None and is_dataclass(options) and not isinstance(options, type):
        texts = {name: getattr(options, name, None) for name in VECTORS}
        read = {
            name: _read(store, name, text, collection, vars(options))
            for name, text in texts.items()
            if isinstance(text, str)
        }
        if read:
            values["options"] = replace(options, **read)


def _read(store: Store, name: str, text: str, collection: Any, named: dict[str, Any]) -> Any:
    if name == "bank" and text == SAMPLES and isinstance(collection, str):
        return sampled_bank(store, collection, named.get("field"))
    return read_bank(store, text) if text.startswith(COLLECTION_PREFIX) else text
