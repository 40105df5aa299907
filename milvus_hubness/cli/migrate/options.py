"""The options that the migrate commands share."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from milvus_hubness.cli.console import (
    DEFAULT_URI,
    Alpha,
    Database,
    K,
    Method,
    Params,
    TokenFile,
    Uri,
    chosen_estimator,
    open_store,
    pairs_of,
)
from milvus_hubness.errors import InvalidParameter
from milvus_hubness.estimators import to_dict
from milvus_hubness.migration.ledger import Migration
from milvus_hubness.migration.plan import CLIENT_TTL, MigrationPlan, plan_migration
from milvus_hubness.operations.engines import Engine
from milvus_hubness.operations.reading import read_bank
from milvus_hubness.state import slots_for
from milvus_hubness.stores import MilvusStore


def spread(command: Callable[..., None]) -> Callable[..., None]:
    """Return `command` with each dataclass parameter replaced by the fields of the dataclass, for typer.

    Annotations come from `inspect.signature`: on Python 3.10, `get_type_hints` wraps those with the default
    None in Optional, which hides the content of Annotated.
    """
    parameters = inspect.signature(command, eval_str=True).parameters
    groups: dict[str, Any] = {
        name: each.annotation for name, each in parameters.items() if is_dataclass(each.annotation)
    }

    @wraps(command)
    def taken_apart(**given: Any) -> None:
        made = {
            name: group(**{field.name: given.pop(field.name) for field in fields(group)})
            for name, group in groups.items()
        }
        command(**given, **made)

    signature = inspect.Signature(list(_parameters(parameters, groups)))
    taken_apart.__dict__["__signature__"] = signature
    taken_apart.__annotations__ = {}
    return taken_apart


def _parameters(
    parameters: Mapping[str, inspect.Parameter], groups: dict[str, Any]
) -> Iterator[inspect.Parameter]:
    for parameter in parameters.values():
        kind = inspect.Parameter.KEYWORD_ONLY
        if parameter.name not in groups:
            yield parameter.replace(kind=kind)
            continue
        group = groups[parameter.name]
        annotations = get_type_hints(group, include_extras=True)
        for field in fields(group):
            default = inspect.Parameter.empty if field.default is MISSING else field.default
            yield inspect.Parameter(field.name, kind, default=default, annotation=annotations[field.name])


Name = Annotated[str, typer.Argument(help="The migration's source, its copy, or the alias of either.")]
Target = Annotated[
    str | None, typer.Option("--target", help="The copy of this migration, where the source has several.")
]
AsEvents = Annotated[
    bool, typer.Option("--json", help="Print one JSON object a line for each event, the result last.")
]
Postpone = Annotated[
    bool,
    typer.Option(
        "--postpone-cutover",
        help="Follow the source until released, by migrate release or POST /cutover, and only then switch.",
    ),
]


@dataclass(frozen=True)
class Connection:
    """The options that select the database."""

    uri: Uri = DEFAULT_URI
    db: Database = ""
    token_file: TokenFile = None

    def open(self) -> MilvusStore:
        return open_store(self.uri, self.db, self.token_file)


@dataclass(frozen=True)
class Switching:
    """The options that select the name that moves to the copy."""

    alias: Annotated[
        str | None, typer.Option(help="The application reads this alias: it is moved to the copy, or made.")
    ] = None
    rename: Annotated[
        bool,
        typer.Option(
            "--rename",
            help="The application reads the source's own name: the source becomes SOURCE__before_hubness, "
            "and its name an alias of the copy.",
        ),
    ] = False

    def __post_init__(self) -> None:
        if self.alias and self.rename:
            raise typer.BadParameter("give either --alias or --rename: one name is moved")

    @property
    def asked(self) -> bool:
        return bool(self.alias) or self.rename

    def unlike(self, migration: Migration) -> Iterator[str]:
        """Yield the options that name another switch than that of this migration."""
        switch = migration.switch
        if switch and self.alias and self.alias != switch.name:
            yield f"--alias {self.alias}"
        if switch and self.rename and not switch.kept_as:
            yield "--rename"


@dataclass(frozen=True)
class Measuring:
    """The options that measure the recall that the index loses with the augmented form."""

    measure: Annotated[
        bool,
        typer.Option(
            "--measure", help="Measure, on a sample, what recall the index loses and how to get it back."
        ),
    ] = False
    search_value: Annotated[
        int | None,
        typer.Option(min=1, help="ef or nprobe as the application searches. [default: Milvus's own]"),
    ] = None


@dataclass(frozen=True)
class Writers:
    """The options about clients that write during the migration."""

    no_writers: Annotated[
        bool,
        typer.Option(
            "--no-writers", help="Nobody writes to the collection meanwhile: no client need be told."
        ),
    ] = False
    client_ttl: Annotated[
        float,
        typer.Option(min=0, help="The longest state_ttl of a HubnessClient that writes, in seconds."),
    ] = CLIENT_TTL


@dataclass(frozen=True)
class Planning:
    """The options that define the copy."""

    bank: Annotated[
        str, typer.Option(help="Reference queries: .npy .npz .parquet .arrow file, or collection:NAME.")
    ] = ""
    bank_column: Annotated[
        str | None, typer.Option(help="Column, array or vector field that holds the queries.")
    ] = None
    bank_name: Annotated[
        str | None, typer.Option(help="Collection that keeps the bank. [default: SOURCE__bank]")
    ] = None
    field: Annotated[str | None, typer.Option(help="Vector field, where there are several.")] = None
    target: Annotated[str | None, typer.Option(help="Name of the copy. [default: SOURCE_hubness]")] = None
    target_bank: Annotated[
        str | None, typer.Option(help="Reference items, as --bank, for dualis, dbsn and --gate-targets.")
    ] = None
    method: Method = None
    param: Params = None
    k: K = None
    alpha: Alpha = None
    gate: Annotated[
        int | None,
        typer.Option(
            help="Correct only queries whose raw best item is among the GATE nearest of a bank query."
        ),
    ] = None
    gate_targets: Annotated[
        int | None,
        typer.Option(
            help="With --gate: also queries whose raw best item is among the GATE_TARGETS nearest of a "
            "--target-bank item."
        ),
    ] = None
    profiles: Annotated[
        int, typer.Option(help="Sets of biases to leave room for; refresh --profile adds the further ones.")
    ] = 1
    index_type: Annotated[
        str | None, typer.Option(help="Of the copy's index, HNSW or IVF_FLAT say. [default: the source's]")
    ] = None
    index_param: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=VALUE, a parameter of the copy's index, nlist=512 say; may be given again. "
            "[default: the source's]",
            show_default=False,
        ),
    ] = None
    restart: Annotated[
        bool, typer.Option("--restart", help="Drop what an unfinished migration left and begin anew.")
    ] = False
    force: Annotated[bool, typer.Option("--force", help="Migrate though tuning advises against it.")] = False

    def plan(
        self,
        store: MilvusStore,
        source: str,
        *,
        switching: Switching | None = None,
        measuring: Measuring | None = None,
        writers: Writers | None = None,
    ) -> MigrationPlan:
        """Return the plan of these options, from `plan_migration`."""
        estimator = chosen_estimator(self.method, self.param, self.k, self.alpha)
        switching, measuring = switching or Switching(), measuring or Measuring()
        writers = writers or Writers()
        return plan_migration(
            store,
            source,
            read_bank(store, self.bank, self.bank_column),
            estimator=estimator,
            target_bank=read_bank(store, self.target_bank, None) if self.target_bank else None,
            field=self.field,
            target=self.target,
            bank_collection=self.bank_name,
            alias=switching.alias,
            rename=switching.rename,
            gate=self.gate,
            gate_targets=self.gate_targets,
            profiles=self.profiles,
            index_type=self.index_type,
            index_params=pairs_of(self.index_param, "--index-param"),
            restart=self.restart,
            force=self.force,
            measure=measuring.measure or measuring.search_value is not None,
            search_value=measuring.search_value,
            client_ttl=0.0 if writers.no_writers else writers.client_ttl,
        )

    def expect_as_begun(
        self, store: MilvusStore, migration: Migration, switching: Switching | None = None
    ) -> None:
        """Check that no option asks for another copy or switch than those of a resumed migration, because it
        would have no effect. Raises InvalidParameter."""
        if odd := [*self._unlike(store, migration), *(switching.unlike(migration) if switching else ())]:
            raise InvalidParameter(
                f"{', '.join(odd)}: the migration of {migration.source!r} to {migration.target!r} was begun "
                f"otherwise and is {migration.phase!r}: leave the option out, or give another --target"
            )

    def _unlike(self, store: MilvusStore, migration: Migration) -> Iterator[str]:
        begun = migration.arguments
        index = begun.get("index") or {}
        estimator = chosen_estimator(self.method, self.param, self.k, self.alpha)
        bank = read_bank(store, self.bank, self.bank_column) if self.bank else None
        targets = read_bank(store, self.target_bank, None) if self.target_bank else None
        asked = {
            "--field": (self.field, migration.field),
            "--bank-name": (self.bank_name, migration.bank_collection),
            "--gate": (self.gate, begun.get("gate")),
            "--gate-targets": (self.gate_targets, begun.get("gate_targets")),
            "--profiles": (None if self.profiles == 1 else slots_for(self.profiles), begun.get("slots")),
            "--index-type": (self.index_type and self.index_type.upper(), index.get("index_type")),
            "--method": (estimator and to_dict(estimator), begun.get("estimator")),
            "--bank": (bank and bank.fingerprint, begun.get("bank")),
            "--target-bank": (targets and targets.fingerprint, begun.get("target_bank")),
        }
        yield from (name for name, (now, then) in asked.items() if now is not None and now != then)
        params = index.get("index_params", {})
        for name, value in pairs_of(self.index_param, "--index-param").items():
            if str(params.get(name)) != str(value):
                yield f"--index-param {name}"


RowsPerSecond = Annotated[float | None, typer.Option(help="Write no faster than this.")]
BytesPerSecond = Annotated[float | None, typer.Option(help="Write no more vector bytes than this.")]
ChunkSeconds = Annotated[
    float | None, typer.Option(help="How long one write request should take: its rows are chosen so.")
]


@dataclass(frozen=True)
class Pace:
    """The options that limit the pace of the copy and its load on the server."""

    rows_per_second: RowsPerSecond = None
    bytes_per_second: BytesPerSecond = None
    chunk_seconds: ChunkSeconds = None
    max_load: Annotated[
        str | None, typer.Option(help="Shell command; copying rests as long as it fails.", metavar="CMD")
    ] = None
    critical_load: Annotated[
        str | None, typer.Option(help="Shell command; when it fails, the migration stops.", metavar="CMD")
    ] = None
    load_every: Annotated[
        float, typer.Option(min=0.1, help="Seconds between two runs of the load commands.")
    ] = 5.0
    bulk_folder: Annotated[
        str | None,
        typer.Option(
            help="Copy by Parquet files that the server imports from this folder; it calls it REMOTE, or the "
            "same. Needs --no-writers and milvus-hubness[bulk].",
            metavar="LOCAL[=REMOTE]",
        ),
    ] = None
    engine: Annotated[
        Engine,
        typer.Option(
            help="server: nnn and csls by the database's own search over the bank; ray: by the workers of "
            "the Ray cluster of $RAY_ADDRESS, or of all local cores."
        ),
    ] = "local"


@dataclass(frozen=True)
class Watching:
    """The options that report and control a running migration."""

    control: Annotated[
        Path | None,
        typer.Option(help="JSON file that steers this, see migrate pause; it need not be there yet."),
    ] = None
    http: Annotated[
        str | None,
        typer.Option(help="Serve /status, /metrics, /pause … on this loopback address.", metavar="HOST:PORT"),
    ] = None
    on: Annotated[
        list[str] | None,
        typer.Option(
            help="Shell command to run at an event; may be given again. A before-… that fails stops the "
            "migration.",
            metavar="EVENT=CMD",
        ),
    ] = None
    metrics_file: Annotated[
        Path | None, typer.Option(help="Keep the metrics in this .prom file, for node_exporter.")
    ] = None
