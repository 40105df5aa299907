"""What stored vectors lose where the offsets of kinds are subtracted. No I/O.

A row of kind k is stored as r − νk, which float32 rounds where a number of r is much smaller than that
of νk. Read back as (r − νk) + νk, such a number differs from r in its last digits. A hidden field of
the row has these differences, so that vectors are read back bit for bit: those of the numbers' bit
patterns, which are small integers and mostly 0, as a deflated text. It is empty if nothing is lost.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from milvus_hubness.correction.codec.arrays import Floats
from milvus_hubness.errors import StateError

LEVEL = 6
"""Of compression: 28 µs for a row of 512 numbers, of which it makes 230 characters."""
RAW_DEFLATE = -15
"""zlib's number for a stream without a header."""


def longest_remainder(dim: int) -> int:
    """Return the most characters that the text of a row of so many numbers has."""
    # What cannot be compressed grows by 5 bytes for each 16 KB; base64 has 4 characters for 3 bytes.
    return 6 * dim + 128


def remainders(rows: Floats, read: Floats) -> list[str]:
    """Return the text of each row of float32 (n, d) that differs from what is read back, (n, d)."""
    # Differences of unsigned integers exist for all bit patterns: they are modulo 2³².
    differences = (_bits(rows) - _bits(read)).view(np.int32)
    # 0, −1, 1, −2, … become 0, 1, 2, 3, …: the upper bytes of small ones are 0, and stand together.
    unsigned = ((differences << 1) ^ (differences >> 31)).view(np.uint32)
    planes = unsigned.astype("<u4").view(np.uint8).reshape(*rows.shape, 4).transpose(0, 2, 1)
    lossy = differences.any(axis=1)
    return [_text(row.tobytes()) if lossy[i] else "" for i, row in enumerate(planes)]


def with_remainders(read: Floats, texts: Sequence[Any], field: str) -> Floats:
    """Return the rows (n, d) from whose `read` the texts differ. field: that of the texts, for messages.

    Raises StateError for a text that `remainders` does not return.
    """
    lossy = [row for row, text in enumerate(texts) if text != ""]
    if not lossy:
        return read

    dim = read.shape[1]
    content = b"".join([_content(texts[row], 4 * dim, field) for row in lossy])
    planes = np.frombuffer(content, np.uint8).reshape(len(lossy), 4, dim).transpose(0, 2, 1)
    unsigned = np.ascontiguousarray(planes).view("<u4").reshape(len(lossy), dim).astype(np.uint32)
    differences = (unsigned >> 1) ^ (np.uint32(0) - (unsigned & 1))

    rows = read.copy()
    rows[lossy] = (_bits(read[lossy]) + differences).view(np.float32)
    return rows


def _bits(rows: Floats) -> Any:
    return np.ascontiguousarray(rows, np.float32).view(np.uint32)


def _text(content: bytes) -> str:
    stream = zlib.compressobj(LEVEL, zlib.DEFLATED, RAW_DEFLATE)
    return base64.b64encode(stream.compress(content) + stream.flush()).decode()


def _content(text: Any, size: int, field: str) -> bytes:
    """Return the bytes from which `_text` made a text. Raises StateError."""
    try:
        stream = zlib.decompressobj(RAW_DEFLATE)
        # One byte more shows that there are too many, and a hostile text takes no more memory.
        content = stream.decompress(base64.b64decode(text, validate=True), size + 1)
    except (TypeError, ValueError, zlib.error) as error:
        raise StateError(
            f"field {field!r} of a row is broken ({error}): write the row again"
        ) from None
    if len(content) != size or not stream.eof:
        raise StateError(
            f"field {field!r} of a row is broken: it is no text of {size:,} bytes: write the row again"
        )
    return content
