"""milvus-hubness serve"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer
from prometheus_client import disable_created_metrics

from milvus_hubness.cli.console import (
    DATABASE_VARIABLE,
    DEFAULT_URI,
    URI_VARIABLES,
    AsJson,
    known_tokens,
    open_store,
    show_json,
)
from milvus_hubness.cli.migrate.stream import stream
from milvus_hubness.cli.serve_lines import narrate
from milvus_hubness.errors import InvalidConfig, InvalidParameter, ServerUnavailable
from milvus_hubness.jobs.migration.commands import redacted
from milvus_hubness.serve import ConfigFile, OpenStore, Service, database_faults, file_faults

FAILURE, USAGE = 1, 2

Config = Annotated[
    Path, typer.Option("--config", help="The configuration, hubness.toml.", show_default=False)
]
Once = Annotated[
    bool,
    typer.Option(
        "--once", help="Reconciliation at every collection once and end: exit code 1 where one failed."
    ),
]
Check = Annotated[
    bool, typer.Option("--check", help="Only tell whether the configuration is right: exit code 2 if not.")
]


def serve(config: Config, once: Once = False, check: Check = False, as_json: AsJson = False) -> None:
    """Keep the biases of several collections right, as a configuration says, and show that over HTTP."""
    disable_created_metrics()  # type: ignore[no-untyped-call]
    logging.getLogger("apscheduler").setLevel(logging.CRITICAL + 1)
    try:
        file = ConfigFile(config)
        uri, connect = _database(file)
        faults = [*file.faults, *file_faults(file)]
        if check and not faults:
            faults = database_faults(file, connect())
        elif faults and all(fault.path[:1] != ("server",) for fault in file.faults):
            with suppress(ServerUnavailable):
                faults += database_faults(file, connect())
        if faults:
            raise file.refusal(faults)
        if check:
            _report_valid(file, as_json)
            return
        _run(file, uri, connect, once, as_json)
    except InvalidConfig as error:
        _report_faults(error, as_json)
        raise typer.Exit(USAGE) from None


def _run(file: ConfigFile, uri: str, connect: OpenStore, once: bool, as_json: bool) -> None:
    """A service that was told to end and did has done what it was asked to; work that was to be done once and
    was not has not."""
    listener = stream if as_json else narrate
    service = Service(file, uri, connect, [listener])
    with _stopped_by_signals(service) as caught:
        if not once:
            service.run()
            return
        outcomes = service.once()
    if caught:
        raise typer.Exit(128 + caught[0])
    if any(outcome.result == "failed" for outcome in outcomes):
        raise typer.Exit(FAILURE)


def _database(file: ConfigFile) -> tuple[str, OpenStore]:
    """The address of the database, and what opens it. Raises InvalidParameter for an address in the
    environment that holds a password: it would be shown."""
    table = file.config.server
    uri = table.uri or next(filter(None, map(os.environ.get, URI_VARIABLES)), DEFAULT_URI)
    if "@" in urlsplit(uri).netloc:
        raise InvalidParameter(
            f"the address in ${' or $'.join(URI_VARIABLES)} holds a user or a password: "
            "set $MILVUS_HUBNESS_TOKEN to user:password instead"
        )
    if table.uri and "://" not in uri:
        uri = str(file.folder / uri)
    database = os.environ.get(DATABASE_VARIABLE, "") if table.db is None else table.db
    token_file = file.folder / table.token_file if table.token_file else None
    return uri, lambda: open_store(uri, database, token_file)


@contextmanager
def _stopped_by_signals(service: Service) -> Iterator[list[int]]:
    """SIGTERM and SIGINT end the service between two batches; a second one ends it at once. Gives the numbers
    of those that came."""
    caught: list[int] = []

    def stop(number: int, frame: Any) -> None:
        caught.append(number)
        if len(caught) > 1:
            raise SystemExit(128 + number)
        threading.Thread(target=service.stop, name="milvus-hubness-stop").start()

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _report_valid(file: ConfigFile, as_json: bool) -> None:
    labels = [table.label for table in file.config.collection]
    if as_json:
        show_json({"check": {"config": str(file.path), "collections": labels}})
    else:
        sys.stdout.write(f"{file.path}: right, for {', '.join(labels)}\n")


def _report_faults(error: InvalidConfig, as_json: bool) -> None:
    """A line for each on standard error; with --json also an object on standard output."""
    faults = redacted(str(error), known_tokens()).splitlines()
    if as_json:
        show_json({"error": {"type": type(error).__name__, "message": faults[0], "faults": faults}})
    sys.stderr.write("".join(f"{fault}\n" for fault in faults))
