"""How files are opened: regular files only, without
waiting, and only so much of them as their reader takes.

A name may lead to a pipe that nobody writes to, a terminal or a file of /proc that never ends. All
of them are refused in one line, so that no command hangs.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from milvus_hubness.errors import UnreadableFile

SMALL = 1 << 20
"""Maximum size of a file of settings, a token or a certificate, in bytes."""

LARGEST_TOKEN = 64 << 10
"""Maximum size of a file with a token, in bytes."""
_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


class MissingFile(UnreadableFile):
    """There is no file of this name."""


@contextmanager
def open_file(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open a regular file for reading, symbolic links included.

    Raises UnreadableFile, also for an empty one, and MissingFile without one.
    """
    with os.fdopen(_descriptor(path), "rb") as file:
        # A file of /proc has the size 0 too, as nobody knows its length.
        if not size_of(file):
            kind = os.path.splitext(path)[1] or "a file"
            raise UnreadableFile(f"{path}: cannot be read as {kind} (it is empty); create it again")

        yield file


def size_of(file: BinaryIO) -> int:
    """Return the size of an open file, in bytes."""
    return os.fstat(file.fileno()).st_size


def read_bytes(path: str | os.PathLike[str], largest: int = SMALL) -> bytes:
    """Return the content of a regular file.

    Raises UnreadableFile, also for more than `largest` bytes.
    """
    descriptor = _descriptor(path)
    try:
        # Files of /proc have the size 0 and any length, so their size says nothing.
        content = _read_at_most(descriptor, largest + 1)
    except OSError as error:
        raise UnreadableFile(f"{path}: cannot be read: {error.strerror}; check the path") from None
    finally:
        os.close(descriptor)

    if len(content) > largest:
        raise UnreadableFile(
            f"{path}: has more than {largest:,} bytes: this is another kind of file"
        )

    return content


def read_text(path: str | os.PathLike[str], largest: int = SMALL) -> str:
    """Return the content of a regular file in UTF-8.

    Raises UnreadableFile, also for more than `largest` bytes.
    """
    content = read_bytes(path, largest)
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise UnreadableFile(
            f"{path}: is not a text in UTF-8: this is another kind of file"
        ) from None


def read_token(path: str | os.PathLike[str]) -> str:
    """Return the token in a file.

    Raises UnreadableFile for a file without one, or with something else.
    """
    token = read_text(path, LARGEST_TOKEN).strip()
    if not token:
        raise UnreadableFile(f"{path}: is empty: write the token into it")
    if not token.isprintable():
        raise UnreadableFile(
            f"{path}: has several lines or control characters: write the token alone into it"
        )

    return token


def read_beneath(folder: str | os.PathLike[str], name: str, largest: int) -> bytes | None:
    """Return the content of a regular file below `folder`, and None if there is none, if it is
    larger than `largest`, or if `name` leads out of the folder, by "..", as an absolute path or
    over a symbolic link.
    """
    try:
        root = Path(folder).resolve(strict=True)
        parts = (root / name).resolve(strict=True).relative_to(root).parts
        descriptor = os.open(root, _FLAGS | os.O_DIRECTORY)
        # The resolved path has no links. A link that takes
        # the place of a part meanwhile is not followed.
        for part in parts:
            outer = descriptor
            is_last = part is parts[-1]
            try:
                if is_last and not stat.S_ISREG(
                    os.stat(part, dir_fd=outer, follow_symlinks=False).st_mode
                ):
                    return None

                flags = _FLAGS | os.O_NOFOLLOW | (0 if is_last else os.O_DIRECTORY)
                descriptor = os.open(part, flags, dir_fd=outer)
            finally:
                os.close(outer)
    except (OSError, ValueError, RuntimeError):
        # Until Python 3.13, a loop of links is a RuntimeError.
        return None

    try:
        opened = os.fstat(descriptor)
        if not stat.S_ISREG(opened.st_mode) or opened.st_size > largest:
            return None

        content = _read_at_most(descriptor, largest + 1)
    except OSError:
        return None
    finally:
        os.close(descriptor)

    return content if len(content) <= largest else None


def _descriptor(path: str | os.PathLike[str]) -> int:
    """Open a regular file. Raises UnreadableFile."""
    try:
        # To open a device may do something to it, so its kind is looked at first.
        _require_regular(path, os.stat(path).st_mode)
        descriptor = os.open(path, _FLAGS)
    except UnreadableFile:
        # It is a ValueError, which means something else below.
        raise
    except FileNotFoundError:
        raise MissingFile(f"{path}: no such file; check the path") from None
    except OSError as error:
        raise UnreadableFile(f"{path}: cannot be read: {error.strerror}; check the path") from None
    except ValueError:
        raise UnreadableFile(f"{os.fspath(path)!r}: is no path: a name has no zero byte") from None

    try:
        _require_regular(path, os.fstat(descriptor).st_mode)
    except UnreadableFile:
        os.close(descriptor)
        raise

    return descriptor


def _require_regular(path: str | os.PathLike[str], mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = next((name for is_kind, name in _KINDS if is_kind(mode)), "no file")
        raise UnreadableFile(f"{path}: is {kind}: name a file")


def _read_at_most(descriptor: int, count: int) -> bytes:
    blocks = []
    while count > 0 and (block := os.read(descriptor, min(count, 1 << 20))):
        blocks.append(block)
        count -= len(block)
    return b"".join(blocks)
