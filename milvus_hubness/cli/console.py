"""Options, connection, output and errors that all commands share."""

from __future__ import annotations

import errno
import json
import os
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from pymilvus.exceptions import MilvusException
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from milvus_hubness.errors import (
    HubnessError,
    InvalidParameter,
    UnreadableFile,
    redacted,
    remember_secrets,
    remembered_secrets,
    secrets_in,
)
from milvus_hubness.estimators import NNN, Estimator, from_dict
from milvus_hubness.estimators.registry import METHODS, class_name, with_parameters
from milvus_hubness.operations.progress import Progress as Report
from milvus_hubness.stores import MilvusStore, connect

UNREMARKABLE = {"kernel": "dense", "iterations": 10, "tol": 0.001, "neighbors": None}
_SHOWN = object()

Method = Annotated[
    str | None, typer.Option("--method", help=f"One of {', '.join(METHODS)}.", show_default=False)
]
Params = Annotated[
    list[str] | None,
    typer.Option(
        "--param",
        help="NAME=VALUE, a parameter of the method; may be given again. tau is in units of the score, "
        "temperature in units of the spread of scores.",
        show_default=False,
    ),
]
K = Annotated[int | None, typer.Option("--k", help="NNN and CSLS: how many bank queries count.")]
Alpha = Annotated[float | None, typer.Option("--alpha", help="NNN: share of their mean score to subtract.")]


def chosen_estimator(
    method: str | None,
    params: list[str] | None,
    k: int | None,
    alpha: float | None,
    current: dict[str, Any] | None = None,
) -> Estimator | None:
    """Return the estimator of the options; None if they name none.

    current: the estimator in use, as its dictionary; its parameters apply unless the options name them. --k
    and --alpha without --method mean NNN. Raises InvalidParameter.
    """
    asked = {name: value for name, value in (("k", k), ("alpha", alpha)) if value is not None}
    asked |= pairs_of(params, "--param")
    if isinstance(asked.get("alpha"), int | float) and asked["alpha"] <= 0:
        raise InvalidParameter(f"alpha must be above 0, not {asked['alpha']!r}: at 0 nothing is corrected")
    if method is None and not asked:
        return None
    if method is None and current is not None:
        options = {"k": "--method nnn or csls", "alpha": "--method nnn"}
        for option in (name for name in asked if name in options and name not in current):
            raise InvalidParameter(
                f"--{option} needs {options[option]}: the estimator in use, {describe(current)}, has none"
            )
        return from_dict(with_parameters(current, asked))
    name = NNN.__name__ if method is None else class_name(method)
    return from_dict(with_parameters({"name": name}, asked))


def pairs_of(texts: list[str] | None, option: str) -> dict[str, Any]:
    """Return the names and values of NAME=VALUE texts. Raises InvalidParameter, which names the option."""
    found: dict[str, Any] = {}
    for text in texts or []:
        name, equals, value = text.partition("=")
        if not (name and equals):
            raise InvalidParameter(f"{option} takes NAME=VALUE, got {text!r}")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found


def describe(estimator: dict[str, Any]) -> str:
    """Return an estimator's dictionary in readable form, ½ NNN(k=16, alpha=0.75) + …, without constant
    parameters."""
    if "estimators" in estimator:
        shares = rounded_shares(estimator["weights"])
        pairs = zip(shares, estimator["estimators"], strict=True)
        return " + ".join(f"{share / 100:g} {_part(part)}" for share, part in pairs)
    shown = {name: value for name, value in estimator.items() if UNREMARKABLE.get(name, _SHOWN) != value}
    params = ", ".join(
        f"{name}={_number(each)}" for name, each in shown.items() if name not in ("name", "items")
    )
    return f"{estimator['name']}({params})"


def rounded_shares(weights: Sequence[float]) -> list[int]:
    """Return the weights of a Blend in hundredths, rounded so that they add up to 100."""
    shares = [int(100 * weight) for weight in weights]
    left = sorted(range(len(shares)), key=lambda i: shares[i] - 100 * weights[i])
    for i in left[: 100 - sum(shares)]:
        shares[i] += 1
    return shares


def _number(value: Any) -> Any:
    return f"{value:.3g}" if isinstance(value, float) else value


def _part(estimator: dict[str, Any]) -> str:
    return f"({describe(estimator)})" if "estimators" in estimator else describe(estimator)


URI_VARIABLES = ("MILVUS_HUBNESS_URI", "MILVUS_URI")
DATABASE_VARIABLE = "MILVUS_HUBNESS_DB"
TOKEN_VARIABLE = "MILVUS_HUBNESS_TOKEN"

