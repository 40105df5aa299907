"""One collection, the application that writes to it through HubnessClient, and the model of its writes."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from pymilvus import DataType, MilvusClient, MilvusException

from milvus_hubness import HubnessClient
from tests.chaos.jobs import Job
from tests.chaos.relay import Relay
from tests.chaos.settings import CLIENT_TTL, DIM, Settings
from tests.support.galleries import nnn, vectors
from tests.support.servers import MilvusServer, aliases_of, die_with_parent, free_ports

ROWS, PENDING, BANK_ROWS, K, ALPHA = 300, 100, 32, 4, 0.75
SHARE = 0.15
TTL = 0.1
"""state_ttl of the application's client, in seconds; CLIENT_TTL is more, as the machine is busy."""
WRITE_SECONDS = 4.0
"""For which a write that fails is tried again, before its rows count as uncertain."""

_numbers = itertools.count()
Row = dict[str, Any]


@contextlib.contextmanager
def milvus(backend: str, folder: Path) -> Iterator[str]:
    """The URI of a running server: "lite" for Milvus Lite's, or "server-2.3.5"."""
    if backend == "server-2.3.5":
        with MilvusServer(channels=4) as server:
            yield server.uri
        return
    [port] = free_ports(1)
    command = [
        sys.executable,
        "-m",
        "milvus_lite",
        "server",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    process = subprocess.Popen(
        die_with_parent([*command, "--data-dir", str(folder / "lite")]),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        with grpc.insecure_channel(
            f"127.0.0.1:{port}", [("grpc.max_reconnect_backoff_ms", 100)]
        ) as channel:
            grpc.channel_ready_future(channel).result(60)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


class Scene:
    """A collection `source`, which the application reads by `name`: an alias of it, or its own name.

    biased_rows: the application may read another collection by that name later."""

    def __init__(self, uri: str, folder: Path, rng: random.Random, *, metric: str = "IP") -> None:
        self.uri, self.folder, self.rng, self.metric = uri, folder, rng, metric
        self.stem = f"c{os.getpid()}_{next(_numbers)}"
        self.source, self.name = f"{self.stem}_src", f"{self.stem}_app"
        self._connect()
        self.model: dict[int, Row] = {}
        self.uncertain: dict[int, list[Row | None]] = {}
        self.refusals: list[str] = []
        self._former: dict[int, list[Row]] = {}
        self._next, self._version = 0, 0
        self._stack = contextlib.ExitStack()
        self.jobs: list[Job] = []
        self._numbers = np.random.default_rng(rng.randrange(2**32))
        self.banks = [folder / f"{self.stem}-{i}.npy" for i in range(3)]
        for bank in self.banks:
            np.save(bank, vectors(self._numbers, BANK_ROWS, DIM))

    prefix = ""
    """What the address of the database begins with for the command line."""
    refused: type[Exception] | tuple[type[Exception], ...] = MilvusException
    """What a write of the application raises that may be tried again."""

    def _connect(self) -> None:
        self.plain = MilvusClient(self.uri)
        self.client = HubnessClient(self.uri, state_ttl=TTL)

    def __enter__(self) -> Scene:
        return self

    def __exit__(self, *error: object) -> None:
        for job in self.jobs:
            job.kill()
        self._stack.close()
        with contextlib.suppress(
            *(self.refused if isinstance(self.refused, tuple) else (self.refused,))
        ):
            self._drop()
        self.client.close()
        self.plain.close()

    def make(self, *, alias: bool = True) -> None:
        """The source, filled. alias: the application's name is
        one from the beginning; else it is the source's own."""
        schema = self.plain.create_schema(enable_dynamic_field=True)
        schema.add_field("pk", DataType.INT64, is_primary=True)
        schema.add_field("vec", DataType.FLOAT_VECTOR, dim=DIM)
        schema.add_field("version", DataType.INT64)
        index = self.plain.prepare_index_params("vec", index_type="FLAT", metric_type=self.metric)
        self.plain.create_collection(
            self.source, schema=schema, index_params=index, consistency_level="Strong"
        )
        rows = self._rows(range(ROWS))
        self.plain.insert(self.source, [dict(row) for row in rows])
        self._next = ROWS
        self.model = {row["pk"]: row for row in rows}
        if alias:
            self.plain.create_alias(self.source, self.name)
        else:
            self.name = self.source

    def configuration(self, bank: int) -> Path:
        """The file of a service that keeps this collection on one of the banks."""
        path = self.folder / f"{self.stem}-{bank}.toml"
        path.write_text(
            f"""
[[collection]]
name = "{self.name}"
bank = "{self.banks[bank]}"
method = "nnn"
params = {{k = {K}, alpha = {ALPHA}}}
override = true
client_ttl = {CLIENT_TTL}
"""
        )
        return path

    # -- jobs ---------------------------------------------------------------------------------------------

    def relay(self, process: str) -> Relay:
        return self._stack.enter_context(Relay(self.uri.partition("//")[2], process))

    def start(
        self, process: str, argv: list[str], relay: Relay | None = None, **settings: Any
    ) -> Job:
        """A job through a relay, or directly."""
        uri = relay.uri if relay else self.uri
        job = Job(
            process,
            [*argv, "--json"],
            self.folder,
            Settings(f"{self.prefix}{uri}", **settings),
        )
        self.jobs.append(job)
        return job

    def do(self, *argv: str, **settings: Any) -> Job:
        """A job, directly and to its end. Raises AssertionError where it fails."""
        job = self.start("job", list(argv), **settings)
        code = job.wait()
        assert code == 0, f"{' '.join(argv[:2])} exited with {code}: {job.message}"
        return job

    # -- the application ----------------------------------------------------------------------------------

    def write(self, share: float = SHARE) -> None:
        """Update, delete and insert this share of the rows each."""
        keys = sorted(self.model)
        self.rng.shuffle(keys)
        count = max(1, int(share * len(keys)))
        self.update(keys[:count])
        self.delete(keys[count : 2 * count])
        self.insert(count)

    def update(self, keys: list[int]) -> None:
        rows = self._rows(keys)
        self._apply(lambda: self._upsert(rows), {row["pk"]: row for row in rows})

    def delete(self, keys: list[int]) -> None:
        self._apply(lambda: self.client.delete(self.name, ids=keys), dict.fromkeys(keys))

    def insert(self, count: int, *, pending: bool = False) -> None:
        """pending: rows that get their biases from the next refresh."""
        rows = self._rows(range(self._next, self._next + count))
        self._next += count
        bias = {"bias": "pending"} if pending else {}
        self._apply(lambda: self._upsert(rows, **bias), {row["pk"]: row for row in rows})

    def _upsert(self, rows: list[Row], **options: Any) -> None:
        self.client.upsert(self.name, [dict(row) for row in rows], **options)

    def _rows(self, keys: Any) -> list[Row]:
        keys = list(keys)
        self._version += 1
        made = vectors(self._numbers, len(keys), DIM)
        return [
            {
                "pk": key,
                "vec": vector.tolist(),
                "version": self._version,
                "note": f"v{self._version}",
            }
            for key, vector in zip(keys, made, strict=True)
        ]

    def _apply(self, write: Callable[[], Any], rows: dict[int, Row | None]) -> None:
        until = time.monotonic() + WRITE_SECONDS
        while True:
            try:
                write()
                break
            except self.refused as error:
                if time.monotonic() > until:
                    self.refusals.append(str(error))
                    for key, row in rows.items():
                        self.uncertain.setdefault(key, [self.model.get(key)]).append(row)
                    return
                time.sleep(0.1)
        for key, row in rows.items():
            self.uncertain.pop(key, None)
            if (former := self.model.pop(key, None)) is not None:
                self._former.setdefault(key, []).append(former)
            if row is not None:
                self.model[key] = row

    # -- what must hold -----------------------------------------------------------------------------------

    def compare(self, when: str) -> None:
        """Every row that a HubnessClient reads is as the application wrote it last. Raises AssertionError."""
        found = self.read()
        certain = {key: row for key, row in self.model.items() if key not in self.uncertain}
        revert = [key for key in found if key not in self.model and key not in self.uncertain]
        lost = [key for key in certain if key not in found]
        undone, wrong = [], []
        for key, row in certain.items():
            if key in found and not _same(found[key], row):
                former = any(_same(found[key], each) for each in self._former.get(key, ()))
                (undone if former else wrong).append(key)
        wrong += [
            key
            for key, rows in self.uncertain.items()
            if not any(
                key not in found if row is None else key in found and _same(found[key], row)
                for row in rows
            )
        ]
        result = {
            "updates undone": undone,
            "rows back": revert,
            "rows lost": lost,
            "rows wrong": wrong,
        }
        problems = [
            f"{len(keys)} {what}, {sorted(keys)[:3]} say" for what, keys in result.items() if keys
        ]
        assert not problems, f"{when}: " + "; ".join(problems)

    def read(self) -> dict[int, Row]:
        client = HubnessClient(self.uri, state_ttl=0.0)
        try:
            rows = client.query(
                self.name,
                filter="pk >= 0",
                output_fields=["*"],
                limit=16_000,
                consistency_level="Strong",
            )
        finally:
            client.close()
        return {row["pk"]: dict(row) for row in rows}

    def read_collection(self) -> str:
        """The real name of the collection that the application reads."""
        return str(self.plain.describe_collection(self.name)["collection_name"])

    def state(self) -> Any:
        """The collection state, or None where it is not corrected."""
        client = HubnessClient(self.uri, state_ttl=0.0)
        try:
            return client.hubness_state(self.name)
        finally:
            client.close()

    def assert_biases(self, bank: Path) -> None:
        """Every row found is corrected by the bias that this bank gives it, up to one number for all."""
        client = HubnessClient(self.uri, state_ttl=0.0)
        try:
            [hits] = client.search(
                self.name,
                data=[np.float32(next(iter(self.model.values()))["vec"])],
                limit=len(self.model),
                output_fields=["vec"],
                with_raw_score=True,
                consistency_level="Strong",
            )
        finally:
            client.close()
        lower = np.array([hit["raw_score"] - hit["distance"] for hit in hits])
        biases = -lower / 2 if self.metric == "L2" else lower
        items = np.float32([hit["entity"]["vec"] for hit in hits])
        off = biases - nnn(np.load(bank), items, self.metric, K, ALPHA)
        off -= np.median(off)
        wrong = [hit["pk"] for hit, by in zip(hits, off, strict=True) if abs(by) > 1e-3]
        assert not wrong, f"{len(wrong)} of {len(hits)} rows have the wrong bias: {wrong[:5]}"

    def _drop(self) -> None:
        for name in self.plain.list_collections():
            if name.startswith(f"{self.stem}_"):
                for alias in aliases_of(self.plain, name):
                    self.plain.drop_alias(alias)
                self.plain.drop_collection(name)


def _same(row: Row, other: Row) -> bool:
    """Whether a row that was read is this one of the model. Fields of others do not count."""
    if any(row.get(name) != value for name, value in other.items() if name != "vec"):
        return False
    return bool(np.allclose(row["vec"], other["vec"], rtol=1e-5, atol=1e-6))
