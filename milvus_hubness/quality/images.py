"""Images of items on a page: small local files are embedded, others are linked."""

from __future__ import annotations

import base64
from pathlib import Path
from urllib.parse import unquote, urlsplit

from markupsafe import Markup

from milvus_hubness.errors import redacted

LARGEST = 256 * 1024
"""Maximum size of a file that is embedded, in bytes."""
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
        content = path.read_bytes() if path.stat().st_size <= LARGEST else b""
    except (OSError, ValueError):
        return Markup("")
    kind = next((kind for start, kind in KINDS.items() if content.startswith(start)), None)
    if kind is None:
        return _link(path.resolve().as_uri(), name)
    source = base64.b64encode(content).decode()
    return Markup('<img src="data:image/{};base64,{}" alt="Image of {}">').format(kind, source, name)


def _link(address: str, name: str) -> Markup:
    return Markup('<a href="{}" rel="noreferrer">Image of {}</a>').format(address, name)
