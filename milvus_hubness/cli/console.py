"""Output, progress bars, errors and exit codes of all commands."""

from __future__ import annotations

import io
import json
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NoReturn, Protocol

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from milvus_hubness.basics.defaults import URI_VARIABLES
from milvus_hubness.basics.files.writing import whole_file
from milvus_hubness.basics.logs import log
from milvus_hubness.basics.requirements import naming_extras, unsupported_libraries
from milvus_hubness.basics.texts import (
    agreement_sentence,
    describe,
    visible,
    visible_json,
    visible_line,
)
from milvus_hubness.cli.extras import with_all_extras
from milvus_hubness.errors import (
    CorrectionNotRecommended,
    HubnessError,
    InvalidParameter,
    MissingExtra,
    UnsupportedVersion,
    redacted,
)

AS_JSON = "--json"
UNNAMED = "without a name"
"""What output calls a vector without a name, of which a Qdrant collection may have one."""

FAILURE = 1
"""Exit code after an error."""
USAGE = 2
"""Exit code after wrong usage."""
REFUSED = 3
"""Exit code after a refusal by measurement, be it new biases
that are worse or a diagnosis beyond its thresholds."""
INTERRUPTED = 130
"""Exit code after SIGINT."""
TERMINATED = 143
"""Exit code after SIGTERM."""

_UsageError: type[Any] = typer.BadParameter.__mro__[2]
"""Click's ClickException, which typer keeps under a private name: BadParameter is a UsageError, and
that is a ClickException."""


class _Terminal(Console):
    """A console for texts that others wrote.

    It shows their control characters as escapes, and takes neither markup nor the names of emoji in
    them for its own.
    """

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, markup=False, emoji=False)

    def render_str(self, text: str, **options: Any) -> Text:
        """Return a string as rich prints it.

        All strings that are printed or stand in tables come here.
        """
        return super().render_str(visible(text), **options)


out = _Terminal()
err = _Terminal(stderr=True)


class Bars(Protocol):
    """A `Progress` of jobs that shows bars, or nothing."""

    def __call__(self, doing: str, done: int, total: int, /) -> None: ...

    def suspended(self) -> AbstractContextManager[None]:
        """Show no bar within the block, such as while a question is open."""


class _NoBars:
    """Bars where standard error is no terminal."""

    def __call__(self, doing: str, done: int, total: int, /) -> None: ...

    def suspended(self) -> AbstractContextManager[None]:
        return nullcontext()


class StepLines(_NoBars):
    """A line on standard error for each step, where that is no terminal.

    A command that is over soon prints none.
    """

    quiet: float = 3.0
    """Seconds before the first line."""

    def __init__(self) -> None:
        self._steps: list[str] = []
        self._shown = 0
        self._lock = threading.Lock()
        self.timer = threading.Timer(self.quiet, self._show)
        self.timer.daemon = True
        self._is_long = False

    def __call__(self, doing: str, done: int, total: int, /) -> None:
        with self._lock:
            if doing not in self._steps:
                self._steps.append(doing)
        if self._is_long:
            self._show()

    def __enter__(self) -> StepLines:
        self.timer.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.timer.cancel()

    def _show(self) -> None:
        with self._lock:
            self._is_long = True
            for doing in self._steps[self._shown :]:
                say(f"milvus-hubness: {visible_line(doing)}", to_stderr=True)
            self._shown = len(self._steps)


@contextmanager
def progress_bars(*, has_lines: bool = False) -> Iterator[Bars]:
    """Show a progress bar for the current step on standard error, if that is a terminal.

    It stays below all that is printed. has_lines: whether another standard error gets a line for each
    step.
    """
    if not err.is_terminal and has_lines:
        with StepLines() as lines:
            yield lines
        return
    if not err.is_terminal:
        yield _NoBars()
        return

    # Only a terminal pays for the import.
    from milvus_hubness.cli.bars import Bar

    with Bar(err) as bar:
        yield bar


def say(text: str, *, to_stderr: bool = False) -> None:
    """Print a text of the program.

    What others wrote in it is shown as escapes where it would not be seen.
    """
    stream = sys.stderr if to_stderr else sys.stdout
    stream.write(f"{visible(text)}\n")
    stream.flush()


def can_ask() -> bool:
    """Whether a person is at both ends: the input and the output are a terminal."""
    return sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty()


