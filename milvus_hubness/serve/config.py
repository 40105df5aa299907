"""The configuration of the service: the tables of hubness.toml and their schedules."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone, tzinfo
from functools import partial
from typing import Annotated, Any
from urllib.parse import urlsplit
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

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

from milvus_hubness.basics.defaults import (
    DEFAULT_MEASURE,
    HUB_SCAN_ROWS,
    KEEP_FORMER,
    REFIT_SHARE,
)
from milvus_hubness.correction.banks.bank import QueryBank
from milvus_hubness.correction.banks.stored import Key
from milvus_hubness.correction.estimators import Estimator, from_dict
from milvus_hubness.correction.estimators.base import class_name
from milvus_hubness.correction.prior import LARGEST_WEIGHT
from milvus_hubness.errors import InvalidInput, InvalidParameter
from milvus_hubness.jobs.common.gallery import key_column_of
from milvus_hubness.jobs.common.inputs import COLLECTION_PREFIX, read_bank
from milvus_hubness.jobs.common.judgements import Judgements, read_clicks
from milvus_hubness.jobs.common.priors import PriorLike
from milvus_hubness.jobs.common.progress import Throttle
from milvus_hubness.jobs.common.recipe import Recipe
from milvus_hubness.jobs.common.samples import SAMPLES
from milvus_hubness.jobs.refresh.options import RefreshOptions
from milvus_hubness.jobs.store.protocols import Store
from milvus_hubness.quality.retrieval import Measure

UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}
"""The units of intervals, and the arguments of `timedelta` for them."""


@dataclass(frozen=True)
class Timing:
    """A schedule."""

    text: str
    """The schedule as it is in the file."""
    every: timedelta | None
    """The interval; None for cron."""

    @classmethod
    def parse(cls, text: str) -> Timing:
        """Parse an interval such as "60s", "5m", "2h" or "1d", or the five fields of cron.

        Raises InvalidParameter.
        """
        text = text.strip()
        if interval := re.fullmatch(r"(\d+)\s*([smhd])", text):
            # Cut off before `timedelta`, which raises an error of its own for a large number.
            every = timedelta(**{UNITS[interval[2]]: min(int(interval[1]), 10**8)})
            if not timedelta(seconds=1) <= every < timedelta(days=366):
                raise InvalidParameter(f"the interval {text!r} must be from a second to a year")
            return cls(text, every)

        if len(text.split()) != 5:
            raise InvalidParameter(
                f'{text!r} is neither an interval, such as "60s", "5m", "2h" or "1d", nor the five '
                'fields of cron, such as "30 4 * * *": minute, hour, day of the month, month, '
                "weekday"
            )

        # CronSim reads some schedules that no calendar has, such as 30 February: the first time is
        # what shows it.
        try:
            next(CronSim(text, datetime(2024, 1, 1, tzinfo=timezone.utc)))
        except CronSimError as error:
            raise InvalidParameter(
                f"{text!r} is not a cron schedule: {str(error).lower()}"
            ) from None
        except StopIteration:
            raise InvalidParameter(f"the cron schedule {text!r} never fires") from None

        return cls(text, None)

    def after(self, moment: datetime, zone: tzinfo) -> datetime:
        """Return the next time after this one, in UTC unless it is an interval.

        zone: the time zone of cron, in which weekday 0 is Sunday, and of a day of the month and a
        weekday one must hold.
        """
        if self.every is not None:
            return moment + self.every
        next_time: datetime = next(CronSim(self.text, moment.astimezone(zone)))
        # Times of one zone compare by the clock on the wall, which shows an hour twice in autumn.
        return next_time.astimezone(timezone.utc)

    def __str__(self) -> str:
        return f"every {self.text}" if self.every is not None else f"at {self.text}"


CLOCK_STEP = timedelta(minutes=1)
"""By how much the clock may be set back without new times: by less, cron would run twice."""


class Calendar:
    """The next times of tasks. zone: the time zone of cron."""

    def __init__(self, timings: Mapping[str, Timing], zone: tzinfo) -> None:
        self._timings = timings
        self._zone = zone

        self.next_times: dict[str, datetime] = {}
        """The next time of each task; empty before `begin`."""

        self._last = datetime.min.replace(tzinfo=timezone.utc)

    def begin(self, moment: datetime) -> None:
        self._last = moment
        self.next_times = {
            task: timing.after(moment, self._zone) for task, timing in self._timings.items()
        }

    def passed(self, moment: datetime) -> dict[str, int]:
        """Return how many times of each task have passed by this moment, since the last call.

        If the clock was set back since, all times are counted from this moment.
        """
        if self._last - moment > CLOCK_STEP:
            self.begin(moment)
        self._last = moment

        counts: dict[str, int] = {}
        for task in self.next_times:
            while self.next_times[task] <= moment:
                counts[task] = counts.get(task, 0) + 1
                self.next_times[task] = self._timings[task].after(self.next_times[task], self._zone)
        return counts


def _from_folder(path: str, info: ValidationInfo) -> str:
    """Return a path in the folder of the configuration; the samples, collections and addresses as they
    are.
    """
    # Without a context the table was made by a program, whose paths are its own.
    if (
        info.context is None
        or path == SAMPLES
        or path.startswith(COLLECTION_PREFIX)
        or "://" in path
    ):
        return path
    return str(info.context / path)


def _without_password(uri: str) -> str:
    if "@" in urlsplit(uri).netloc:
        raise ValueError(
            "holds a user or a password: keep them in token_file or $MILVUS_HUBNESS_TOKEN"
        )

    return uri


def _address(text: str) -> str:
    # Only a configuration with an address loads the web server.
    from milvus_hubness.serve.http_server import parse_address

    host, _ = parse_address(text)
    # An empty host would mean any: nobody opens the page to a network by leaving something out.
    if not host:
        raise ValueError(
            f'{text!r} has no host: write "127.0.0.1{text}" for this machine only, or '
            f'"0.0.0.0{text}" for any'
        )

    return text


def _zone(name: str) -> str:
    try:
        ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise ValueError(f'no time zone {name!r}: write it as "Europe/Berlin" or "UTC"') from None
    return name


def _measure(name: str) -> str:
    try:
        return str(Measure.of(name))
    except InvalidInput as error:
        raise ValueError(str(error)) from None


def _timing(value: object) -> Timing:
    if not isinstance(value, str):
        raise ValueError(f'must be a text, such as "60s" or "30 4 * * *", not {value!r}')
    return Timing.parse(value)


Name = Annotated[str, Field(min_length=1)]
FilePath = Annotated[Name, AfterValidator(_from_folder)]
When = Annotated[Timing, BeforeValidator(_timing)]
Method = Annotated[Name, AfterValidator(lambda method: class_name(method) and method)]
"""`class_name` raises for a method that does not exist."""


class _Table(BaseModel):
    # Strict, because a silently converted value is one that its writer did not mean.
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class ServerTable(_Table):
    """The database.

    A missing key takes its value from the environment, as in the other commands.
    """

    uri: Annotated[FilePath, AfterValidator(_without_password)] | None = None
    token_file: FilePath | None = None
    ca: FilePath | None = None
    """Authorities that sign the server's certificate, in PEM; None for those of the system."""
    cert: FilePath | None = None
    """Certificate of the service, for a server that wants one."""
    key: FilePath | None = None
    """Key of `cert`."""


