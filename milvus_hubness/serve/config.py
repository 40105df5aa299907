"""The configuration of the service: the tables of hubness.toml and their schedules."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone, tzinfo
from typing import Annotated, Any
from urllib.parse import urlsplit
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from apscheduler.triggers.base import BaseTrigger
from apscheduler.triggers.interval import IntervalTrigger
from cronsim import CronSim, CronSimError
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
)

from milvus_hubness.errors import InvalidParameter
from milvus_hubness.estimators import Estimator, from_dict
from milvus_hubness.estimators.registry import class_name
from milvus_hubness.refresh.plan import DEFAULT_TOLERANCE, Live

UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}
_INTERVAL = re.compile(r"(\d+)\s*([smhd])")
_LONGEST = timedelta(days=366)


@dataclass(frozen=True)
class Timing:
    """A schedule. text: as in the file. every: the interval; None for cron."""

    text: str
    every: timedelta | None

    @classmethod
    def parse(cls, text: str) -> Timing:
        """Parse an interval such as "60s", "5m", "2h" or "1d", or the five fields of cron, where weekday 0 is
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
        """Return the trigger of this schedule. zone: the time zone of cron."""
        if self.every is not None:
            return IntervalTrigger(seconds=int(self.every.total_seconds()), timezone=timezone.utc)
        return CronTrigger(self.text, zone)

    def __str__(self) -> str:
        return f"every {self.text}" if self.every is not None else f"at {self.text}"


class CronTrigger(BaseTrigger):  # type: ignore[misc]
    """A cron trigger with Debian's rules. APScheduler's own trigger differs: weekday 0 is Monday there, and
    if both a day of the month and a weekday are given, both must hold."""

    def __init__(self, expression: str, zone: tzinfo) -> None:
        self._expression, self._zone = expression, zone

    def get_next_fire_time(self, previous_fire_time: datetime | None, now: datetime) -> datetime | None:
        """Return the first time after the previous one or, without one, after now."""
        after = (previous_fire_time or now).astimezone(self._zone)
        return next(CronSim(self._expression, after), None)


def count_between(trigger: BaseTrigger, first: datetime, last: datetime) -> int:
    """Return how many times the trigger fires from `first`, which counts, to before `last`."""
    count, at = 0, first
    while at is not None and at < last:
        count += 1
        at = trigger.get_next_fire_time(at, last)
    return count


DEFAULT_LISTEN = "127.0.0.1:9108"


def _without_password(uri: str) -> str:
    if "@" in urlsplit(uri).netloc:
        raise ValueError("holds a user or a password: keep them in token_file or $MILVUS_HUBNESS_TOKEN")
    return uri


def _address(text: str) -> str:
    from milvus_hubness.operations.http_server import parse_address

    host, _ = parse_address(text)
    if not host:
        raise ValueError(
            f'{text!r} names no host: "127.0.0.1{text}" is this machine only, "0.0.0.0{text}" any'
        )
    return text


def _zone(name: str) -> str:
    try:
        ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise ValueError(f'no time zone {name!r}: it is written as in "Europe/Berlin" or "UTC"') from None
    return name


def _timing(value: Any) -> Any:
    if not isinstance(value, str | Timing):
        raise ValueError(f'must be a text, as "60s" or "30 4 * * *", not {value!r}')
    return Timing.parse(value) if isinstance(value, str) else value


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


Name = Annotated[str, Field(min_length=1)]
When = Annotated[Timing, BeforeValidator(_timing)]
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class _Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class ServerTable(_Table):
    """The database. A missing key takes its value from the environment, as in the other commands."""

    uri: Annotated[Name, AfterValidator(_without_password)] | None = None
    db: str | None = None
    token_file: Name | None = None


class HttpTable(_Table):
    """The HTTP endpoint. listen: HOST:PORT of the page, the metrics and the probes; by default on this
    machine's loopback."""

    listen: Annotated[str, AfterValidator(_address)] = DEFAULT_LISTEN


class CollectionTable(_Table):
    """A bias profile to keep up to date.

    name: of the collection, or an alias. field, profile, tolerance, bank, bank_column, target_bank: as in
    `refresh`; paths of files are relative to the folder of the configuration. method, params: None for
    the current estimator. live, client_ttl: as in `RefreshOptions`. rows_per_second: maximum rate of
    written rows; None for no limit. pairs: a file of labelled queries for the evaluation. schedule: when
    rows without a bias get one. full_schedule: when the bank is checked; if the bank or the method has
    changed, all biases are computed. This check also runs at the start. pending_share: between these
    times, rows without a bias get one as soon as they are at least this share of all rows.
    """

    name: Name
    field: Name | None = None
    profile: Name | None = None
    bank: Name | None = None
    bank_column: Name | None = None
    target_bank: Name | None = None
    method: Annotated[Name, AfterValidator(lambda method: class_name(method) and method)] | None = None
    params: dict[str, Any] = Field(default_factory=dict)
    tolerance: Annotated[float, Field(ge=0, allow_inf_nan=False)] = DEFAULT_TOLERANCE
    schedule: When = Timing.parse("60s")
    full_schedule: When = Timing.parse("0 3 * * *")
    live: Live = "never"
    pairs: Name | None = None
    rows_per_second: Rate | None = None
    client_ttl: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    pending_share: Annotated[float, Field(gt=0, le=1)] | None = None

    @field_validator("bank_column")
    @classmethod
    def _has_a_bank(cls, column: str | None, info: ValidationInfo) -> str | None:
        if column is not None and info.data.get("bank", column) is None:
            raise ValueError("belongs to a bank: name one, or leave this out")
        return column

    @field_validator("live")
    @classmethod
    def _has_no_bank(cls, live: Live, info: ValidationInfo) -> Live:
        if live != "never" and info.data.get("bank") is not None:
            raise ValueError("takes sampled queries into the bank in use: leave bank out, or this")
        return live

    @field_validator("params")
    @classmethod
    def _fit_the_method(cls, params: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        if params and "method" in info.data:
            if info.data["method"] is None:
                raise ValueError("belong to a method: name one, or leave them out")
            from_dict({"name": class_name(info.data["method"]), **params})
        return params

    def estimator(self) -> Estimator | None:
        """Return the estimator of method and params; None for the current one. Raises InvalidParameter."""
        return from_dict({"name": class_name(self.method), **self.params}) if self.method else None

    @property
    def label(self) -> str:
        """The collection and, if given, its field and profile: products/vector/image."""
        return "/".join(filter(None, (self.name, self.field, self.profile)))


class ServeConfig(_Table):
    """The whole configuration. timezone: the time zone of cron schedules."""

    timezone: Annotated[str, AfterValidator(_zone)] = "UTC"
    server: ServerTable = ServerTable()
    http: HttpTable = HttpTable()
    collection: Annotated[tuple[CollectionTable, ...], BeforeValidator(_as_tuple), Field(min_length=1)]

    @property
    def zone(self) -> ZoneInfo:
        return ZoneInfo(self.timezone)

    def twins(self) -> Iterator[tuple[int, int]]:
        """Yield the number of each collection that repeats an earlier one, and the number of the earlier
        one."""
        seen: dict[tuple[str | None, ...], int] = {}
        for number, each in enumerate(self.collection):
            first = seen.setdefault((each.name, each.field, each.profile), number)
            if first != number:
                yield number, first
