"""Defaults and choices of options, without an import that costs time: `--help` shows them at once."""

from __future__ import annotations

from typing import Literal

STATE_TTL = 5.0
"""Time for which a client uses a collection state that it has read, in seconds."""

URI_VARIABLES = ("MILVUS_HUBNESS_URI", "MILVUS_URI")
CLIENT_TTL_VARIABLE, LEASE_VARIABLE = "MILVUS_HUBNESS_CLIENT_TTL", "MILVUS_HUBNESS_LEASE_SECONDS"

WAIT_VARIABLE, WAIT_SECONDS = "MILVUS_HUBNESS_WAIT_SECONDS", 3_600.0
"""How long a job waits for a server that does not get any further, in seconds."""

Engine = Literal["local", "ray"]
"""Where biases are computed: on this machine, or on a Ray cluster."""

Live = Literal["never", "on drift", "always"]
"""When sampled queries enter an online bank."""

Where = Literal["fields", "side", "vectors"]
"""Where `enable` stores biases: in fields of the collection, in a side collection, or in a second vector field."""

MAX_MISS_RATE = 0.01
"""Share of the exact corrected top 10 that may be outside the candidates."""

DEFAULT_TOLERANCE = 1e-5
"""Difference between two biases, in units of the score, up to which a refresh does not write the row."""

REBUILD_SHARE, REBUILD_ROWS = 0.5, 50_000
"""Share of rows that need a write, and number of rows in all, from which on a refresh makes a copy: fewer rows are
upserted in less time than a copy takes to load."""

PROXY_HOST, PROXY_PORT, MAX_CALLS, MAX_MESSAGE, DRAIN_SECONDS = (
    "127.0.0.1",
    19540,
    512,
    64 << 20,
    10.0,
)
"""Of a proxy; see `proxy.ProxyOptions`. Milvus too takes requests of 64 MiB (proxy.grpc.serverMaxRecvSize)."""

MESSAGES_IN_FLIGHT = 4
"""Requests of the maximum size that a proxy has in memory by default."""

FORM: Literal["linear"] = "linear"
MEMORY, EPOCHS, MAP_EPOCHS = 10_000, 100, 16
"""Of linear maps and networks for QuARI; see `quari.settings`."""

QUERY_COLUMN, KEY_COLUMN = "query", "key"
"""Columns of a file of labelled pairs."""

WHERE_FROM = 'see "Where do I get reference queries?" in the README'
"""Where a message about a missing bank sends its reader."""
