"""Output, progress bars, errors and exit codes of all commands."""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from milvus_hubness.cli.extras import with_all_extras
from milvus_hubness.defaults import URI_VARIABLES
from milvus_hubness.errors import (
    HubnessError,
    InvalidParameter,
    MissingExtra,
    UnreadableFile,
    UnsupportedVersion,
    naming_extras,
    redacted,
)
from milvus_hubness.requirements import unsupported_libraries
from milvus_hubness.texts import agreement_sentence, describe

if TYPE_CHECKING:
    from milvus_hubness.operations.progress import Progress as Report

AS_JSON = "--json"
FAILURE, USAGE, REFUSED, TERMINATED = 1, 2, 3, 143
"""Exit codes: an error; wrong usage; refused by measurement, be it new biases that are worse or a diagnosis beyond its
thresholds; SIGTERM."""
PAGE_BYTES = 64 * 1024
"""Minimum free space for a page, in bytes."""

_UsageError: type[Any] = typer.BadParameter.__mro__[2]
"""Click's ClickException, which typer keeps under a private name."""

out = Console()
err = Console(stderr=True)


@contextmanager
def progress_bars() -> Iterator[Report]:
    """Show a progress bar for the current step on standard error, if that is a terminal, below all that is printed."""
    if not err.is_terminal:
        yield lambda doing, done, total: None
        return

    from milvus_hubness.cli.bars import Bar

    with Bar(err) as bar:
        yield bar


def show_json(data: Mapping[str, Any]) -> None:
    sys.stdout.write(redacted(json.dumps(data, ensure_ascii=False, default=str)) + "\n")


def show_result(as_json: bool, result: Mapping[str, Any], show: Callable[[], object]) -> None:
    """Print a result as JSON or, by calling `show`, as text."""
    if as_json:
        show_json(result)
    else:
        show()


def show_facts(title: str, facts: Mapping[str, object]) -> None:
    """Print one fact per line, without the empty ones."""
    texts = {name: redacted(str(value)) for name, value in facts.items() if value not in (None, "", [], ())}
    table = Table(title=escape(title), title_justify="left", title_style="bold", show_header=False, box=None)
    table.add_column(style="cyan", width=max(map(len, texts), default=1))
    table.add_column(overflow="fold")
    for row in texts.items():
        table.add_row(*map(escape, row))
    out.print(table)


def show_table(title: str | None, headings: Sequence[str], rows: Iterable[Sequence[str]], texts: int = 1) -> None:
    """Print rows of texts and numbers. texts: number of columns with texts, which come first."""
    table = Table(box=None, title=title and escape(title), title_justify="left")
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="left" if number < texts else "right", overflow="fold")
    for row in rows:
        table.add_row(*map(escape, row))
    out.print(table)


def bank_words(plan: Mapping[str, Any]) -> dict[str, object]:
    """Return the bank, the estimator and the gate of a plan in words."""
    bank, estimator = plan["bank"], describe(plan["estimator"])
    return {
        "bank": f"{bank['queries']:,} queries of {bank['source']}, stored as {bank['collection']}",
        "estimator": f"{estimator}, strength {plan['strength']:g}",
        "agreement": agreement_sentence(plan["estimator"]),
        "gate": plan["gate"],
        "gate over targets": plan["gate_targets"],
    }


@contextmanager
def on_signals(handle: Callable[[int], None]) -> Iterator[None]:
    """Call `handle` with the number of each SIGTERM or SIGINT within the block."""
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.signal(number, lambda received, frame: handle(received)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run(app: typer.Typer, program: str = "milvus-hubness") -> NoReturn:
    """Run a command line and exit: 0 done, 1 failed, 2 wrong usage, 3 refused by measurement, 130 interrupted."""
    try:
        with _logging(program):
            code = _exit_code(app, program)
        sys.stdout.flush()
    except OSError as error:
        code = FAILURE
        try:
            sys.stdout.flush()
            report_error(error, as_json=AS_JSON in sys.argv, unexpected=True)
        except OSError as problem:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # The buffered output is dropped.
            sys.stderr.write(f"{program}: cannot write the output: {problem.strerror or problem}\n")
    sys.exit(code)


class _Lines(logging.Handler):
    """Prints each record of the log as a line on standard error, as errors are printed."""

    def __init__(self, program: str) -> None:
        super().__init__()
        self._program = program

    def emit(self, record: logging.LogRecord) -> None:
        message = " ".join(redacted(record.getMessage()).split())
        sys.stderr.write(f"{self._program}: {message}\n")
        sys.stderr.flush()


@contextmanager
def _logging(program: str) -> Iterator[None]:
    """Print what the package logs, such as what a job waits for, within the block."""
    logger, handler = logging.getLogger("milvus_hubness"), _Lines(program)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def _exit_code(app: typer.Typer, program: str) -> int:
    as_json = AS_JSON in sys.argv
    try:
        with naming_extras():
            return int(app(standalone_mode=False) or 0)
    except _UsageError as error:
        if as_json:
            show_json({"error": {"type": type(error).__name__, "message": error.format_message()}})
        error.show()
        return int(error.exit_code)
    except typer.Abort:
        sys.stderr.write("Aborted!\n")
        return FAILURE
    except HubnessError as error:
        if isinstance(error, MissingExtra):
            error = with_all_extras(error, sys.argv[1:], _uri())
        report_error(error, as_json=as_json, program=program)
        return USAGE if isinstance(error, InvalidParameter) else FAILURE
    except OSError:
        raise
    except Exception as error:
        if fault := unsupported_libraries():
            report_error(UnsupportedVersion(fault), as_json=as_json, program=program)
            return FAILURE
        from pymilvus.exceptions import MilvusException

        report_error(error, as_json=as_json, program=program, unexpected=not isinstance(error, MilvusException))
        return FAILURE


def _uri() -> str:
    """Return the address of the database of this command line, or of the environment."""
    arguments = sys.argv[1:]
    for argument, following in zip(arguments, [*arguments, ""][1:], strict=True):
        name, equals, value = argument.partition("=")
        if name == "--uri":
            return value if equals else following
    return next(filter(None, map(os.environ.get, URI_VARIABLES)), "")


def check_writable(path: Path) -> None:
    """Check that there is room for a page in this file, whose content stays. Raises UnreadableFile."""
    existed = path.exists()
    try:
        with path.open("ab", buffering=0) as file:
            if path.is_file():
                size = file.tell()
                try:
                    if file.write(bytes(PAGE_BYTES)) < PAGE_BYTES:
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                finally:
                    file.truncate(size)
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


def report_error(error: Exception, *, as_json: bool, program: str = "milvus-hubness", unexpected: bool = False) -> None:
    """Print a line or, if unexpected, the traceback on standard error; with --json also an object."""
    message = " ".join(redacted(str(getattr(error, "message", "") or error)).split())
    if as_json:
        show_json({"error": {"type": type(error).__name__, "message": message}})
    if unexpected:
        sys.stderr.write(redacted("".join(traceback.format_exception(error))))
    else:
        sys.stderr.write(f"{program}: {message}\n")