Uri = Annotated[
    str,
    typer.Option(
        "--uri",
        envvar=[*URI_VARIABLES],
        help="Milvus server, or the path of a Milvus Lite .db file.",
        show_default=True,
    ),
]
Database = Annotated[
    str, typer.Option("--db", envvar=DATABASE_VARIABLE, help="Database name.", show_default=False)
]
TokenFile = Annotated[
    Path | None,
    typer.Option("--token-file", help=f"File that holds the token. Without it, ${TOKEN_VARIABLE} is used."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]

DEFAULT_URI = "http://localhost:19530"
AS_JSON = "--json"
FAILURE, USAGE = 1, 2
PAGE_BYTES = 64 * 1024
"""Minimum free space for a page, in bytes."""

_UsageError: type[Any] = typer.BadParameter.__mro__[2]
"""Click's ClickException, which typer keeps under a private name."""

out = Console(soft_wrap=False)
err = Console(stderr=True)


def open_token(token_file: Path | None) -> str:
    """Return the token from a file or the environment, never from an argument: arguments are readable in the
    process list."""
    if token_file is None:
        token = os.environ.get(TOKEN_VARIABLE, "")
    else:
        try:
            token = token_file.read_text().strip()
        except OSError as error:
            raise UnreadableFile(f"cannot read the token file {token_file}: {error.strerror}") from None
    remember_secrets(token)
    return token


def known_tokens() -> frozenset[str]:
    """Return the secrets that were opened: tokens, and passwords of addresses."""
    return remembered_secrets()


def open_store(uri: str, database: str, token_file: Path | None) -> MilvusStore:
    """Return the store of --uri."""
    remember_secrets(*secrets_in(uri))
    return MilvusStore(connect(uri, open_token(token_file), database))


@contextmanager
def progress_bars() -> Iterator[Report]:
    """Show a progress bar for each step on standard error, if that is a terminal."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(compact=True),
    )
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bars:
        tasks: dict[str, Any] = {}

        def report(doing: str, done: int, total: int) -> None:
            if doing not in tasks:
                tasks[doing] = bars.add_task(doing, total=total or None)
            bars.update(tasks[doing], completed=done, total=total or None)

        yield report


def show_json(data: Mapping[str, Any]) -> None:
    sys.stdout.write(redacted(json.dumps(data, ensure_ascii=False, default=str)) + "\n")


def show_facts(title: str, facts: Mapping[str, object]) -> None:
    """Print one fact per line."""
    table = Table(title=title, title_justify="left", title_style="bold", show_header=False, box=None)
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts.items():
        if value not in (None, "", [], ()):
            table.add_row(name, redacted(str(value)))
    out.print(table)


def run(app: typer.Typer, program: str = "milvus-hubness") -> NoReturn:
    """Run a command line and exit: 0 done, 1 failed, 2 wrong usage, 130 interrupted."""
    try:
        code = _exit_code(app, program)
        sys.stdout.flush()
    except OSError as error:
        code = FAILURE
        if problem := _output_problem():
            sys.stderr.write(f"{program}: cannot write the output: {problem}\n")
        else:
            show_unexpected_error(error, as_json=AS_JSON in sys.argv)
    sys.exit(code)


def _exit_code(app: typer.Typer, program: str) -> int:
    as_json = AS_JSON in sys.argv
    try:
        return int(app(standalone_mode=False) or 0)
    except _UsageError as error:
        if as_json:
            show_json({"error": {"type": type(error).__name__, "message": error.format_message()}})
        error.show()
        return int(error.exit_code)
    except typer.Abort:
        sys.stderr.write("Aborted!\n")
        return FAILURE
    except (HubnessError, MilvusException) as error:
        report_error(error, as_json=as_json, program=program)
        return USAGE if isinstance(error, InvalidParameter) else FAILURE
    except OSError:
        raise
    except Exception as error:
        show_unexpected_error(error, as_json=as_json)
        return FAILURE


def _output_problem() -> str | None:
    """Return why standard output cannot be written; None if it can. Its buffered output is dropped."""
    try:
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return error.strerror or str(error)
    return None


def check_writable(path: Path) -> None:
    """Check that a page can be written to this file, before the work for it begins. The content of the file
    stays; a device is only opened. Raises UnreadableFile."""
    existed = path.exists()
    try:
        with path.open("ab", buffering=0) as file:
            if path.is_file():
                size = file.tell()
                try:
                    written = file.write(bytes(PAGE_BYTES))
                finally:
                    file.truncate(size)
                if written < PAGE_BYTES:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:
        raise UnreadableFile(f"cannot write {path}: {error.strerror}") from None
    finally:
        if not existed:
            with suppress(OSError):
                path.unlink()


def write_page(path: Path, page: str) -> None:
    """Write a page. Raises UnreadableFile."""
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise UnreadableFile(f"cannot write {path}: {error.strerror}") from None


def report_error(error: Exception, *, as_json: bool, program: str = "milvus-hubness") -> None:
    """Print one line on standard error; with --json also an object on standard output."""
    message = _message(error)
    if as_json:
        show_json({"error": {"type": type(error).__name__, "message": message}})
    sys.stderr.write(f"{program}: {message}\n")


def show_unexpected_error(error: Exception, *, as_json: bool) -> None:
    """Print the traceback of an unexpected error; with --json also an object on standard output."""
    if as_json:
        show_json({"error": {"type": type(error).__name__, "message": _message(error)}})
    sys.stderr.write(redacted("".join(traceback.format_exception(error))))


def _message(error: Exception) -> str:
    return " ".join(redacted(str(getattr(error, "message", "") or error)).split())
