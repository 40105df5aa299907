"""A command at a terminal, and keys that are typed there."""

import fcntl
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time

ENOUGH = 60
"""Seconds after which a process that prints nothing more fails the test."""


LONGEST = 240
"""Seconds after which a process that goes on printing fails the test."""


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
        self.shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.drawn)
        return text
