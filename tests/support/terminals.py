"""A command at a terminal, and keys that are typed there: in a process of its own, or as if in this one."""

import fcntl
import io
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time

from milvus_hubness.cli import console

ENOUGH = 60
"""Seconds after which a process that prints nothing more fails the test."""


LONGEST = 240
"""Seconds after which a process that goes on printing fails the test."""

CTRL_C = "\x03"
CTRL_D = "\x04"
"""The end of the input, at the beginning of a line."""


def without_escapes(text):
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def lines_of(drawn):
    """Return the lines that a terminal shows in the end."""
    lines, row, column = [""], 0, 0
    for token in re.findall(r"\x1b\[[?\d;]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", drawn):
        if token == "\r":
            column = 0
        elif token == "\n":
            row += 1
            # A terminal that is written to as a file is at the first column of the next line.
            column = 0
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


class Screen(io.TextIOWrapper):
    """An output that claims to be a terminal, and keeps what reaches it."""

    def __init__(self):
        super().__init__(io.BytesIO(), "utf-8", newline="", line_buffering=True)

    def isatty(self):
        return True

    def stands_for_output(self, changed):
        """Take what this process prints, as long as a monkeypatch has its changes."""
        changed.setattr(sys, "stdout", self)
        changed.setattr(sys, "stderr", self)
        changed.setenv("TERM", "xterm")
        for rich in (console.out, console.err):
            # It looks once whether there is a terminal.
            changed.setattr(rich, "is_interactive", True)

    @property
    def drawn(self):
        """What was flushed, as a terminal shows nothing else."""
        return self.buffer.getvalue().decode()

    @property
    def shown(self):
        return without_escapes(self.drawn)


class Keyboard:
    """An input that claims to be a terminal, at which somebody types a reply to each question."""

    def __init__(self, screen, replies):
        self._screen = screen
        self._replies = list(replies)

    def isatty(self):
        return True

    def readline(self):
        assert self._replies, f"nobody replies to this: {self._screen.shown}"
        reply = self._replies.pop(0)
        if reply == CTRL_C:
            signal.raise_signal(signal.SIGINT)
        if reply == CTRL_D:
            return ""
        # A terminal shows what is typed.
        self._screen.write(reply)
        return reply


def _at_its_terminal():
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    # Who runs the tests in the background of a shell has them ignore Ctrl-C, which is inherited.
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Terminal:
    """The command in a process of its own, with a terminal as its input and output."""

    def __init__(self, *arguments):
        self._end, end_of_process = pty.openpty()
        self.drawn = ""
        self.shown = ""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "milvus_hubness", *arguments],
            env={
                **os.environ,
                "MILVUS_HUBNESS_URI": "shop.db",
                "TERM": "xterm",
                "COLUMNS": "200",
            },
            stdin=end_of_process,
            stdout=end_of_process,
            stderr=end_of_process,
            # Ctrl-C reaches the process of whose session the terminal is.
            start_new_session=True,
            preexec_fn=_at_its_terminal,
        )
        self._until = time.monotonic() + LONGEST
        os.close(end_of_process)

    def until(self, text):
        while text not in self.shown:
            assert self.read(), self.shown
        return self.shown

    def type(self, keys):
        os.write(self._end, keys.encode())

    def code(self):
        """The exit code, once all that the process prints is read."""
        while self.read():
            pass
        code = self._process.wait(ENOUGH)
        os.close(self._end)
        return code

    def read(self):
        is_late = time.monotonic() > self._until
        if is_late or not select.select([self._end], [], [], ENOUGH)[0]:
            self._process.kill()
            raise AssertionError(f"nothing more came after: {self.shown}")
        try:
            text = os.read(self._end, 65_536).decode()
        except OSError:  # Linux says so at the end of the other side.
            return ""
        self.drawn += text
        self.shown = without_escapes(self.drawn)
        return text