def is_agreed(question: str) -> bool:
    """Put a question at the terminal, and return whether the reply is y or yes.

    Any other reply, and the end of the input, is a no.
    """
    sys.stdout.write(f"{visible_line(question)} [y/N] ")
    sys.stdout.flush()
    reply = sys.stdin.readline()
    # Without a reply, the next text would follow on the line of the question.
    if not reply.endswith("\n"):
        say("")
    return reply.strip().lower() in {"y", "yes"}


def show_styled(*parts: str | tuple[str, str]) -> None:
    """Print parts of a text, each alone or with a style of rich, such as ("now", "green")."""
    shown = [
        visible(part) if isinstance(part, str) else (visible(part[0]), part[1]) for part in parts
    ]
    out.print(Text.assemble(*shown))


def show_json(data: Mapping[str, Any]) -> None:
    """Print one line of JSON.

    Its values are exact: what a terminal would obey is escaped as JSON escapes.
    """
    text = redacted(json.dumps(data, ensure_ascii=False, default=str))
    sys.stdout.write(visible_json(text) + "\n")


def show_result(as_json: bool, result: Mapping[str, Any], show: Callable[[], object]) -> None:
    """Print a result as JSON or, by calling `show`, as text."""
    if as_json:
        show_json(result)
    else:
        show()


def show_facts(title: str, facts: Mapping[str, object]) -> None:
    """Print one fact per line, without the empty ones.

    A fact may have several lines; a title may begin with one.
    """
    texts = {
        visible_line(name): redacted(str(value))
        for name, value in facts.items()
        if value not in (None, "", [], ())
    }
    table = Table(
        title=_title(title), title_justify="left", title_style="bold", show_header=False, box=None
    )
    # A fixed width: rich would break a long name to give the values more room.
    table.add_column(style="cyan", width=max(map(len, texts), default=1))
    table.add_column(overflow="fold")
    for row in texts.items():
        table.add_row(*row)

    out.print(table)


def show_table(
    title: str | None, headings: Sequence[str], rows: Iterable[Sequence[str]], texts: int = 1
) -> None:
    """Print rows of texts and numbers. texts: number of columns with texts, which come first."""
    table = Table(box=None, title=title and _title(title), title_justify="left")
    for number, heading in enumerate(headings):
        table.add_column(
            visible_line(heading), justify="left" if number < texts else "right", overflow="fold"
        )

    for row in rows:
        # A cell is one line, so that no key can look like a row.
        table.add_row(*map(visible_line, row))

    out.print(table)


def _title(title: str) -> str:
    """Return a title as one line; an empty line before it stays."""
    text = title.removeprefix("\n")
    return title[: len(title) - len(text)] + visible_line(text)


def verdict_words(verdict: Mapping[str, Any] | None) -> str | None:
    """Return the verdict on a bank, what it was made on, and why; None without one."""
    if verdict is None:
        return None
    return "{verdict} ({tuned_at:.16} UTC, by {judged_by}): {reason}".format(**verdict)


def bank_words(plan: Mapping[str, Any]) -> dict[str, object]:
    """Return the bank, the estimator and the gate of a plan in words."""
    bank = plan["bank"]
    estimator = describe(plan["estimator"])
    return {
        "bank": f"{bank['queries']:,} queries of {bank['source']}, stored as {bank['collection']}",
        "estimator": f"{estimator}, strength {plan['strength']:g}",
        "verdict": verdict_words(plan["verdict"]),
        "agreement": agreement_sentence(plan["estimator"]),
        "gate": plan["gate"],
        "prior": prior_words(plan["prior"]),
    }


def prior_words(prior: Mapping[str, Any] | None) -> str | None:
    """Return a prior in words; None without one."""
    if prior is None:
        return None
    source = f"field {prior['field']}" if prior["source"] == "field" else "clicks"
    if keys := prior.get("keys"):
        source += f" on {keys:,} rows"
    words = f"{source}, weight {prior['weight']:g} of the spread of scores"
    return f"{words}, which is {prior['factor']:.3g}" if prior["factor"] else words


def kind_words(kinds: Mapping[str, Any] | None) -> str | None:
    """Return the kinds of items in words; None without kinds."""
    if kinds is None:
        return None
    source = f"by field {kinds['field']}" if kinds["field"] else "two clusters of the vectors"
    counts = kinds.get("counts") or {}
    names = [
        f"{name} ({counts[name]:,} rows)" if name in counts else name for name in kinds["names"]
    ]
    return f"{source}: {', '.join(names)}"