class HttpTable(_Table):
    """The HTTP endpoint."""

    listen: Annotated[str, AfterValidator(_address)] = "127.0.0.1:9108"
    """HOST:PORT of the page, the metrics and the probes."""


class CollectionTable(_Table):
    """A bias profile to keep up to date.

    `field`, `profile`, `client_ttl`, `rename`, `keep_former`
    and `restart_ttl` are those of `RefreshOptions`.
    """

    name: Name
    """The collection, or an alias."""
    field: Name | None = None
    profile: Name | None = None
    bank: FilePath | None = None
    """A file, collection:NAME, or samples for the newest queries that clients have sampled."""
    bank_column: Name | None = None
    """The array, column or vector field of `bank` that holds the queries, as in `read_bank`."""
    target_bank: FilePath | None = None
    """A file, or collection:NAME."""
    method: Method | None = None
    """The alias of the estimator; None for the current estimator."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Parameters of `method`."""
    override: bool = False
    """Whether `method` and `params` may differ from
    the verdict of tune, which is refused otherwise."""
    prior: Name | None = None
    """A field of the rows that says how often each is wanted; None for the present prior."""
    prior_from: FilePath | None = None
    """In place of `prior`: a file of pairs, in which each row is counted."""
    prior_weight: Annotated[float, Field(ge=0, le=LARGEST_WEIGHT, allow_inf_nan=False)] | None = (
        None
    )
    """The weight of the prior, in units of the spread of scores; None as tune chose."""
    fill: When = Timing.parse("60s")
    """When rows without a bias beside the vectors get one."""
    refresh: When = Timing.parse("0 3 * * *")
    """When, as at the start, the bank is checked and the values of a prior are read; if one of
    them or the method has changed, all biases are computed."""
    refit_share: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] = REFIT_SHARE
    """Share of the rows that are new or changed since the bank was fitted: from there on, at
    `refresh`, the sampled queries become the bank and all biases are computed; where these are
    too few, a new bank is due."""
    hub_scan_rows: Annotated[int, Field(ge=0)] = HUB_SCAN_ROWS
    """Rows up to which the collection is scanned for planted hubs at `refresh`; 0 for never."""
    pairs: FilePath | None = None
    """Queries with right rows for the evaluation: a file, or a BEIR folder."""
    pairs_queries: FilePath | None = None
    """The vectors of the queries that `pairs` names by id."""
    key_column: Name | None = None
    """The column with the keys in `pairs` and `prior_from`, if it has no usual name."""
    measure: Annotated[str, AfterValidator(_measure)] = DEFAULT_MEASURE
    """What the evaluation measures on `pairs`: R@k, MRR, MAP or nDCG@k."""
    queries: FilePath | None = None
    """Real queries without labels, for the verdict on `bank` and the
    evaluation: a file, or collection:NAME."""
    rows_per_second: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Maximum rows written per second."""
    client_ttl: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    rename: bool = False
    keep_former: Annotated[int, Field(ge=0)] = KEEP_FORMER
    restart_ttl: bool = False

    # A validator sees the fields above its own. A faulty one is absent from `info.data`; the defaults
    # below keep its fault from being reported twice.
    @field_validator("bank_column")
    @classmethod
    def _has_a_bank(cls, column: str | None, info: ValidationInfo) -> str | None:
        if column is not None and info.data.get("bank", column) is None:
            raise ValueError("needs a bank: add the key bank, or remove this one")
        return column

    @field_validator("prior_from")
    @classmethod
    def _is_the_only_source(cls, path: str | None, info: ValidationInfo) -> str | None:
        if path is not None and info.data.get("prior") is not None:
            raise ValueError("is another source than prior: remove one of the two keys")
        return path

    @field_validator("pairs_queries")
    @classmethod
    def _has_pairs(cls, path: str | None, info: ValidationInfo) -> str | None:
        if path is not None and info.data.get("pairs", path) is None:
            raise ValueError("has the vectors for pairs: add the key pairs, or remove this one")
        return path

    @field_validator("measure")
    @classmethod
    def _has_right_answers(cls, measure: str, info: ValidationInfo) -> str:
        if info.data.get("pairs", measure) is None:
            raise ValueError("is measured on pairs: add the key pairs, or remove this one")
        return measure

    @field_validator("key_column")
    @classmethod
    def _has_keys(cls, column: str | None, info: ValidationInfo) -> str | None:
        files = (info.data.get(name, column) for name in ("pairs", "prior_from"))
        if column is not None and not any(files):
            raise ValueError("is of pairs or prior_from: add one of these keys, or remove this one")
        return column

    @field_validator("params")
    @classmethod
    def _fit_the_method(cls, params: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        if params and "method" in info.data:
            if info.data["method"] is None:
                raise ValueError("needs a method: add the key method, or remove this one")
            # It raises for parameters that the method does not have.
            from_dict({"name": class_name(info.data["method"]), **params})
        return params

    @field_validator("override")
    @classmethod
    def _has_a_method(cls, override: bool, info: ValidationInfo) -> bool:
        if override and info.data.get("method", "") is None:
            raise ValueError("needs a method: add the key method, or remove this one")
        return override

    def estimator(self) -> Estimator | None:
        """Return the estimator of method and params; None for the current one.

        Raises InvalidParameter.
        """
        if not self.method:
            return None
        return from_dict({"name": class_name(self.method), **self.params})

    def refresh_options(self, store: Store, *, full: bool) -> RefreshOptions:
        """Return the options of a refresh: of rows without a bias, or full.

        Raises as `read_bank` does.
        """
        # The field of a prior is not read again as often as rows without a bias are looked for.
        options: dict[str, Any] = {"refit": "pending"}
        if self.client_ttl is not None:
            options["client_ttl"] = self.client_ttl
        # Rows without a bias get one from the bank in use, so only a full refresh reads the files.
        if full:
            options |= {
                "recipe": Recipe(
                    self._vectors(store, self.bank, self.bank_column),
                    target_bank=self._vectors(store, self.target_bank),
                    estimator=self.estimator(),
                    prior=self._prior(),
                    prior_weight=self.prior_weight,
                    queries=self._vectors(store, self.queries),
                ),
                "judgements": self._judgements(),
                "measure": self.measure,
                "refit": self.refit_share,
            }

        return RefreshOptions(
            field=self.field,
            profile=self.profile,
            rename=self.rename,
            keep_former=self.keep_former,
            restart_ttl=self.restart_ttl,
            throttle=Throttle(self.rows_per_second),
            **options,
        )

    def _vectors(
        self, store: Store, named: str | None, column: str | None = None
    ) -> QueryBank | str | None:
        """Return the vectors of a file or a collection; the samples as they are, which a refresh reads.

        Raises as `read_bank` does.
        """
        return named if named in (None, SAMPLES) else read_bank(store, named, column)

    def _prior(self) -> PriorLike | None:
        """Return the field, or the clicks, of the prior. Raises as `read_clicks` does."""
        return clicks() if (clicks := self.reads_clicks) else self.prior

    def _judgements(self) -> Judgements | None:
        """Return the queries with right rows, if there are some. Raises as `Judgements.load`."""
        return pairs() if (pairs := self.reads_pairs) else None

    @property
    def reads_clicks(self) -> partial[dict[Key, float]] | None:
        """The call that reads `prior_from`; None without it."""
        if self.prior_from is None:
            return None
        return partial(_clicks_of, self.prior_from, self.key_column, self.pairs)

    @property
    def reads_pairs(self) -> partial[Judgements] | None:
        """The call that reads `pairs`; None without them."""
        if self.pairs is None:
            return None
        return partial(_pairs_of, self.pairs, self.pairs_queries, self.key_column, self.prior_from)

    @property
    def label(self) -> str:
        """The collection and, if given, its field and profile: products/vector/image, products//image."""
        # An empty place for the field: a profile may have the name of a field.
        return "/".join((self.name, self.field or "", self.profile or "")).rstrip("/")


def _clicks_of(path: str, key_column: str | None, pairs: str | None) -> dict[Key, float]:
    return read_clicks(path, key_column_of(path, key_column, pairs))


def _pairs_of(
    path: str, queries: str | None, key_column: str | None, clicks: str | None
) -> Judgements:
    column = key_column_of(path, key_column, clicks)
    return Judgements.load(path, queries, key_column=column)


class ServeConfig(_Table):
    """The whole configuration."""

    timezone: Annotated[str, AfterValidator(_zone)] = "UTC"
    """The time zone of cron schedules."""
    server: ServerTable = ServerTable()
    http: HttpTable = HttpTable()
    collection: Annotated[list[CollectionTable], Field(min_length=1)]
