"""The commands milvus-hubness serve and proxy."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import typer

from milvus_hubness.basics.defaults import (
    DRAIN_SECONDS,
    MAX_CALLS,
    MAX_MESSAGE,
    PROXY_HOST,
    PROXY_PORT,
    STATE_TTL,
    URI_VARIABLES,
)
from milvus_hubness.cli.console import FAILURE, USAGE, on_signals, say, show_json, show_result
from milvus_hubness.cli.migrate.show import stream
from milvus_hubness.cli.options import (
    DEFAULT_URI,
    AsJson,
    certificates,
    open_store,
    read_token,
    token_of,
)
from milvus_hubness.errors import InvalidConfig, InvalidParameter, ServerUnavailable, redacted

if TYPE_CHECKING:
    from milvus_hubness.basics.files.certificates import Certificates
    from milvus_hubness.jobs.common.progress import Event
    from milvus_hubness.jobs.store.protocols import Store
    from milvus_hubness.milvus.proxy import Tls
    from milvus_hubness.serve import ConfigFile, OpenStore
    from milvus_hubness.serve.config import ServerTable


def print_event(event: Event) -> None:
    """Print an event with its facts on standard output.

    A run in which nothing was due is not printed.
    """
    if event.facts.get("result") == "ok" and event.facts["action"] == "none":
        return

    facts = {
        name: round(fact, 2) if isinstance(fact, float) else fact
        for name, fact in event.facts.items()
    }
    # One line an event, also where a message has several.
    words = [
        f"{name}={' '.join(str(fact).split())}"
        for name, fact in facts.items()
        if fact not in (None, "", 0, {})
    ]
    say(redacted(f"{event.time:%Y-%m-%d %H:%M:%S}Z {' '.join((event.name, *words))}"))


def serve(
    config: Annotated[Path, "Configuration file."] = Path("hubness.toml"),
    init: Annotated[
        list[str] | None,
        "Write the configuration for this corrected collection or alias, and exit; repeatable.",
        {"metavar": "NAME"},
    ] = None,
    once: Annotated[bool, "Reconcile every collection once and exit; 1 if one failed."] = False,
    check: Annotated[bool, "Only check the configuration; exit code 2 if it is wrong."] = False,
    as_json: AsJson = False,
) -> None:
    """Keep the biases of several collections up to date, and show their state over HTTP.

    Example: milvus-hubness serve --config hubness.toml
    """
    if init:
        if once or check:
            raise typer.BadParameter(
                "--init writes a configuration: run --once or --check after it"
            )
        _write_config(config, init, as_json)
        return

    from prometheus_client import disable_created_metrics

    from milvus_hubness.serve import ConfigFile, database_faults, file_faults

    # A metric more for each counter, with the time of its creation, which nobody reads.
    disable_created_metrics()  # type: ignore[no-untyped-call]
    try:
        file = ConfigFile(config)
        faults = [*file.faults, *file_faults(file)]
        # With a faulty address it would be another database, and a token or a certificate that cannot
        # be read opens none.
        if any(fault.path[:1] == ("server",) for fault in faults):
            raise file.refusal(faults)

        uri, connect = _database(file)
        if check and not faults:
            faults = database_faults(file, connect())
        # All faults at once: if the file has some, those of the database are shown with them, if it
        # answers.
        elif faults:
            with suppress(ServerUnavailable):
                faults += database_faults(file, connect())

        if faults:
            raise file.refusal(faults)
        if not check:
            _run(file, uri, connect, once, as_json)
            return
    except InvalidConfig as error:
        lines = redacted(str(error)).splitlines()
        if as_json:
            facts = {"type": type(error).__name__, "message": lines[0], "faults": lines}
            show_json({"error": facts})
        say("\n".join(lines), to_stderr=True)
        raise typer.Exit(USAGE) from None

    labels = [table.label for table in file.config.collection]
    result = {"check": {"config": str(file.path), "collections": labels}}
    show_result(as_json, result, lambda: say(f"{file.path}: valid, for {', '.join(labels)}"))


def _run(file: ConfigFile, uri: str, connect: OpenStore, once: bool, as_json: bool) -> None:
    """Run the service. SIGTERM and SIGINT end it between two batches, a second signal at once."""
    from milvus_hubness.serve import Service

    service = Service(file, uri, connect, [stream if as_json else print_event])
    caught: list[int] = []

    def stop(number: int) -> None:
        caught.append(number)
        if len(caught) > 1:
            raise SystemExit(128 + number)
        # In a thread of its own: `stop` takes locks, which the interrupted code may hold.
        threading.Thread(target=service.stop, name="milvus-hubness-stop").start()

    with on_signals(stop):
        if not once:
            service.run()
            return
        outcomes = service.once()

    if caught:
        raise typer.Exit(128 + caught[0])
    if any(outcome.result == "failed" for outcome in outcomes):
        raise typer.Exit(FAILURE)


def _database(file: ConfigFile) -> tuple[str, OpenStore]:
    """Return the address of the database and a function that opens it.

    Raises InvalidParameter for a password in it, and for files of certificates that the environment
    names; InvalidConfig for those of the file.
    """
    from milvus_hubness.serve.config_file import Fault

    # What the file does not say comes from the environment, as in the other commands.
    table = file.config.server
    uri = table.uri or _uri_of_environment()
    try:
        certificates = _certificates(table)
    except InvalidParameter as error:
        # Of a certificate and its key, one may be in the file and the other in the environment.
        named = [key for key in ("cert", "key", "ca") if getattr(table, key) is not None]
        if not named:
            raise
        raise file.refusal([Fault(("server", named[0]), str(error))]) from None

    def connect() -> Store:
        # The token is read each time: it may have been rotated.
        token = read_token(table.token_file) if table.token_file else token_of()
        return open_store(uri, token, certificates)

    return uri, connect


def _certificates(table: ServerTable | None = None) -> Certificates:
    """Return the files for TLS of a configuration, or else of the environment.

    Raises InvalidParameter.
    """
    return certificates() if table is None else certificates(table.ca, table.cert, table.key)


def _uri_of_environment() -> str:
    """Return the address of the database. Raises InvalidParameter for a password in it."""
    uri = next(filter(None, map(os.environ.get, URI_VARIABLES)), DEFAULT_URI)
    if "@" in urlsplit(uri).netloc:
        raise InvalidParameter(
            f"the address in ${' or $'.join(URI_VARIABLES)} holds a user or a password: "
            "set $MILVUS_HUBNESS_TOKEN to user:password instead"
        )
    return uri


def _write_config(path: Path, names: list[str], as_json: bool) -> None:
    """Write a configuration that fits these collections. Raises InvalidParameter if there is a file."""
    from milvus_hubness.cli.console import write_page
    from milvus_hubness.serve import first_config

    if path.exists():
        raise InvalidParameter(f"{path} exists: name another --config FILE, or remove it")

    uri = _uri_of_environment()
    text = first_config(open_store(uri, token_of(), _certificates()), names, uri, path)
    write_page(path, text)

    command = f"milvus-hubness serve --config {quote(str(path))}"
    result = {"init": {"config": str(path), "collections": names}}
    words = f"wrote {path}, for {', '.join(names)}\nTo check it: {command} --check\nTo start:    {command}"
    show_result(as_json, result, lambda: say(words))


MIB = 1 << 20
MAX_MESSAGE_MIB = MAX_MESSAGE // MIB
GRPC_THREADS = "-event_engine_client,-event_engine_listener"
"""The default of GRPC_EXPERIMENTS for the proxy: gRPC's threads switch half as often."""


