"""When something is due: at an interval, or by cron."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone, tzinfo

from apscheduler.triggers.base import BaseTrigger
from apscheduler.triggers.interval import IntervalTrigger
from cronsim import CronSim, CronSimError

from milvus_hubness.errors import InvalidParameter

UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}
_INTERVAL = re.compile(r"(\d+)\s*([smhd])")
_LONGEST = timedelta(days=366)


@dataclass(frozen=True)
class Timing:
    """text: as it was written. every: the interval; None for cron."""

    text: str
    every: timedelta | None

    @classmethod
    def parse(cls, text: str) -> Timing:
        """From an interval such as "60s", "5m", "2h" or "1d", or the five fields of cron, where weekday 0 is
        Sunday. Raises InvalidParameter."""
        text = text.strip()
        if interval := _INTERVAL.fullmatch(text):
            every = timedelta(**{UNITS[interval[2]]: int(interval[1])}) if len(interval[1]) < 9 else _LONGEST
            if not timedelta(seconds=1) <= every < _LONGEST:
                raise InvalidParameter(f"{text!r} is no interval between a second and a year")
            return cls(text, every)
        if len(text.split()) != 5:
            raise InvalidParameter(
                f'{text!r} is neither an interval, as "60s", "5m", "2h" or "1d", nor the five fields of '
                'cron, as "30 4 * * *": minute, hour, day of the month, month, weekday'
            )
        try:
            next(CronSim(text, datetime(2024, 1, 1, tzinfo=timezone.utc)))
        except CronSimError as error:
            raise InvalidParameter(f"{text!r} is no cron schedule: {str(error).lower()}") from None
        except StopIteration:
            raise InvalidParameter(f"{text!r} is a cron schedule that never comes") from None
        return cls(text, None)

    def trigger(self, zone: tzinfo) -> BaseTrigger:
        """zone: in which cron is meant."""
        if self.every is not None:
            return IntervalTrigger(seconds=int(self.every.total_seconds()), timezone=timezone.utc)
        return CronTrigger(self.text, zone)

    def __str__(self) -> str:
        return f"every {self.text}" if self.every is not None else f"at {self.text}"


class CronTrigger(BaseTrigger):  # type: ignore[misc]
    """Cron as Debian has it, which APScheduler's own is not: there weekday 0 is Monday, and of a day of the
    month and a weekday both must hold."""

    def __init__(self, expression: str, zone: tzinfo) -> None:
        self._expression, self._zone = expression, zone

    def get_next_fire_time(self, previous_fire_time: datetime | None, now: datetime) -> datetime | None:
        """The first time after the previous one, or without one, after now."""
        after = (previous_fire_time or now).astimezone(self._zone)
        return next(CronSim(self._expression, after), None)


def count_between(trigger: BaseTrigger, first: datetime, last: datetime) -> int:
    """How many times the trigger had come from `first`, itself one of them, to before `last`."""
    count, at = 0, first
    while at is not None and at < last:
        count += 1
        at = trigger.get_next_fire_time(at, last)
    return count
