"""The images that browsers show: PNG, JPEG, GIF and WebP, followed from first byte to last.

A file is taken for an image only if its structure holds to the end of the image. What follows the
end is no image, may be a secret, and is cut off. Sources: PNG, third edition; ITU T.81 (JPEG),
annex B; GIF89a; RFC 9649 (WebP).
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from typing import NamedTuple

MOST_PIXELS = 50_000_000
"""Maximum number of pixels: a small file may claim an image that fills the memory of a browser."""


class Image(NamedTuple):
    """An image."""

    subtype: str
    """Of its media type: "png" of image/png."""
    content: bytes
    """Its bytes, without what followed them."""


class _Span(NamedTuple):
    """The size of an image."""

    width: int
    """In pixels."""
    height: int
    """In pixels."""
    end: int
    """Number of bytes from the begin of the file to the end of the image."""


def image_in(content: bytes) -> Image | None:
    """Return the image at the begin of `content`.

    None if it is of none of the four formats, or has too many pixels.
    """
    for subtype, follow in _FORMATS.items():
        try:
            span = follow(content)
        except (IndexError, ValueError, struct.error):
            # The file ends before the image does.
            span = None

        if span and 0 < span.width * span.height <= MOST_PIXELS and span.end <= len(content):
            return Image(subtype, content[: span.end])
    return None


def _png(content: bytes) -> _Span | None:
    if not content.startswith(b"\x89PNG\r\n\x1a\n"):
        return None

    at = 8
    size = (0, 0)
    has_data = False
    while True:
        # A chunk: the length of its data, its type, the data, and a check sum of type and data.
        length, chunk_type = struct.unpack_from(">I4s", content, at)
        end = at + 12 + length
        [check] = struct.unpack_from(">I", content, end - 4)
        is_whole = end <= len(content) and zlib.crc32(content[at + 4 : end - 4]) == check
        # The header is the first chunk, and no other one.
        if not is_whole or (at == 8) != (chunk_type == b"IHDR"):
            return None

        if chunk_type == b"IHDR":
            if length != 13:
                return None
            size = struct.unpack_from(">II", content, at + 8)
        has_data |= chunk_type == b"IDAT"
        at = end
        if chunk_type == b"IEND":
            return _Span(*size, at) if has_data else None


FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}
"""The markers of JPEG that begin a frame and have its size."""
ALONE = {0x01, *range(0xD0, 0xD8)}
"""The markers of JPEG that have no length."""


def _jpeg(content: bytes) -> _Span | None:
    if not content.startswith(b"\xff\xd8\xff"):
        return None

    at = 2
    size = (0, 0)
    while content[at] == 0xFF:
        marker = content[at + 1]
        # Any number of bytes of 255 may fill up before a marker.
        if marker == 0xFF:
            at += 1
            continue
        # End of image.
        if marker == 0xD9:
            return _Span(*size, at + 2)
        at += 2
        if marker in ALONE:
            continue

        # A segment: its length, which counts its own two bytes, and its data.
        [length] = struct.unpack_from(">H", content, at)
        if length < 2 or marker in (0x00, 0xD8):
            return None
        if marker in FRAMES:
            height, width = struct.unpack_from(">HH", content, at + 3)
            size = (width, height)
        at += length

        # Start of scan: the data that follows has no length. A byte of 255 in it is followed by 0
        # or by a restart marker, so any other marker ends it.
        if marker == 0xDA:
            if not all(size):
                return None
            at = content.index(0xFF, at)
            while content[at + 1] == 0x00 or content[at + 1] in ALONE:
                at = content.index(0xFF, at + 2)

    return None


def _gif(content: bytes) -> _Span | None:
    if content[:6] not in (b"GIF87a", b"GIF89a"):
        return None

    width, height, flags = struct.unpack_from("<HHB", content, 6)
    at = 13 + _colours(flags)
    has_image = False
    while True:
        block = content[at]
        # Trailer.
        if block == 0x3B:
            return _Span(width, height, at + 1) if has_image else None
        # Extension, with its label.
        if block == 0x21:
            at += 2
        # Image descriptor, with its own colours and the code size of its data.
        elif block == 0x2C:
            has_image = True
            at += 11 + _colours(content[at + 9])
        else:
            return None

        # Data: sub-blocks, each with its length before it, up to one of length 0.
        while content[at]:
            at += 1 + content[at]
        at += 1


def _colours(flags: int) -> int:
    """Return the size of a table of colours in bytes."""
    return 3 << (1 + (flags & 7)) if flags & 0x80 else 0


def _webp(content: bytes) -> _Span | None:
    riff, length, form = struct.unpack_from("<4sI4s", content, 0)
    end = 8 + length
    if riff != b"RIFF" or form != b"WEBP" or end > len(content):
        return None

    at = 12
    size = (0, 0)
    has_image = False
    while at + 8 <= end:
        chunk_type, length = struct.unpack_from("<4sI", content, at)
        at += 8
        if at + length > end:
            return None

        # The canvas of an extended file: its images may be smaller or, in a malformed file, larger.
        if chunk_type == b"VP8X":
            size = (_three(content, at + 4) + 1, _three(content, at + 7) + 1)
        # A lossy image, with the start code of a key frame.
        elif chunk_type == b"VP8 " and content[at + 3 : at + 6] == b"\x9d\x01\x2a":
            width, height = struct.unpack_from("<HH", content, at + 6)
            size = _larger(size, (width & 0x3FFF, height & 0x3FFF))
            has_image = True
        # A lossless image, with its signature: two times 14 bits are its size, less one.
        elif chunk_type == b"VP8L" and content[at] == 0x2F:
            [bits] = struct.unpack_from("<I", content, at + 1)
            size = _larger(size, ((bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1))
            has_image = True
        # A frame of an animation.
        has_image |= chunk_type == b"ANMF" and all(size)

        # Chunks are filled up to an even length.
        at += length + length % 2

    return _Span(*size, end) if has_image and at == end else None


def _larger(first: tuple[int, int], second: tuple[int, int]) -> tuple[int, int]:
    return max(first, second, key=lambda size: size[0] * size[1])


def _three(content: bytes, at: int) -> int:
    return int.from_bytes(content[at : at + 3], "little")


_FORMATS: dict[str, Callable[[bytes], _Span | None]] = {
    "png": _png,
    "jpeg": _jpeg,
    "gif": _gif,
    "webp": _webp,
}
"""What follows each format to its end; it raises or returns None for what is no such image."""
