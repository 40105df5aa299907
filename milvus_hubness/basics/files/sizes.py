"""Sizes that a file claims, compared with what it has and with the memory of this machine."""

from __future__ import annotations

import math
import os
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from lzma import LZMAError
from pathlib import Path

from milvus_hubness.errors import InvalidInput, UnreadableFile

MOST_INFLATED = 200
"""Factor by which compressed vectors, texts and keys may grow, beyond `FREELY_INFLATED`. Vectors of
models grow by less than 10, and a file that is made to fill the memory by 1,000 and more.
"""

FREELY_INFLATED = 64 << 20
"""Size up to which compressed data may grow by any factor, in bytes."""


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


def require_sane_growth(path: object, what: str, size: int, packed: int) -> None:
    """Raise UnreadableFile if `what` grows from `packed`
    bytes to `size` as only a file does that fills memory.
    """
    require_memory(path, what, size)
    # Small files of equal numbers compress by any factor, and harm nobody.
    if size > FREELY_INFLATED and size > MOST_INFLATED * packed:
        raise UnreadableFile(
            f"{path}: {what} would grow from {packed:,} to {size:,} bytes: save it without "
            "compression"
        )


def require_bytes(
    path: object, what: str, shape: Sequence[int], item_size: int, present: int
) -> int:
    """Return the size of an array in bytes.

    Raises UnreadableFile if fewer are present than its header promises.
    """
    size = math.prod(shape) * item_size
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
    except InvalidInput:
        # These messages, among them UnreadableFile, already say what is wrong.
        raise
    except MemoryError:
        raise UnreadableFile(f"{path}: does not fit into the memory: take a sample of it") from None
    except RecursionError:
        raise UnreadableFile(
            f"{path}: cannot be read as {kind} (nested too deeply); create it again"
        ) from None
    except (
        *(OSError, EOFError, ValueError, NotImplementedError, OverflowError),
        *(zipfile.BadZipFile, zlib.error, LZMAError),
    ) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UnreadableFile(
            f"{path}: cannot be read as {kind} ({reason}); create it again"
        ) from error


def _gib(size: int) -> str:
    return f"{size / 2**30:,.1f} GiB"