@dataclass(frozen=True)
class Proxying:
    """The options of the same names in ProxyOptions."""

    host: Annotated[str, "Address to listen on."] = PROXY_HOST
    port: Annotated[int, "Port to listen on; 0 for a free one.", {"min": 0, "max": 65_535}] = (
        PROXY_PORT
    )
    upstream_tls: Annotated[bool, "Use TLS to Milvus."] = False
    state_ttl: Annotated[float, "TTL of the cached collection state, in seconds.", {"min": 0}] = (
        STATE_TTL
    )
    max_calls: Annotated[
        int, "Maximum number of running calls of one user on one collection.", {"min": 1}
    ] = MAX_CALLS
    drain: Annotated[float, "Seconds that running calls have to end after SIGTERM.", {"min": 0}] = (
        DRAIN_SECONDS
    )
    workers: Annotated[int, "Processes that serve the port.", {"min": 1}] = 1


def proxy(
    upstream: Annotated[str, "HOST:PORT of Milvus."],
    proxying: Proxying,
    strength: Annotated[
        float | None, "Strength of searches that name none. [default: the collection's]"
    ] = None,
    kinds: Annotated[
        float | None,
        "Factor of the correction by kind for searches that name none; 0 leaves it out. [default: 1]",
        {"min": 0},
    ] = None,
    tls_cert: Annotated[Path | None, "Certificate for TLS with clients, a PEM file."] = None,
    tls_key: Annotated[Path | None, "Key of that certificate, a PEM file."] = None,
    max_message_mib: Annotated[
        int, "Maximum size of a request, in MiB.", {"min": 1}
    ] = MAX_MESSAGE_MIB,
    max_in_flight_mib: Annotated[
        int | None,
        "Messages in memory, in MiB, half of them for one user. [default: 4 × --max-message-mib]",
        {"min": 1},
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run a gRPC proxy in front of Milvus so that clients in any language get corrected search.

    Example: milvus-hubness proxy --upstream localhost:19530 --port 19540
    """
    # gRPC reads it when it is imported, so the imports come after it.
    os.environ.setdefault("GRPC_EXPERIMENTS", GRPC_THREADS)
    from milvus_hubness.cli.workers import run
    from milvus_hubness.correction.overrides import Overrides
    from milvus_hubness.milvus.proxy import ProxyOptions

    options = ProxyOptions(
        upstream,
        **vars(proxying),
        overrides=Overrides(strength, kinds),
        certificates=certificates(),
        tls=_tls(tls_cert, tls_key),
        max_message=max_message_mib * MIB,
        max_in_flight=max_in_flight_mib * MIB if max_in_flight_mib else None,
    )

    def listening(port: int) -> None:
        address = f"{options.host}:{port}"
        result = {"event": "listening", "address": address, "upstream": options.upstream}
        text = f"listening on {address}, for Milvus at {options.upstream}"
        show_result(as_json, result, lambda: say(text))

    run(options, listening)


def _tls(certificate: Path | None, key: Path | None) -> Tls | None:
    """Return the certificate and key to serve with; None without TLS. Raises InvalidParameter."""
    from milvus_hubness.milvus.proxy import Tls

    if (certificate is None) != (key is None):
        raise InvalidParameter("TLS with clients needs both --tls-cert and --tls-key")
    return Tls.read(str(key), str(certificate)) if certificate and key else None
