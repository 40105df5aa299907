"""What one look at a collection came to, as it is told, counted, kept and drawn."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Literal, get_args

from pydantic import BaseModel, ConfigDict

from milvus_hubness.jobs.upkeep import Action, Kept

Result = Literal["ok", "busy", "failed", "stopped"]
RESULTS: tuple[Result, ...] = ("ok", "busy", "failed", "stopped")
ACTIONS: tuple[str, ...] = get_args(Action)
UNFINISHED = "unfinished"


class Reconciliation(BaseModel):
    """at: when it was over. result: "busy" where another process was at work on the collection, "stopped"
    where this one was asked to end. action: as `Kept` has it, "unfinished" unless the result is "ok".
    message: why, or what went wrong. oldest_seconds: what the age of the biases had grown to since the look
    that is kept before this one. drift: its statistic. The other numbers are those of `Kept`."""

    model_config = ConfigDict(frozen=True)

    at: datetime
    result: Result
    action: str = UNFINISHED
    message: str = ""
    seconds: float = 0.0
    rows: int = 0
    pending: int = 0
    scanned: int = 0
    changed: int = 0
    skipped: int = 0
    epoch: int = 0
    bias_age_seconds: float | None = None
    oldest_seconds: float = 0.0
    skewness: dict[str, float] = {}
    overlap: float | None = None
    drift: float | None = None
    online_banks: dict[str, int] = {}
    write_intents: int = 0

    @classmethod
    def of(cls, kept: Kept) -> Reconciliation:
        return cls(
            at=now(),
            result="ok",
            action=kept.action,
            message=kept.reason,
            seconds=kept.seconds,
            rows=kept.rows,
            pending=kept.pending,
            scanned=kept.scanned,
            changed=kept.changed,
            skipped=kept.skipped,
            epoch=kept.epoch,
            bias_age_seconds=kept.bias_age_seconds,
            skewness=kept.skewness,
            overlap=kept.overlap,
            drift=kept.drift.statistic if kept.drift else None,
            online_banks=kept.online_banks,
            write_intents=kept.write_intents,
        )

    @property
    def is_eventful(self) -> bool:
        """Whether something was done, or would have been."""
        return self.result in ("ok", "stopped") and self.action != "none"

    @property
    def skewness_now(self) -> float | None:
        """Of the biases that searches use since; None where it was not measured."""
        return self.skewness.get("old" if self.action == "refused" else "new")


@dataclass(frozen=True)
class Course:
    """A look under threshold: what it is doing, and how many rows of how many that is done with."""

    since: datetime
    doing: str = ""
    done: int = 0
    total: int = 0


def now() -> datetime:
    return datetime.now(timezone.utc)
