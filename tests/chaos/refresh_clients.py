"""An application that goes on throughout a refresh, on Milvus: it writes, and it searches, and each answer's
biases are all old or all new."""

from __future__ import annotations

import random
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from pymilvus.exceptions import MilvusException

from milvus_hubness import HubnessClient, HubnessError
from milvus_hubness.correction.codec.base import PENDING
from tests.chaos.corrected import Biases, Corrected
from tests.chaos.places import PATIENCE
from tests.chaos.sources import DIM
from tests.support.galleries import vectors

LIMIT, QUERIES = 30, 2
READ_PAUSE, WRITE_PAUSE = 0.1, 0.3
SPREAD = 2e-4


class _Client(ABC):
    """One that goes on from `with` to its end, and believes for `state_ttl` seconds what it was told.

    sure: the database is not killed meanwhile, and serves it always. problem: what it noticed."""

    pause = 0.0

    def __init__(self, corrected: Corrected, state_ttl: float, *, sure: bool) -> None:
        self._corrected, self._sure = corrected, sure
        self._client = HubnessClient(corrected.place.uri, state_ttl=state_ttl)
        self._state_ttl = state_ttl
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._go_on, name=type(self).__name__, daemon=True)
        self.problem = ""

    def __enter__(self) -> _Client:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join(60)
        if self._thread.is_alive():
            self.problem = f"the {self._thread.name} did not end"
        self._client.close()

    @abstractmethod
    def _turn(self) -> None: ...

    def _go_on(self) -> None:
        while not self._stop.wait(self.pause) and not self.problem:
            try:
                self._turn()
            except (MilvusException, HubnessError):
                if self._sure:
                    self.problem = f"the {self._thread.name} failed: {traceback.format_exc()}"
            except Exception:
                self.problem = f"the {self._thread.name} failed: {traceback.format_exc()}"


class Writer(_Client):
    """Rows changed, added and deleted. turns: how often."""

    pause = WRITE_PAUSE

    def __init__(
        self, corrected: Corrected, state_ttl: float, rng: random.Random, *, sure: bool
    ) -> None:
        super().__init__(corrected, state_ttl, sure=sure)
        self._rng = rng
        self.turns = 0

    def _turn(self) -> None:
        self._corrected.write(self._rng, self._client)
        self.turns += 1


class Reader(_Client):
    """biases: all that an answer may be by. answers: how many there were by each."""

    pause = READ_PAUSE

    def __init__(
        self, corrected: Corrected, state_ttl: float, biases: Sequence[Biases], *, sure: bool
    ) -> None:
        super().__init__(corrected, state_ttl, sure=sure)
        self._biases = biases
        self._state = self._client.hubness_state(corrected.name, "vec")
        self._epochs = (
            None if corrected.bias_location == "beside" else self._state.codec.epoch_field
        )
        self._rng = np.random.default_rng(7)
        self.answers: Counter[int] = Counter()

    def wait_for(self, biases: Biases) -> None:
        """An answer by these."""
        number, until = self._biases.index(biases), time.monotonic() + PATIENCE
        while not self.problem and not self.answers[number]:
            assert time.monotonic() < until, "searches never saw the biases that were refreshed"
            time.sleep(0.05)

    def _turn(self) -> None:
        fields = ["vec", *([self._epochs] if self._epochs else [])]
        began = time.monotonic()
        answer = self._client.search(
            self._corrected.name,
            data=list(vectors(self._rng, QUERIES, DIM)),
            limit=LIMIT,
            output_fields=fields,
            with_raw_score=True,
            consistency_level="Strong",
        )
        # A client remembers biases for as long as the state.
        halves = self._corrected.half_written(since=began - self._state_ttl)
        for hits in answer:
            found = [hit for hit in hits if self._has_bias(hit) and hit.pk not in halves]
            if len(found) > 1:
                self._judge(found)

    def _has_bias(self, hit: dict[str, Any]) -> bool:
        if self._epochs:
            return hit["entity"][self._epochs] not in (None, PENDING)
        return abs(hit["raw_score"] - hit["distance"]) > 0

    def _judge(self, hits: list[dict[str, Any]]) -> None:
        """All by the same biases, up to one number, which their centre makes."""
        lower = np.array([hit["raw_score"] - hit["distance"] for hit in hits])
        got = -lower / 2 if self._state.metric == "L2" else lower
        items = np.float32([hit["entity"]["vec"] for hit in hits])
        spreads = [float(np.ptp(got - each.oracle(self._state, items))) for each in self._biases]
        nearest = int(np.argmin(spreads))
        if spreads[nearest] > SPREAD:
            off = ", ".join(f"{spread:.2g}" for spread in spreads)
            self.problem = f"an answer of {len(hits)} rows is by neither biases, but off by {off}"
        else:
            self.answers[nearest] += 1
