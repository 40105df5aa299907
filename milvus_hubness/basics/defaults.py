"""Defaults and choices of options, without imports that cost time: `--help` shows them at once."""

from __future__ import annotations

from typing import Literal

STATE_TTL = 5.0
"""Time for which a client uses a collection state that it has read, in seconds."""

URI_VARIABLES = ("MILVUS_HUBNESS_URI", "MILVUS_URI")
"""Environment variables with the address of the database, the first that is set."""

CA_VARIABLE = "MILVUS_HUBNESS_CA"
CERT_VARIABLE = "MILVUS_HUBNESS_CERT"
KEY_VARIABLE = "MILVUS_HUBNESS_KEY"
"""Environment variables with the files of `Certificates` for connections to the database."""

CLIENT_TTL_VARIABLE = "MILVUS_HUBNESS_CLIENT_TTL"
"""Environment variable with the longest state_ttl of any client that writes."""

LEASE_VARIABLE = "MILVUS_HUBNESS_LEASE_SECONDS"
"""Environment variable with the duration of a lease."""

VERDICT_VARIABLE = "MILVUS_HUBNESS_VERDICT"
"""Environment variable with the VerdictMode of jobs that are given none."""

WAIT_VARIABLE = "MILVUS_HUBNESS_WAIT_SECONDS"
"""Environment variable that replaces WAIT_SECONDS."""

WAIT_SECONDS = 3_600.0
"""How long a job waits for a server that does not get any further, in seconds."""

VerdictMode = Literal["require", "warn", "skip"]
"""What a job does with the verdict on its bank: it stops before the first write if that is "leave it
alone", goes on and says so, or does not have the bank judged.
"""

FEWEST_QUERIES = 20
"""Queries without which nothing is judged, and in each half of a bank that is judged by itself."""

GrantsFor = Literal["application", "reader", "job"]
"""Who gets grants: who searches and writes, who only searches, or who runs jobs."""

OnHub = Literal["off", "warn", "refuse"]
"""What clients do with a new row that looks like a planted hub: nothing, log it, or refuse the write."""

ALERT_BUDGET = 0.002
"""Share of the rows that may look like planted hubs without an alarm."""

HUB_SCAN_ROWS = 200_000
"""Rows up to which the service scans a collection for planted hubs: it reads all of them."""

BiasLocation = Literal["vector", "beside"]
"""Where the bias of an item is kept: in columns of its vector, in a copy, or beside it: in a side
collection on Milvus, in keys of its payload on Qdrant. These words are the same in the API, the CLI
and the pages.
"""

MAX_MISS_RATE = 0.01
"""Share of the exact corrected top 10 that may be outside the candidates."""

REFIT_SHARE = 0.2
"""Share of rows, new or changed since the bank was fitted, from which on the service refits."""

KEEP_FORMER = 1
"""Number of former copies that a refresh leaves for a rollback."""

# Of a proxy; `proxy.ProxyOptions` explains them.
PROXY_HOST = "127.0.0.1"
PROXY_PORT = 19540
MAX_CALLS = 512
DRAIN_SECONDS = 10.0

MAX_MESSAGE = 64 << 20
"""Maximum size of a request to a proxy, in bytes: that of Milvus (proxy.grpc.serverMaxRecvSize)."""

MESSAGES_IN_FLIGHT = 4
"""Requests of the maximum size that a proxy has in memory by default."""

FORM: Literal["linear"] = "linear"
"""What QuARI trains: linear maps, not the authors' network; see `quari.settings`."""

MEMORY = 10_000
"""Maximum number of training pairs that linear maps remember."""

EPOCHS = 100
"""Maximum number of epochs of a network."""

MAP_EPOCHS = 16
"""Maximum number of epochs of linear maps."""

QUERY_COLUMN = "query"
"""Column with the vectors of the queries, in a file of judgements."""

KEY_COLUMN = "key"
"""Column with the keys of the right rows, in a file of judgements."""

GRADE_COLUMN = "grade"
"""Column with how right each of these rows is, in a file of judgements; it may be missing."""

QUERY_ID_COLUMN = "query_id"
"""Column with the ids of the queries, in a file of judgements or of vectors of queries."""

QUERY_NUMBER_COLUMN = "query_number"
"""Array of an .npz file of judgements with the number of the query of each key, if queries have
different numbers of them.
"""

WEIGHT_COLUMN = "weight"
"""Column with how often users send each query, in a file of judgements; it may be missing."""

DEFAULT_MEASURE = "R@1"
"""What right answers are measured by unless another measure is named."""

RUN_DEPTH = 1000
"""How many rows of each query a run has unless another number is named, as at TREC."""

WHERE_FROM = 'see "Where do I get reference queries?" in the README'
"""Where a message about a missing bank sends its reader."""
