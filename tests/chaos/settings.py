"""Settings of a job process in trials: its lease, clock, host, size of batches, and shorter waits.

A process of the command line takes some of them from no option: what is set here is set in that process alone."""

from __future__ import annotations

import datetime
import os
import time
from dataclasses import dataclass
from types import SimpleNamespace

import time_machine
from pymilvus.client import grpc_handler
from pymilvus.settings import Config

from milvus_hubness import MilvusStore
from milvus_hubness.jobs.common.lease_records import Owner
from qdrant_hubness import QdrantStore

DIM = 16
POLLING = 0.05
CLIENT_TTL = 0.3


@dataclass(frozen=True)
class Settings:
    """uri: of the database. lease_seconds: after which a lease expires that nobody renews. skew: seconds that the
    wall clock of the process is ahead. host: of a machine that it pretends to run on. rows: that a job takes at
    once. client_ttl: seconds that it waits for clients to hear of a change."""

    uri: str
    lease_seconds: float = 2.0
    skew: float = 0.0
    host: str = ""
    rows: int = 60
    client_ttl: float = CLIENT_TTL

    def apply(self) -> None:
        """Apply them to this process."""
        if self.skew:
            shifted = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(
                seconds=self.skew
            )
            time_machine.travel(shifted).start()
        if self.host:
            elsewhere = Owner.here().model_copy(update={"host": self.host, "boot_id": self.host})
            Owner.here = classmethod(lambda cls: elsewhere)
        hasten()
        os.environ["MILVUS_HUBNESS_URI"] = self.uri
        os.environ["MILVUS_HUBNESS_LEASE_SECONDS"] = str(self.lease_seconds)
        os.environ["MILVUS_HUBNESS_CLIENT_TTL"] = str(self.client_ttl)
        for store in (MilvusStore, QdrantStore):
            store.chunk_rows = lambda store, source: self.rows


def hasten() -> None:
    """Let pymilvus wait less between two looks at an index or at a collection that is being loaded."""
    Config.WaitTimeDurationWhenLoad = POLLING
    short = {"sleep": lambda seconds: time.sleep(min(seconds, POLLING))}
    grpc_handler.time = SimpleNamespace(**(vars(time) | short))
