"""The commands milvus-hubness serve and proxy."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
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
from milvus_hubness.cli.migrate.show import stream
from milvus_hubness.errors import InvalidConfig, InvalidParameter, ServerUnavailable, redacted
from milvus_hubness.operations.progress import Event
from milvus_hubness.proxy import Proxy, ProxyOptions, Tls, read_pem
from milvus_hubness.serve import ConfigFile, OpenStore, Service, database_faults, file_faults
from milvus_hubness.state import STATE_TTL

ACTIONS = {
    "pending": "new rows have their bias",
    "full": "all biases were renewed",
    "rebuilt": "a copy with new biases took over",
    "refused": "new biases were refused",
}
RESULTS = {"failed": "FAILED", "busy": "left alone", "stopped": "stopped"}


def narrate(event: Event) -> None:
    """Print an event on standard output, without buffering."""
    if line := _line(event.name, event.facts):
        sys.stdout.write(redacted(f"{event.time:%Y-%m-%d %H:%M:%S}Z {line}\n", known_tokens()))
        sys.stdout.flush()


def _line(name: str, facts: Mapping[str, Any]) -> str:
    if name == "reconciled":
        return _reconciled(facts)
    if name == "missed":
        why = "this process was held up" if facts["reason"] == "late" else "the look before was not over"
        count = f"{facts['count']:,} scheduled runs" if facts["count"] > 1 else "a scheduled run"
        return f"{facts['collection']}: missed {count}, {why}; made up for now"
    if name == "warning":
        return f"{facts['collection']}: {facts['message']}"
    return {
        "started": f"the page and the metrics are at {facts.get('url')}",
        "waiting": f"waiting for the database: {facts.get('message')}",
        "ready": "every collection was looked at",
        "stopping": "stopping: what is under way ends after its batch",
        "stopped": "stopped",
    }.get(name, "")


def _reconciled(facts: Mapping[str, Any]) -> str:
    """Return the line of a reconciliation; empty if nothing was due."""
    collection, message = facts["collection"], " ".join(facts["message"].split())
    if facts["result"] != "ok":
        return f"{collection}: {RESULTS[facts['result']]}: {message}"
    if facts["action"] == "none":
        return ""
    skewness = facts["skewness"]
    judged = ", ".join(f"{name} {value:.2f}" for name, value in skewness.items())
    return (
        f"{collection}: {ACTIONS[facts['action']]} ({message}): {facts['scanned']:,} looked at, "
        f"{facts['changed']:,} changed, {facts['skipped']:,} as they were, in {facts['seconds']:.1f} s"
        + (f"; skewness {judged}" if judged else "")
    )


FAILURE, USAGE = 1, 2

Config = Annotated[
    Path, typer.Option("--config", help="The configuration, hubness.toml.", show_default=False)
]
Once = Annotated[
    bool,
    typer.Option("--once", help="Reconcile every collection once and end: exit code 1 where one failed."),
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
    """Run the service. A stop on request is a success, unless --once was given and the work is unfinished."""
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
    """Return the address of the database, and a function that opens it. Raises InvalidParameter for an
    address in the environment that holds a password, because it would be shown."""
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
    """End the service between two batches on SIGTERM or SIGINT, and at once on a second signal. Yield the
    numbers of the received signals."""
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
    """Print a line for each fault on standard error; with --json also an object on standard output."""
    faults = redacted(str(error), known_tokens()).splitlines()
    if as_json:
        show_json({"error": {"type": type(error).__name__, "message": faults[0], "faults": faults}})
    sys.stderr.write("".join(f"{fault}\n" for fault in faults))


MIB = 1 << 20

Upstream = Annotated[str, typer.Option("--upstream", help="HOST:PORT of Milvus.", show_default=False)]
Host = Annotated[str, typer.Option("--host", help="The address to listen on.")]
Port = Annotated[
    int, typer.Option("--port", min=0, max=65_535, help="The port to listen on; 0 takes a free one.")
]
Certificate = Annotated[
    Path | None, typer.Option("--tls-cert", help="Speak TLS to clients, with this certificate (PEM).")
]
Key = Annotated[Path | None, typer.Option("--tls-key", help="The key of that certificate (PEM).")]
UpstreamTls = Annotated[bool, typer.Option("--upstream-tls", help="Speak TLS to Milvus.")]
UpstreamCa = Annotated[
    Path | None,
    typer.Option("--upstream-ca", help="The authorities to trust there (PEM), not those of the system."),
]
Strength = Annotated[
    float | None,
    typer.Option("--strength", help="Of searches that name none. Without it, each collection's own."),
]
StateTtl = Annotated[
    float,
    typer.Option("--state-ttl", min=0, help="Seconds to believe what a collection says of its biases."),
]
MaxMessage = Annotated[
    int, typer.Option("--max-message-mib", min=1, help="The largest message in either direction, in MiB.")
]
MaxCalls = Annotated[
    int,
    typer.Option("--max-calls", min=1, help="The most calls of one user on one collection at once."),
]
Keepalive = Annotated[
    float, typer.Option("--keepalive", min=1, help="Seconds between signs of life on a quiet connection.")
]
Drain = Annotated[
    float, typer.Option("--drain", min=0, help="Seconds that calls under way have to end on SIGTERM.")
]
Budget = Annotated[
    int,
    typer.Option("--bank-budget-mib", min=1, help="MiB of banks kept for each user of a database."),
]


def proxy(
    upstream: Upstream,
    host: Host = "127.0.0.1",
    port: Port = 19540,
    tls_cert: Certificate = None,
    tls_key: Key = None,
    upstream_tls: UpstreamTls = False,
    upstream_ca: UpstreamCa = None,
    strength: Strength = None,
    state_ttl: StateTtl = STATE_TTL,
    max_message_mib: MaxMessage = 256,
    max_calls: MaxCalls = 512,
    keepalive: Keepalive = 30.0,
    drain: Drain = 10.0,
    bank_budget_mib: Budget = 1024,
    as_json: AsJson = False,
) -> None:
    """Run a gRPC proxy in front of Milvus so that clients in any language get corrected search."""
    options = ProxyOptions(
        upstream,
        upstream_tls=upstream_tls,
        upstream_ca=str(upstream_ca) if upstream_ca else None,
        host=host,
        port=port,
        tls=_tls(tls_cert, tls_key),
        strength=strength,
        state_ttl=state_ttl,
        max_message=max_message_mib * MIB,
        keepalive=keepalive,
        drain=drain,
        bank_budget=bank_budget_mib * MIB,
        max_calls=max_calls,
    )
    asyncio.run(_run_proxy(options, as_json))


def _tls(certificate: Path | None, key: Path | None) -> Tls | None:
    if (certificate is None) != (key is None):
        raise InvalidParameter("--tls-cert and --tls-key belong together")
    return Tls(read_pem(str(certificate)), read_pem(str(key))) if certificate and key else None


async def _run_proxy(options: ProxyOptions, as_json: bool) -> None:
    """Run the proxy until SIGTERM or SIGINT; a stop on request is no failure."""
    loop, told_to_end = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told_to_end.set)
    async with Proxy(options) as running:
        listening = f"{options.host}:{running.port}"
        if as_json:
            show_json({"event": "listening", "address": listening, "upstream": options.upstream})
        else:
            typer.echo(f"listening on {listening}, for Milvus at {options.upstream}")
        await told_to_end.wait()
