"""The first configuration of the service, written from what the database has."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from milvus_hubness.correction.state import CollectionState
from milvus_hubness.errors import InvalidInput
from milvus_hubness.jobs.store.protocols import Store
from milvus_hubness.jobs.store.records import CollectionInfo
from milvus_hubness.serve.config import CollectionTable, HttpTable

HEAD = """\
# The configuration of `milvus-hubness serve`, written by `serve --init`.
# Check it after each change: milvus-hubness serve --config {file} --check
"""

BANK = """\
# Without this key, the bank in use stays: {count:,} queries, in the collection {bank}.
# bank = "past_queries.npy"
# Real queries apart from the bank, without answers: on them a new bank is judged.
# queries = "real_queries.npy"
"""


def first_config(store: Store, names: Sequence[str], uri: str, path: Path) -> str:
    """Return the text of a configuration with a table for each bias profile of these collections.

    uri: of their database. path: of the file, from whose folder paths are meant. Raises
    CollectionNotFound, StateError, and InvalidInput for a collection without a finished correction.
    """
    tables = [table for name in dict.fromkeys(names) for table in _tables(name, store.info(name))]
    parts = [
        HEAD.format(file=shlex.quote(_one_line(path.name))),
        _server(uri, path),
        _http(),
        *tables,
    ]
    return "\n".join(parts)


def _server(uri: str, path: Path) -> str:
    if "://" not in uri:
        uri = _from_folder(uri, path)
    lines = ["[server]", f"uri = {_quoted(uri)}"]
    lines.append("# The token: in $MILVUS_HUBNESS_TOKEN, or in a file.")
    lines.append('# token_file = "token"')
    return "\n".join(lines) + "\n"


def _from_folder(uri: str, path: Path) -> str:
    """Return the path of a Milvus Lite file as the configuration means it."""
    file = Path(uri)
    folder = path.resolve().parent
    try:
        return uri if file.is_absolute() else str(file.resolve().relative_to(folder))
    except ValueError:
        return str(file.resolve())


def _http() -> str:
    listen = HttpTable().listen
    return (
        "[http]\n# This machine only, unless another address is written here.\n"
        f"listen = {_quoted(listen)}\n"
    )


def _tables(name: str, info: CollectionInfo) -> Iterator[str]:
    """Yield the table of each profile of each corrected field. Raises InvalidInput."""
    if not info.states:
        raise InvalidInput(f"{info.name!r} is not corrected: migrate or enable it first")

    for field, state in info.states.items():
        if state.phase != "ready":
            raise InvalidInput(
                f"{info.name!r} is unfinished in {field!r}: continue its migration first"
            )
        for profile in state.profiles:
            yield _table(name, info, state, profile)


def _table(name: str, info: CollectionInfo, state: CollectionState, profile: str) -> str:
    """Return the table of one profile: what is the only one of its kind need not be named."""
    used = state.profiles[profile]
    command = f"milvus-hubness status {shlex.quote(_one_line(name))}"
    lines = ["[[collection]]", f"# {info.rows:,} rows. How they are corrected: {command}"]
    if name == info.name and info.aliases:
        aliases = ", ".join(map(_one_line, info.aliases))
        lines.append(f"# Better the alias that the application reads: {aliases}.")
    makes_copies = not state.codec.leaves_vectors
    if makes_copies and not info.aliases:
        lines.append(
            "# A refresh moves aliases to the copy that it makes, and none leads here: create the one"
        )
        lines.append("# that the application reads, or let the copy take the name: rename = true.")
    lines.append(f"name = {_quoted(name)}")
    if len(info.states) > 1:
        lines.append(f"field = {_quoted(state.field)}")
    if len(state.profiles) > 1:
        lines.append(f"profile = {_quoted(profile)}")

    defaults = CollectionTable(name=name)
    lines.append("# Rows without a bias get theirs: an interval, or cron.")
    lines.append(f"fill = {_quoted(defaults.fill.text)}")
    lines.append("# Is the bank or the method another one? Then all biases are computed.")
    lines.append(f"refresh = {_quoted(defaults.refresh.text)}")

    # Samples are of a field: profiles that all took them as their bank would be one.
    if info.samplings.of(state.field) is not None and len(state.profiles) == 1:
        lines.append(
            "# From this share of new rows on, sampled queries become the bank, if they are enough."
        )
        lines.append(f"refit_share = {defaults.refit_share}")
    bank = BANK.format(count=used.bank.count, bank=_one_line(used.bank.collection))
    return "\n".join(lines) + "\n" + bank


def _quoted(text: str) -> str:
    """Return a text as TOML writes it."""
    # JSON and TOML share their escapes; DEL alone may stand as it is in JSON only.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _one_line(text: str) -> str:
    """Return a text for a comment, which ends with its line."""
    return _quoted(text)[1:-1]
