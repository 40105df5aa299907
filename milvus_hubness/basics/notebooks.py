"""How results look as the last value of a notebook cell."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

from milvus_hubness.basics.texts import visible_line

FRAME = (
    '<iframe srcdoc="{page}" title="{title}" style="width: 100%; height: 40em; border: 0"></iframe>'
)
"""A whole page in a cell, whose styles and scripts stay apart from those of the notebook."""


def framed(page: str, title: str) -> str:
    """Return a page as an element of another page."""
    return FRAME.format(page=escape(page), title=escape(visible_line(title)))


class ShownAsTable:
    """A result whose facts, those of `to_dict`, a notebook shows as a table."""

    def to_dict(self) -> dict[str, Any]:
        raise NotImplementedError

    def _repr_html_(self) -> str:
        """Return the facts as a table, without the empty ones. Jupyter calls this."""
        facts = self.to_dict().items()
        rows = (
            f"<tr><th>{_shown(name.replace('_', ' '))}</th><td>{_shown(value)}</td></tr>"
            for name, value in facts
            if value not in (None, "", [], (), {})
        )
        title = f"<caption>{escape(type(self).__name__)}</caption>"
        return f"<table>{title}{''.join(rows)}</table>"


def _shown(value: object) -> str:
    """Return a value as HTML: its lines are items, and a name is never taken for an element."""
    if isinstance(value, Mapping):
        return "<br>".join(f"{_shown(name)}: {_shown(inner)}" for name, inner in value.items())
    if isinstance(value, Iterable) and not isinstance(value, str | bytes):
        return "<br>".join(map(_shown, value))
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return escape(visible_line(f"{value:.6g}" if isinstance(value, float) else str(value)))
