"""How files are written: checked before the work, and put in place when they are whole."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TextIO

from milvus_hubness.errors import InvalidParameter, UnreadableFile

PAGE_BYTES = 64 * 1024
"""Minimum free space for a page, in bytes."""


PUBLIC = 0o666
"""The mode of a new file, of which the umask of the process takes away."""

PRIVATE = 0o600
"""The mode of a new file that only its user may read."""


def open_without_waiting(path: str, flags: int, mode: int = PUBLIC) -> int:
    """Open a file for writing: a pipe that nobody reads is an error, and no reason to wait."""
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY, mode)
    os.set_blocking(descriptor, True)
    return descriptor


def check_writable(path: Path) -> None:
    """Check that there is room for a page in this file, whose content stays.

    Raises UnreadableFile.
    """
    # A full disk shows only when something is written, so a page of zeros is, and is cut off again.
    # What a link leads to is created and removed again, not the link.
    actual = Path(os.path.realpath(path))
    existed = actual.exists()
    try:
        with open(actual, "ab", buffering=0, opener=open_without_waiting) as file:
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
                actual.unlink()


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
def whole_file(path: Path, *, is_private: bool = False) -> Iterator[TextIO]:
    """Open a text file for writing, which gets its name when the block ends without an error.

    Until then, what the file had stays. Lines end in \\n on every system. is_private: whether only
    the user may read a new file; one that is replaced keeps its mode. Raises UnreadableFile.
    """
    # A link stays one, and nothing takes the place of a pipe or of /dev/stdout, even where that is
    # a file.
    actual = Path(os.path.realpath(path))
    is_device = path.is_absolute() and path.parts[1] in ("dev", "proc")
    mode = PRIVATE if is_private else PUBLIC
    try:
        if is_device or not (actual.is_file() or not actual.exists()):
            with _opened(actual, mode) as file:
                yield file
            return

        try:
            unfinished = _create_next_to(actual, mode)
        except OSError:
            # The folder may be read-only while the file is not, as with a file mounted into a
            # container.
            if not actual.exists():
                raise
            with _opened(actual, mode) as file:
                yield file
            return

        with _replacing(actual, unfinished), _opened(unfinished, mode) as file:
            yield file
    except OSError as error:
        raise UnreadableFile(f"cannot write {path}: {error.strerror}") from None


@contextmanager
def unfinished_file(path: Path) -> Iterator[Path]:
    """Yield the name of a new empty file, which becomes `path` when the block ends without an error.

    For libraries that open files themselves. Raises OSError.
    """
    actual = Path(os.path.realpath(path))
    unfinished = _create_next_to(actual, PUBLIC)
    with _replacing(actual, unfinished):
        yield unfinished


def _create_next_to(actual: Path, mode: int) -> Path:
    """Create an empty file in the folder of a file, with the mode of this one or of a new one.

    Raises OSError.
    """
    # In a folder that others may write to, they could put a link where a name can be foreseen, and
    # what is written would be elsewhere. No file that is there is opened, link or not.
    unfinished = actual.with_name(f".{actual.name[:40]}.{secrets.token_hex(8)}")
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        if actual.exists():
            # Before there is anything to read in it.
            os.fchmod(descriptor, stat.S_IMODE(actual.stat().st_mode))
    finally:
        os.close(descriptor)
    return unfinished


@contextmanager
def _replacing(actual: Path, unfinished: Path) -> Iterator[None]:
    """Put a file in the place of another when the block ends, and remove it after an error."""
    try:
        yield
        os.replace(unfinished, actual)
    finally:
        unfinished.unlink(missing_ok=True)


def _opened(path: Path, mode: int) -> TextIO:
    opener = partial(open_without_waiting, mode=mode)
    return open(path, "w", encoding="utf-8", newline="\n", opener=opener)
