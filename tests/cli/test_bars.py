"""The progress bar on a terminal, and what is printed beside it."""

import os
import pty
import re
import subprocess
import sys
import textwrap

import pytest

JOB = textwrap.dedent(
    """
    import logging, sys, time
    import typer
    from milvus_hubness.cli import console

    def job():
        with console.progress_bars() as progress:
            for rows in range(0, 15_001, 1_000):
                progress("copying", rows, 14_518)
                time.sleep(0.02)
            typer.echo("copied; catching up with later writes")
            for rows in range(0, 3_001, 1_000):
                progress("comparing, pass 1", rows, 3_000)
                time.sleep(0.05)
            console.out.print("a table")
            progress("verifying", 1_000, 3_000)
            time.sleep(0.15)
            logging.getLogger("milvus_hubness").warning("waiting for index %r", "v")
            print("printed", "in parts")
            sys.stdout.write("verified\\\\n")
            time.sleep(0.15)
        typer.echo("done")

    sys.argv = ["milvus-hubness"]
    console.run(lambda **options: job())
    """
).replace("\\\\n", "\\n")


def run_in_terminal(code, *, stdout_too=True):
    """Return what a program writes to a terminal, and to standard output if that is a file."""
    terminal, child = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=child if stdout_too else subprocess.PIPE,
        stderr=child,
        env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "100"},
    )
    os.close(child)
    written = b""
    while True:
        try:
            part = os.read(terminal, 65_536)
        except OSError:  # Linux reports the end of a terminal so.
            break
        if not part:
            break
        written += part
    printed = process.stdout.read().decode() if process.stdout else ""
    assert process.wait() == 0, written
    os.close(terminal)
    return written.decode(), printed


def screen_of(written):
    """Return the lines that a terminal shows in the end."""
    lines, row, column = [""], 0, 0
    for token in re.findall(r"\x1b\[[?\d;]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", written):
        if token == "\r":
            column = 0
        elif token == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif token.startswith("\x1b["):
            count = int(re.sub(r"\D", "", token) or 1)
            if token.endswith("A"):
                row -= count
            elif token.endswith("K"):
                lines[row] = ""
        else:
            shown = lines[row].ljust(column)
            lines[row] = shown[:column] + token + shown[column + len(token) :]
            column += len(token)
    return [line.rstrip() for line in lines if line.strip()]


@pytest.fixture(scope="module")
def written():
    return run_in_terminal(JOB)[0]


def test_the_screen_has_the_messages_in_order_and_no_bar_in_the_end(written):
    """Messages were glued to bars, and each finished step left its bar behind."""
    assert screen_of(written) == [
        "copied; catching up with later writes",
        "a table",
        "milvus-hubness: waiting for index 'v'",
        "printed in parts",
        "verified",
        "done",
    ]


def test_a_bar_is_shown_and_never_counts_above_its_total(written):
    """Rows that clients write meanwhile made 14880/14518."""
    counts = [tuple(map(int, pair)) for pair in re.findall(r"(\d+)/(\d+)", written)]
    assert any(0 < done < total for done, total in counts), "a bar is shown"
    assert all(done <= total for done, total in counts)
    for step in ("copying", "comparing, pass 1", "verifying"):
        assert step in written
    for line in written.replace("\r", "\n").split("\n"):
        assert len(re.findall(r"\d+/\d+", line)) <= 1


def test_standard_output_in_a_file_has_all_messages():
    """rich sends it to the terminal of standard error otherwise, and the file lacks them."""
    written, printed = run_in_terminal(JOB, stdout_too=False)
    assert printed.splitlines() == [
        "copied; catching up with later writes", "a table", "printed in parts", "verified", "done",
    ]  # fmt: skip
    assert screen_of(written) == ["milvus-hubness: waiting for index 'v'"]
