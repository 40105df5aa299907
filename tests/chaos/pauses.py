"""Two processes that refresh the same collection: one of them was paused, or is one too many."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import tempfile
import time
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np

from milvus_hubness.jobs.common.lease import holder_of
from milvus_hubness.jobs.common.lease_records import now
from milvus_hubness.jobs.store.ownership import LEDGER
from milvus_hubness.jobs.store.protocols import Store
from milvus_hubness.jobs.store.records import Record
from tests.chaos.checks import assert_refreshed
from tests.chaos.corrected import Corrected
from tests.chaos.draws import drawn_biases
from tests.chaos.milvus import MilvusDatabase, MilvusPlace
from tests.chaos.moments import Moment
from tests.chaos.places import BACKENDS, PATIENCE, Command
from tests.chaos.processes import be_quiet, is_stopped, problem_of
from tests.chaos.sources import Shape

READS = {"announcing": 4, "filling": 4, "writing": 16, "flipping": 2}
"""About how many times each stage reads rows."""
SHAPE = Shape(key="int", metric="COSINE", index="FLAT", bias_location="none", nullable=False)

PAIRS = 2

_numbers = itertools.count()


def assert_one_writes(place: MilvusPlace, rng: random.Random, *, waits: bool = False) -> str:
    """A full refresh is paused; another of the same is refused, and changes nothing; when the lease has
    expired, one takes over and ends; the first, revived, says that it lost the lease. Returns when it was
    paused. waits: for the lease to expire, where else its end is moved to the present. Raises AssertionError.

    It is paused before it reads. Between a look at the lease and the write that follows nothing can stop it.
    """
    stem = f"paused_{os.getpid()}_{next(_numbers)}"
    corrected = Corrected(place, stem, SHAPE, "beside", rng.randrange(99))
    old, new, _ = drawn_biases(place.folder, "nnn", "both")
    options = (*new.options, "--force", "--uri", place.address)
    command = Command(place, ("refresh", corrected.name, *options))
    stage = rng.choice(list(READS))
    moment = Moment(stage, rng.randint(1, READS[stage]), only="Query")
    try:
        with place.open() as database:
            corrected.make(database, old)
            corrected.insert_pending(database)
            with _paused(command, moment) as paused:
                before = _seen(database, corrected)
                _assert_refused(command)
                assert _seen(database, corrected) == before, (
                    "a process without the lease changed something"
                )
                corrected.write(rng, database.application())
                _expire(database.store, corrected.name, waits=waits)
                code = command.run()
                assert code == 0, f"the process that took over exited with {code}: {command.told()}"
                after = _seen(database, corrected)
                os.kill(paused.pid, signal.SIGCONT)
                code = command.finished(paused)
                assert code == 1, f"revived, it exited with {code}: {command.told()}"
                assert "was lost" in _last_lines(command), (
                    f"revived, it says {_last_lines(command)!r}"
                )
            assert_refreshed(database, corrected, new)
            assert _seen(database, corrected) == after, "revived, it changed something"
    finally:
        corrected.drop()
    return str(moment)


def run_pauses(seed: int, backend: str) -> list[dict[str, Any]]:
    """Two pairs of processes at a backend; prints a line for each. What happened, and the problem if any."""
    be_quiet()
    found = []
    with tempfile.TemporaryDirectory(prefix="pauses-") as folder, contextlib.ExitStack() as stack:
        server = stack.enter_context(BACKENDS[backend].server())
        for number in range(PAIRS):
            rng = random.Random(f"pauses {seed} {backend} {number}")
            facts: dict[str, Any] = {
                "backend": backend,
                "number": number,
                "paused": "",
                "problem": "",
            }
            place = MilvusPlace.within(Path(folder), server)
            began = time.monotonic()
            try:
                with place.hosted() if server is None else contextlib.nullcontext(place) as at:
                    facts["paused"] = assert_one_writes(at, rng, waits=True)
            except Exception as error:
                facts["problem"] = problem_of(error)
            facts["seconds"] = round(time.monotonic() - began, 1)
            print(f"pauses: {facts}", flush=True)
            found.append(facts)
    return found


@contextlib.contextmanager
def _paused(command: Command, moment: Moment) -> Iterator[BaseProcess]:
    """The command, stopped at this moment; killed at the end if it is still there."""
    process = command.started(moment=moment, sign=signal.SIGSTOP)
    try:
        until = time.monotonic() + PATIENCE
        while not is_stopped(process):
            assert process.is_alive(), f"it ended before {moment}: {command.told()}"
            assert time.monotonic() < until, f"it did not come to {moment}"
            time.sleep(0.02)
        yield process
    finally:
        process.kill()
        process.join()


def _assert_refused(command: Command) -> None:
    code = command.run()
    assert code == 1, f"a second process exited with {code}: {command.told()}"
    assert "holds the lease on" in _last_lines(command), (
        f"a second process says {_last_lines(command)!r}"
    )


def _last_lines(command: Command) -> str:
    """As one: the console breaks them."""
    return " ".join(command.log.read_text(errors="replace").split())[-600:]


def _expire(store: Store, name: str, *, waits: bool) -> None:
    entry = holder_of(store, name)
    assert entry, "the paused process holds no lease"
    assert entry.expires_at, "the paused process holds no lease"
    if waits:
        time.sleep(max(0.0, (entry.expires_at - now()).total_seconds()) + entry.skew + 0.5)
        return
    # It holds the lease on the collections that it fills, too.
    for collection in store.collection_names():
        held = holder_of(store, collection)
        if held is None or held.owner_id != entry.owner_id:
            continue
        over = held.model_copy(update={"expires_at": now() - timedelta(seconds=held.skew + 1)})
        group = f"leases/{collection}"
        [record] = [each for each in store.records(LEDGER, group) if each.key == held.key]
        store.put_records(LEDGER, [Record(record.key, record.group, over.model_dump_json())])


def _seen(database: MilvusDatabase, corrected: Corrected) -> object:
    """All that a refresh changes: what the collection says of itself, and its rows, as they are stored."""
    client = database.client
    properties = client.describe_collection(corrected.name)["properties"]
    rows = client.query(
        corrected.name, filter="", output_fields=["*"], limit=16_384, consistency_level="Strong"
    )
    stored = {row["pk"]: {**row, "vec": np.float32(row["vec"]).tobytes()} for row in rows}
    banks = client.query(
        corrected.bank, filter="", output_fields=["id"], limit=16_384, consistency_level="Strong"
    )
    return properties, stored, sorted(row["id"] for row in banks), corrected.ours(database)
