"""How results look as the last value of a notebook cell."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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


def table(
    title: str, lines: Iterable[str], headings: Sequence[str], rows: Iterable[Sequence[str]]
) -> str:
    """Return a title, lines of text and a table with a heading for each column, as HTML."""
    head = "".join(f"<th>{_shown(heading)}</th>" for heading in headings)
    body = "".join(
        f"<tr>{''.join(f'<td>{_shown(cell)}</td>' for cell in row)}</tr>" for row in rows
    )
    paragraphs = "".join(f"<p>{_shown(line)}</p>" for line in lines if line)
    return (
        f"<h3>{_shown(title)}</h3>{paragraphs}"
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    )


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
