"""Sizes that a file claims, compared with what it has and with the memory of this machine.

Every reader is bounded in one way: see `Growth`.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from milvus_hubness.basics.bounds import shown
from milvus_hubness.errors import HubnessError, UnreadableFile

MOST_INFLATED = 200
"""Factor by which vectors, texts and keys may grow from the file to the memory, beyond
`FREELY_INFLATED`. Vectors of models grow by less than 10, keys that repeat by some 100, and a file
that is made to fill the memory by 1,000 and more.
"""

OBJECT_BYTES = 64
"""About how many bytes a value of Python and the reference to it take."""

SHARED_NUMBERS = range(-5, 257)
"""Whole numbers that Python has once."""

FREELY_INFLATED = 64 << 20
"""Size up to which the content of a file may grow by any factor, in bytes."""

MOST_COLUMNS = 1 << 16
"""Largest number of columns: vectors of numbers have one for each dimension."""

MOST_EMPTY_ROWS = 1 << 16
"""Largest number of rows without a number, which take no byte of a file."""


def memory_bytes() -> int:
    """Return the memory of this machine, or of this container if that is less."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, ValueError):  # "max" is not a number.
        memory = min(memory, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return memory


def require_memory(path: object, what: str, size: int) -> None:
    """Raise UnreadableFile if `what`, of this size in bytes, does not fit into the memory."""
    if size > memory_bytes():
        raise UnreadableFile(
            f"{path}: {what} needs {_gib(size)} and this machine has {_gib(memory_bytes())}: take "
            "a sample of it"
        )


class Growth:
    """The memory that the content of an open file takes, compared with the size of the file.

    Each reader has one for each file, and whoever decompresses, decodes or builds something says
    first how much that will be. So a small file cannot fill the memory, whatever makes it grow.
    """

    freely = FREELY_INFLATED
    """Size up to which the content may grow by any factor, in bytes."""

    def __init__(self, path: object, packed: int) -> None:
        """packed: the size of the file, in bytes."""
        self._path = path
        self._packed = packed
        self._size = 0
        # Small files of equal numbers compress by any factor, and harm nobody.
        self._most = min(memory_bytes(), max(self.freely, MOST_INFLATED * packed))

    def add(self, what: str, size: int) -> None:
        """Count further bytes. Raises UnreadableFile if that is too much."""
        self.check(what, size)
        self._size += size

    def check(self, what: str, size: int) -> None:
        """Raise UnreadableFile if `what`, of this size in bytes, would be too much."""
        size += self._size
        if size > self._most:
            require_memory(self._path, what, size)
            raise UnreadableFile(
                f"{self._path}: {what} would grow from {self._packed:,} to {size:,} bytes: save it "
                "without compression"
            )


def object_bytes(value: Any) -> int:
    """Return about how many bytes a value of JSON, or an array in its place, takes in memory."""
    # These are there once.
    if value is None or isinstance(value, bool) or (type(value) is int and value in SHARED_NUMBERS):
        return 0
    size = sys.getsizeof(value)
    if isinstance(value, list):
        size += sum(map(object_bytes, value))
    elif isinstance(value, dict):
        size += sum(object_bytes(name) + object_bytes(member) for name, member in value.items())
    return size


def require_columns(path: object, count: int) -> None:
    """Raise UnreadableFile for more columns than any table of vectors has."""
    if count > MOST_COLUMNS:
        raise UnreadableFile(
            f"{path}: has {count:,} columns, and at most {MOST_COLUMNS:,} are read: this is another "
            "kind of file"
        )


def require_bytes(
    path: object, what: str, shape: Sequence[int], item_size: int, present: int
) -> int:
    """Return the size of an array in bytes.

    Raises UnreadableFile if fewer are present than its header promises.
    """
    count: int = math.prod(shape)
    if count and not item_size:
        raise UnreadableFile(
            f"{path}: {what} holds values of no size: save it with a dtype of numbers or texts"
        )
    if 0 in shape and max(shape) > MOST_EMPTY_ROWS:
        raise UnreadableFile(
            f"{path}: {what} has the shape {tuple(shape)}, and no number: save the vectors again"
        )
    size = count * item_size
    if min(shape, default=0) < 0 or size > present:
        raise UnreadableFile(
            f"{path}: the header of {what} promises the shape {tuple(shape)}, {size:,} bytes, and "
            f"{present:,} follow: "
            "the file is cut off or damaged; create it again"
        )

    require_memory(path, what, size)
    return size


@contextmanager
def reading(path: object, kind: str) -> Iterator[None]:
    """Raise UnreadableFile in place of the errors of NumPy, pyarrow and zipfile about a file."""
    try:
        yield
    except HubnessError:
        # These messages, among them UnreadableFile, already say what is wrong.
        raise
    except MemoryError:
        raise UnreadableFile(f"{path}: does not fit into the memory: take a sample of it") from None
    except RecursionError:
        raise UnreadableFile(
            f"{path}: cannot be read as {kind} (nested too deeply); create it again"
        ) from None
    except Exception as error:
        # Parsers of other packages end in errors of any class for a file that somebody has made up,
        # such as NumPy in TypeError and pyarrow in KeyError. The message may quote the file.
        reason = shown((str(error).splitlines() or [type(error).__name__])[0])
        raise UnreadableFile(
            f"{path}: cannot be read as {kind} ({reason}); create it again"
        ) from error


def _gib(size: int) -> str:
    return f"{size / 2**30:,.1f} GiB"
