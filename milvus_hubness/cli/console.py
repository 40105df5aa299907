"""What the commands share: options, the connection, and how things are shown."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from milvus_hubness.errors import UnreadableFile
from milvus_hubness.jobs.bank_source import read_bank as read_bank
from milvus_hubness.jobs.progress import Progress as Report
from milvus_hubness.redaction import redacted, remember_secrets, remembered_secrets, secrets_in
from milvus_hubness.stores import MilvusStore, connect

URI_VARIABLES = ("MILVUS_HUBNESS_URI", "MILVUS_URI")
DATABASE_VARIABLE = "MILVUS_HUBNESS_DB"
TOKEN_VARIABLE = "MILVUS_HUBNESS_TOKEN"

Uri = Annotated[
    str,
    typer.Option(
        "--uri",
        envvar=[*URI_VARIABLES],
        help="Milvus server, or the path of a Milvus Lite .db file.",
        show_default=True,
    ),
]
Database = Annotated[
    str, typer.Option("--db", envvar=DATABASE_VARIABLE, help="Database name.", show_default=False)
]
TokenFile = Annotated[
    Path | None,
    typer.Option("--token-file", help=f"File that holds the token. Without it, ${TOKEN_VARIABLE} is used."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]

DEFAULT_URI = "http://localhost:19530"

out = Console(soft_wrap=False)
err = Console(stderr=True)


def open_token(token_file: Path | None) -> str:
    """The token, never from an argument: those are readable in the process list."""
    if token_file is None:
        token = os.environ.get(TOKEN_VARIABLE, "")
    else:
        try:
            token = token_file.read_text().strip()
        except OSError as error:
            raise UnreadableFile(f"cannot read the token file {token_file}: {error.strerror}") from None
    remember_secrets(token)
    return token


def known_tokens() -> frozenset[str]:
    """Return the secrets that were opened: tokens, and passwords of addresses."""
    return remembered_secrets()


def open_store(uri: str, database: str, token_file: Path | None) -> MilvusStore:
    """The store behind --uri."""
    remember_secrets(*secrets_in(uri))
    return MilvusStore(connect(uri, open_token(token_file), database))


@contextmanager
def progress_bars() -> Iterator[Report]:
    """A bar for each stage on standard error, where that is a terminal."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(compact=True),
    )
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bars:
        tasks: dict[str, Any] = {}

        def report(doing: str, done: int, total: int) -> None:
            if doing not in tasks:
                tasks[doing] = bars.add_task(doing, total=total or None)
            bars.update(tasks[doing], completed=done, total=total or None)

        yield report


def show_json(data: Mapping[str, Any]) -> None:
    sys.stdout.write(redacted(json.dumps(data, ensure_ascii=False, default=str)) + "\n")


def show_facts(title: str, facts: Mapping[str, object]) -> None:
    """One fact a line."""
    table = Table(title=title, title_justify="left", title_style="bold", show_header=False, box=None)
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts.items():
        if value not in (None, "", [], ()):
            table.add_row(name, redacted(str(value)))
    out.print(table)


def tell_error(error: Exception, *, as_json: bool, program: str = "milvus-hubness") -> None:
    """One line on standard error; with --json also an object on standard output."""
    message = _message(error)
    if as_json:
        show_json({"error": {"type": type(error).__name__, "message": message}})
    sys.stderr.write(f"{program}: {message}\n")


def show_unexpected_error(error: Exception, *, as_json: bool) -> None:
    """Print the traceback of an error that no code expects; with --json also an object on standard output."""
    if as_json:
        show_json({"error": {"type": type(error).__name__, "message": _message(error)}})
    sys.stderr.write(redacted("".join(traceback.format_exception(error))))


def _message(error: Exception) -> str:
    return " ".join(redacted(str(getattr(error, "message", "") or error)).split())
