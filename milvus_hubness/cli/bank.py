"""The commands milvus-hubness bank."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from milvus_hubness.cli import console, options
from milvus_hubness.cli.command_line import command_line
from milvus_hubness.cli.status import show_samplings

Collection = Annotated[str, typer.Argument(help="Collection or its alias, corrected or not.")]


@dataclass(frozen=True)
class Settings:
    """The settings of a sampling; those that are not given stay."""

    rate: Annotated[float | None, "Share of live queries that clients sample. [default: 0.01]"] = (
        None
    )
    size: Annotated[int | None, "Largest number of samples. [default: 10,000]"] = None

    @property
    def given(self) -> dict[str, float]:
        """Those that were given, by the names of `start_sampling`."""
        return {name: value for name, value in vars(self).items() if value is not None}


def sample(
    collection: Collection,
    connection: options.Connection,
    settings: Settings,
    off: Annotated[bool, "Turn it off, and drop the samples."] = False,
    field: options.Field = None,
    as_json: options.AsJson = False,
) -> None:
    """Turn the sampling of live queries on in clients and proxies, change its settings, or turn it off.

    The newest samples are kept, and --bank samples takes them as the bank. They hold vectors and
    times, no texts, filters or users.

    Example: milvus-hubness bank sample products --rate 0.01
    """
    if not off:
        _start(collection, connection, field, settings, as_json=as_json)
    elif settings.given:
        raise typer.BadParameter("--off takes neither --rate nor --size: leave them out")
    else:
        _stop(collection, connection, field, as_json=as_json)


def export(
    collection: Collection,
    file: Annotated[Path, typer.Argument(help=".npy, or .npz with the times of the queries too.")],
    connection: options.Connection,
    field: options.Field = None,
    as_json: options.AsJson = False,
) -> None:
    """Write the sampled queries to a file that --bank takes.

    Example: milvus-hubness bank export products queries.npz
    """
    from milvus_hubness.basics.files.writing import check_writable
    from milvus_hubness.jobs.common.samples import write_samples

    check_writable(file)
    count = write_samples(connection.open(), collection, file, field=field)
    result = {"file": str(file), "queries": count}
    console.show_result(as_json, result, lambda: console.say(f"Wrote {count:,} queries to {file}."))


app = command_line(
    "Keep samples of the queries that users send, as reference queries and to judge with."
    "\n\nExample: milvus-hubness bank sample products --rate 0.01",
    sample,
    export,
)


def _start(
    collection: str,
    connection: options.Connection,
    field: str | None,
    settings: Settings,
    *,
    as_json: bool,
) -> None:
    from milvus_hubness.jobs.refresh.sampling import start_sampling

    status = start_sampling(connection.open(), collection, field=field, **settings.given)
    result = {"samplings": [status.to_dict()]}
    console.show_result(as_json, result, lambda: show_samplings(collection, [status]))


def _stop(
    collection: str, connection: options.Connection, field: str | None, *, as_json: bool
) -> None:
    from milvus_hubness.jobs.refresh.sampling import stop_sampling

    stopped = stop_sampling(connection.open(), collection, field=field)
    result: dict[str, Any] = {"stopped": stopped.model_dump() if stopped else None}
    text = "Turned off." if stopped else f"{collection!r} is not sampled."
    console.show_result(as_json, result, lambda: console.say(text))
