"""Images of items on a page: embedded thumbnails of local files, links to others."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from urllib.parse import unquote, urlsplit

from markupsafe import Markup

from milvus_hubness.errors import redacted

SIDE = 200
"""Maximum width and height of a thumbnail, in pixels."""
SMALL = 64 * 1024
"""Maximum size of a file that is embedded as it is, without Pillow, in bytes."""
KINDS = {b"\x89PNG\r\n\x1a\n": "png", b"\xff\xd8\xff": "jpeg", b"GIF8": "gif", b"RIFF": "webp"}
"""The first bytes of the images that browsers show."""


def picture(reference: str, name: str) -> Markup:
    """Return the element for an image: itself, or a link to one on the web and to a file that cannot be embedded; empty
    for a reference to neither. reference: a URL, or a path, which is relative to the working folder."""
    try:
        parts = urlsplit(reference)
        if parts.scheme in ("http", "https"):
            return _link(redacted(reference), name)
        path = Path(unquote(parts.path) if parts.scheme == "file" else reference)
        if not path.is_file():
            return Markup("")
        source = _thumbnail(path) or _whole(path)
    except (OSError, ValueError):
        return Markup("")
    if source is None:
        return _link(path.resolve().as_uri(), name)
    return Markup('<img src="{}" alt="Image of {}">').format(source, name)


def _link(address: str, name: str) -> Markup:
    return Markup('<a href="{}" rel="noreferrer">Image of {}</a>').format(address, name)


def _thumbnail(path: Path) -> str | None:
    """Return a smaller JPEG image as a data URI; None without Pillow, or for a file that it cannot read."""
    try:
        from PIL import Image
    except ImportError:
        return None
    content = io.BytesIO()
    try:
        with Image.open(path) as image:
            image.thumbnail((SIDE, SIDE))
            image.convert("RGB").save(content, "JPEG", quality=80)
    except (OSError, ValueError, Image.DecompressionBombError):
        return None
    return _data_uri("jpeg", content.getvalue())


def _whole(path: Path) -> str | None:
    """Return a small image file as a data URI; None for a larger or another file."""
    if path.stat().st_size > SMALL:
        return None
    content = path.read_bytes()
    kind = next((kind for start, kind in KINDS.items() if content.startswith(start)), None)
    return _data_uri(kind, content) if kind else None


def _data_uri(kind: str, content: bytes) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"
