"""Processes of a command line: forked from one that has imported everything, stopped, continued and ended."""

from __future__ import annotations

import atexit
import contextlib
import logging
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

LIBRARIES = ("pymilvus", "milvus_lite", "milvus_hubness")

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.chaos.warm"])


def be_quiet() -> None:
    torch.set_num_threads(1)
    for library in LIBRARIES:
        logging.getLogger(library).setLevel(logging.CRITICAL + 1)


def run_command_line(
    main: Callable[[], None], argv: Sequence[str], out: Path | str, err: Path | str
) -> None:
    """Run `main` in this process with these arguments, which adds what it prints to files."""
    for stream, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    sys.argv = list(argv)
    try:
        main()
    finally:
        sys.stdout.flush()
        # A forked process ends without these, by which Milvus Lite closes its file.
        atexit._run_exitfuncs()


def is_stopped(process: BaseProcess) -> bool:
    """Whether SIGSTOP has stopped the process."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T"
    return False


def problem_of(error: BaseException) -> str:
    """Return the message of a failed assertion, or the line that does not hold; for other errors the class too."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    line = f"{Path(frame.filename).name}:{frame.lineno} {frame.line}"
    if not isinstance(error, AssertionError):
        return f"{type(error).__name__}: {error} ({line})"
    return str(error).partition("\nassert")[0] or line
