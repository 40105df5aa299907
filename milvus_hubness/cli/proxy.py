"""milvus-hubness proxy"""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Annotated

import typer

from milvus_hubness.cli.console import AsJson, show_json
from milvus_hubness.errors import InvalidParameter
from milvus_hubness.proxy import Proxy, ProxyOptions, Tls, read_pem
from milvus_hubness.state import STATE_TTL

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
    """Stand before Milvus, so that clients of any language search corrected collections unchanged."""
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
    asyncio.run(_run(options, as_json))


def _tls(certificate: Path | None, key: Path | None) -> Tls | None:
    if (certificate is None) != (key is None):
        raise InvalidParameter("--tls-cert and --tls-key belong together")
    return Tls(read_pem(str(certificate)), read_pem(str(key))) if certificate and key else None


async def _run(options: ProxyOptions, as_json: bool) -> None:
    """Until SIGTERM or SIGINT; having been told to end is no failure."""
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