@contextmanager
def on_signals(handle: Callable[[int], None]) -> Iterator[None]:
    """Call `handle` with the number of each SIGTERM or SIGINT within the block."""
    previous = {
        number: signal.signal(number, lambda received, frame: handle(received))
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def run(app: typer.Typer) -> NoReturn:
    """Run a command line and exit.

    Exit codes: 0 done, 1 failed, 2 wrong usage, 3 refused by measurement, 130 interrupted.
    """
    try:
        with _logging():
            code = _exit_code(app)
        # Here, since Python's own flush at the end would print a traceback if a pipe is closed.
        sys.stdout.flush()
    except OSError as error:
        code = FAILURE
        # Either the command has failed, or its output could not be written: a flush shows which.
        try:
            sys.stdout.flush()
            report_error(error, as_json=AS_JSON in sys.argv, unexpected=True)
        except OSError as problem:
            # The buffered output is dropped, or Python would try to write it at the end.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            reason = problem.strerror or problem
            say(f"milvus-hubness: cannot write the output: {reason}", to_stderr=True)

    sys.exit(code)


class _Lines(logging.Handler):
    """Prints each record of the log as a line on standard error, as errors are printed."""

    def emit(self, record: logging.LogRecord) -> None:
        message = " ".join(redacted(record.getMessage()).split())
        say(f"milvus-hubness: {message}", to_stderr=True)


@contextmanager
def _logging() -> Iterator[None]:
    """Print what the package logs, such as what a job waits for, within the block."""
    handler = _Lines()
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)


def _exit_code(app: typer.Typer) -> int:
    """Run the command, report its error, and return its exit code. Raises OSError."""
    # The options may be what is wrong, so --json is read from the arguments as they are.
    as_json = AS_JSON in sys.argv
    try:
        with naming_extras():
            return int(app(standalone_mode=False) or 0)
    except _UsageError as error:
        if as_json:
            show_json({"error": {"type": type(error).__name__, "message": error.format_message()}})

        usage = io.StringIO()
        error.show(file=usage)
        say(redacted(usage.getvalue().rstrip("\n")), to_stderr=True)
        return int(error.exit_code)
    except typer.Abort:
        say("Aborted!", to_stderr=True)
        return FAILURE
    except HubnessError as error:
        if isinstance(error, MissingExtra):
            error = with_all_extras(error, sys.argv[1:], _uri())
        if isinstance(error, CorrectionNotRecommended):
            # People at a shell have an option for what is a parameter in Python.
            error = CorrectionNotRecommended(f"{error.advice} (--force goes on all the same)")
        report_error(error, as_json=as_json)
        if isinstance(error, CorrectionNotRecommended):
            return REFUSED
        return USAGE if isinstance(error, InvalidParameter) else FAILURE
    except OSError:
        raise
    except Exception as error:
        # A library that this package does not support may fail in any way: that is then the reason.
        if fault := unsupported_libraries():
            report_error(UnsupportedVersion(fault), as_json=as_json)
            return FAILURE

        from pymilvus.exceptions import MilvusException

        is_servers = isinstance(error, MilvusException)
        report_error(error, as_json=as_json, unexpected=not is_servers)
        return FAILURE


def _uri() -> str:
    """Return the address of the database of this command line, or of the environment."""
    # The options are not parsed here: this is for the message on an extra that is not installed.
    arguments = sys.argv[1:]
    for argument, following in zip(arguments, [*arguments, ""][1:], strict=True):
        name, equals, value = argument.partition("=")
        if name == "--uri":
            return value if equals else following
    return next(filter(None, map(os.environ.get, URI_VARIABLES)), "")


def write_page(path: Path, page: str) -> None:
    """Write a page. Raises UnreadableFile."""
    with whole_file(path) as file:
        file.write(page)


def report_error(error: Exception, *, as_json: bool, unexpected: bool = False) -> None:
    """Print an error on standard error, as one line; with --json also as an object.

    unexpected: print the traceback in place of the line.
    """
    message = " ".join(redacted(str(getattr(error, "message", "") or error)).split())
    if as_json:
        show_json({"error": {"type": type(error).__name__, "message": message}})
    if unexpected:
        say(redacted("".join(traceback.format_exception(error))).rstrip("\n"), to_stderr=True)
    else:
        say(f"milvus-hubness: {message}", to_stderr=True)
