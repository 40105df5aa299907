"""NumPy's files of one array (.npy) and of several (.npz), whose headers are checked before an
array is read.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from milvus_hubness.basics.files.opening import open_file, size_of
from milvus_hubness.basics.files.sizes import Growth, reading, require_bytes
from milvus_hubness.errors import UnreadableFile

SUFFIX = ".npy"
ENCRYPTED = 1
"""The flag of an encrypted member of an archive."""


class Header(NamedTuple):
    """The shape and the dtype of an array, as its header has them."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]


def read_npy(path: str | os.PathLike[str], check: Callable[[Header], None]) -> npt.NDArray[Any]:
    """Return the array of a .npy file.

    check: raises for a header that is not wanted. Raises UnreadableFile.
    """
    with open_file(path) as file, reading(path, SUFFIX):
        header = _header(path, "the array", file, size_of(file))
        check(header)
        # NumPy reads the header once more.
        file.seek(0)
        return _array(file)


class Archive:
    """An open .npz file. names: of its arrays; further members are no arrays and are not read.

    growth: of what is read.
    """

    def __init__(self, path: str | os.PathLike[str], file: BinaryIO) -> None:
        self._path = path
        self.growth = Growth(path, size_of(file))
        if not zipfile.is_zipfile(file):
            raise zipfile.BadZipFile("not an archive of arrays")

        self._archive = zipfile.ZipFile(file)
        members = self._archive.infolist()
        self._members = {
            member.filename.removesuffix(SUFFIX): member
            for member in members
            if member.filename.endswith(SUFFIX)
        }
        self.names = list(self._members)

    def header(self, name: str) -> Header:
        """Return the header of an array.

        Raises UnreadableFile if the member cannot have such an array.
        """
        member = self._members[name]
        if member.flag_bits & ENCRYPTED:
            raise UnreadableFile(f"{self._path}: {name!r} is encrypted: save it without a password")

        self.growth.check(repr(name), member.file_size)
        with self._archive.open(member) as stream:
            return _header(self._path, repr(name), stream, member.file_size)

    def read(self, name: str) -> npt.NDArray[Any]:
        """Return an array. Raises UnreadableFile."""
        self.header(name)
        self.growth.add(repr(name), self._members[name].file_size)
        with self._archive.open(self._members[name]) as stream:
            return _array(stream)

    def read_all(self) -> dict[str, npt.NDArray[Any]]:
        """Return all arrays by name. Raises UnreadableFile."""
        return {name: self.read(name) for name in self.names}


@contextmanager
def open_archive(path: str | os.PathLike[str]) -> Iterator[Archive]:
    """Open a .npz file. Raises UnreadableFile, also for what its arrays raise while it is open."""
    with open_file(path) as file, reading(path, ".npz"):
        yield Archive(path, file)


def _header(path: object, what: str, stream: IO[bytes], size: int) -> Header:
    """Return the header at the begin of a stream of this size.

    Raises UnreadableFile, ValueError.
    """
    version = np.lib.format.read_magic(stream)
    # Versions 2 and 3 differ in the encoding of names alone, which arrays of numbers lack.
    read = (
        np.lib.format.read_array_header_1_0
        if version == (1, 0)
        else np.lib.format.read_array_header_2_0
    )
    shape, _, dtype = read(stream)
    # Objects are pickles, which may run any code when they are loaded.
    if dtype.hasobject:
        raise UnreadableFile(
            f"{path}: {what} holds Python objects: save it with a dtype of numbers or texts"
        )

    require_bytes(path, what, shape, dtype.itemsize, size - stream.tell())
    return Header(shape, dtype)


def _array(stream: Any) -> npt.NDArray[Any]:
    array: npt.NDArray[Any] = np.lib.format.read_array(stream, allow_pickle=False)
    return array
