"""The progress bar on a terminal, and what is printed beside it."""

import io
import logging
import re
import sys
import threading

import pytest
import typer

from milvus_hubness.cli import console
from tests.support.terminals import Screen, lines_of

OFTEN = 200
"""Looks at the screen, a twentieth of a second apart, for a bar that is drawn ten times a second."""


def seen(screen, pattern):
    for _ in range(OFTEN):
        if re.search(pattern, screen.shown):
            return
        threading.Event().wait(0.05)
    raise AssertionError(f"{pattern} was never drawn: {screen.shown}")


def run_job(monkeypatch, *, stdout=None):
    """Run a command that prints in every way while its bars are drawn; return its screen.

    stdout: where standard output goes if not to the screen as well.
    """
    screen = Screen()
    screen.stands_for_output(monkeypatch)
    if stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
    monkeypatch.setattr(sys, "argv", ["milvus-hubness"])
    monkeypatch.setenv("COLUMNS", "100")

    def job(**options):
        with console.progress_bars() as progress:
            for rows in range(0, 15_001, 1_000):
                progress("copying", rows, 14_518)
                if rows == 7_000:
                    seen(screen, "copying .* 7000/14518")
            seen(screen, "15000/15000")
            typer.echo("copied; catching up with later writes")

            for rows in range(0, 3_001, 1_000):
                progress("comparing, pass 1", rows, 3_000)
                if rows == 1_000:
                    seen(screen, "comparing, pass 1 .* 1000/3000")
            console.out.print("a table")

            progress("verifying", 1_000, 3_000)
            seen(screen, "verifying .* 1000/3000")
            logging.getLogger("milvus_hubness").warning("waiting for index %r", "v")
            for part in ("printed ", "in parts", "\nverified\n"):
                sys.stdout.write(part)
        typer.echo("done")

    with pytest.raises(SystemExit) as ended:
        console.run(job)
    assert not ended.value.code, screen.shown
    return screen


def test_the_screen_has_the_messages_in_order_and_no_bar_in_the_end(monkeypatch):
    """Messages were glued to bars, and each finished step left its bar behind."""
    screen = run_job(monkeypatch)
    assert lines_of(screen.drawn) == [
        "copied; catching up with later writes",
        "a table",
        "milvus-hubness: waiting for index 'v'",
        "printed in parts",
        "verified",
        "done",
    ]


def test_a_bar_is_shown_and_never_counts_above_its_total(monkeypatch):
    """Rows that clients write meanwhile made 14880/14518."""
    written = run_job(monkeypatch).drawn
    counts = [tuple(map(int, pair)) for pair in re.findall(r"(\d+)/(\d+)", written)]
    assert any(0 < done < total for done, total in counts), "a bar is shown"
    assert all(done <= total for done, total in counts)
    for step in ("copying", "comparing, pass 1", "verifying"):
        assert step in written
    for line in written.replace("\r", "\n").split("\n"):
        assert len(re.findall(r"\d+/\d+", line)) <= 1


def test_standard_output_in_a_file_has_all_messages(monkeypatch):
    """rich sends it to the terminal of standard error otherwise, and the file lacks them."""
    printed = io.StringIO()
    screen = run_job(monkeypatch, stdout=printed)
    assert printed.getvalue().splitlines() == [
        "copied; catching up with later writes", "a table", "printed in parts", "verified", "done",
    ]  # fmt: skip
    assert lines_of(screen.drawn) == ["milvus-hubness: waiting for index 'v'"]


def test_where_no_bar_is_shown_each_step_of_a_long_command_is_one_line(monkeypatch, capsys):
    """Also those before the first line; a command that is over soon prints none."""
    monkeypatch.setattr(console.StepLines, "quiet", 0)
    with console.StepLines() as lines:
        lines.timer.join()
        for done in range(3):
            lines("trying methods", done, 3)
        lines("choosing a method", 0, 1)
        assert capsys.readouterr().err.splitlines() == [
            "milvus-hubness: trying methods",
            "milvus-hubness: choosing a method",
        ]
    monkeypatch.setattr(console.StepLines, "quiet", 3_600)
    with console.StepLines() as lines:
        lines("trying methods", 0, 3)
    lines.timer.join()
    assert capsys.readouterr().err == ""
