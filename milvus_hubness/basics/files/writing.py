"""How files are written: checked before the work, and put in place when they are whole."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from milvus_hubness.errors import InvalidParameter, UnreadableFile

PAGE_BYTES = 64 * 1024
"""Minimum free space for a page, in bytes."""


def open_without_waiting(path: str, flags: int) -> int:
    """Open a file for writing: a pipe that nobody reads is an error, and no reason to wait."""
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY, 0o666)
    os.set_blocking(descriptor, True)
    return descriptor


def check_writable(path: Path) -> None:
    """Check that there is room for a page in this file, whose content stays.

    Raises UnreadableFile.
    """
    # A full disk shows only when something is written, so a page of zeros is, and is cut off again.
    existed = path.exists()
    try:
        with open(path, "ab", buffering=0, opener=open_without_waiting) as file:
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


def expect_different(files: Sequence[tuple[str, Path]]) -> None:
    """Check that no two of these options name the same file, of which one would be lost.

    A pipe or a terminal may be named twice. Raises InvalidParameter.
    """
    option_of: dict[Path, str] = {}
    for option, path in files:
        actual = Path(os.path.realpath(path))
        if actual in option_of and (actual.is_file() or not actual.exists()):
            options = " and ".join(dict.fromkeys((option_of[actual], option)))
            raise InvalidParameter(f"{options} would be the same file, {path}: name another one")
        option_of[actual] = option


@contextmanager
def whole_file(path: Path) -> Iterator[TextIO]:
    """Open a text file for writing, which gets its name when the block ends without an error.

    Until then, what the file had stays. Lines end in \\n on every system. Raises UnreadableFile.
    """
    # A link stays one, and nothing takes the place of a pipe or of /dev/stdout, even where that is
    # a file.
    actual = Path(os.path.realpath(path))
    is_device = path.is_absolute() and path.parts[1] in ("dev", "proc")
    is_replaced = not is_device and (actual.is_file() or not actual.exists())
    unfinished = actual.with_name(f".{actual.name[:40]}.{os.getpid()}") if is_replaced else actual
    try:
        try:
            file = _opened(unfinished)
        except OSError:
            # The folder may be read-only while the file is not, as with a file mounted into a
            # container.
            if not actual.exists() or not is_replaced:
                raise
            is_replaced = False
            file = _opened(actual)
        try:
            with file:
                yield file
            if is_replaced:
                if actual.exists():
                    shutil.copymode(actual, unfinished)
                os.replace(unfinished, actual)
        finally:
            if is_replaced:
                unfinished.unlink(missing_ok=True)
    except OSError as error:
        raise UnreadableFile(f"cannot write {path}: {error.strerror}") from None


def _opened(path: Path) -> TextIO:
    return open(path, "w", encoding="utf-8", newline="\n", opener=open_without_waiting)
