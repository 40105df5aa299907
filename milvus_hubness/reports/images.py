"""Images of items on a page: some are embedded, and those on the web are linked.

Embedded are files below one folder and data URLs. Rows name their images, so a user who writes rows
may name any file of the machine that makes the page, and the page is passed on. So a file is read
only below the folder that the operator names, and embedded only if all of it is an image.
"""

from __future__ import annotations

import base64
import binascii
import os
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from markupsafe import Markup

from milvus_hubness.basics.files.opening import read_beneath
from milvus_hubness.basics.texts import visible_line
from milvus_hubness.errors import redacted
from milvus_hubness.reports.image_formats import image_in

LARGEST = 256 * 1024
"""Maximum size of an image that is embedded, in bytes."""
_IN_ADDRESSES = "/:?#[]@!$&'()*+,;=%-._~"
"""Characters other than letters and digits that stay as they are in the address of a link."""


class Images:
    """The images of one page.

    folder: its files are embedded; None embeds no files.
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        self._folder = folder

        self.left_out = 0
        """Number of references so far that are shown as nothing."""

    def element(self, reference: str, name: str) -> Markup:
        """Return the element for an image: the image, a link to the web, or nothing, which counts.

        reference: an http(s) or data URL, a file URL, or a path, which is relative to the folder.
        """
        try:
            element = self._element(reference, name)
        except ValueError:
            # `urlsplit` refuses some texts. A row may hold any, and none of them spoils a page.
            element = None

        if element is None:
            self.left_out += 1
        return element or Markup("")

    @property
    def remark(self) -> str | None:
        """What is left out, as one line; None if nothing is."""
        if not self.left_out:
            return None
        count = f"{self.left_out:,} image{'' if self.left_out == 1 else 's'} left out: "
        formats = f"PNG, JPEG, GIF or WebP of up to {LARGEST // 1024} KiB"

        if self._folder is None:
            return f"{count}files are shown only with --image-folder, and only {formats}"
        return f"{count}not a {formats} below the image folder"

    def _element(self, reference: str, name: str) -> Markup | None:
        parts = urlsplit(reference)
        if parts.scheme in ("http", "https"):
            return _link(reference, name)

        if parts.scheme == "data":
            content = _data(parts.path)
        elif parts.scheme == "file":
            content = self._file(unquote(parts.path)) if parts.netloc in ("", "localhost") else None
        else:
            content = self._file(reference)

        # The type is that of the content, not the one that a name or a data URL claims.
        image = image_in(content) if content else None
        if image is None:
            return None

        source = base64.b64encode(image.content).decode()
        return Markup('<img src="data:image/{};base64,{}" alt="Image of {}">').format(
            image.subtype, source, name
        )

    def _file(self, path: str) -> bytes | None:
        return None if self._folder is None else read_beneath(self._folder, path, LARGEST)


def _data(text: str) -> bytes | None:
    """Return the content of a data URL in base64, up to `LARGEST`."""
    head, comma, encoded = text.partition(",")
    # The length is checked before decoding: a row may hold a text of any size.
    if not comma or not head.endswith(";base64") or len(encoded) > 4 * LARGEST // 3 + 4:
        return None
    try:
        return base64.b64decode(unquote(encoded), validate=True)
    except binascii.Error:
        return None


def _link(reference: str, name: str) -> Markup | None:
    """Return a link that names its host; None for an address without a host.

    The page loads nothing from there, and nobody follows the link unawares.
    """
    # An address may hold a password, and the page is passed on.
    parts = urlsplit(redacted(reference))
    host = parts.hostname
    if not host:
        return None
    address = quote(urlunsplit(parts), safe=_IN_ADDRESSES)
    element = '<a href="{}" rel="noopener noreferrer nofollow">Image of {}, at {}</a>'
    return Markup(element).format(address, name, visible_line(_in_ascii(host)))


def _in_ascii(host: str) -> str:
    """Return a host as browsers ask for it: no letter of another script looks like a Latin one."""
    try:
        return host.encode("idna").decode()
    except UnicodeError:
        return host.encode("unicode_escape").decode()
