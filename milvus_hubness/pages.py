"""Jinja2 templates of the HTML pages: every value is escaped, and a missing name is an error."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined, Template

from milvus_hubness.charts import number


def page_template(
    package: str, name: str, longest: int, filters: Mapping[str, Callable[..., Any]]
) -> Template:
    """Return the template `name` in the folder of a package.

    longest: characters that the filter `short` leaves of a text. filters: further filters, beside `short` and
    `number`.
    """
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"number": number, "short": partial(_short, longest=longest), **filters}
    return environment.from_string(files(package).joinpath(name).read_text("utf-8"))


def _short(value: object, longest: int) -> str:
    text = str(value)
    return text if len(text) <= longest else text[: longest - 1] + "…"
