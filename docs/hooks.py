"""Hooks of MkDocs: the generated parts of the reference, and the files of the repository that pages link to.

A page has a line `<!-- generated: NAME -->` where one of GENERATED belongs. A link that leaves the folder of the pages,
such as ../benchmarks/results/quality.md, works in the repository; the site gets a copy of that file.
"""

from __future__ import annotations

import ast
import itertools
import json
import posixpath
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
ROOT = DOCS.parent
MARKER = re.compile(r"^<!-- generated: (\w+) -->$", re.MULTILINE)
LINK = re.compile(r"(?<=\]\()([^)\s]+)(?=\))")
COPIES = "files"
"""Folder of the site with the copies of files of the repository."""


def commands() -> Iterator[tuple[str, Any]]:
    """Yield each command of milvus-hubness with the words that call it, groups left out."""
    from typer.main import get_command

    from milvus_hubness.cli import app

    yield from _below(get_command(app), "milvus-hubness")


def _below(group: Any, words: str) -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _below(command, f"{words} {name}")
        else:
            yield f"{words} {name}", command


def command_reference() -> str:
    """Return a section for each command: its help, its arguments and its options."""
    return "\n\n".join(_command_section(words, command) for words, command in commands())


def _command_section(words: str, command: Any) -> str:
    """Return the help of a command as Markdown. The texts are those of `--help`, with the panels of the options."""
    from milvus_hubness.cli.command_line import help_row

    context = command.context_class(command, info_name=words)
    panels: dict[str, list[str]] = {}
    for parameter in command.get_params(context):
        if record := help_row(parameter, context):
            heading = "Arguments" if parameter.param_type_name == "argument" else "Options"
            panel = getattr(parameter, "rich_help_panel", None) or heading
            panels.setdefault(panel, []).append(_row(*record))
    usage = " ".join([words, *command.collect_usage_pieces(context)])
    parts = [f"## {words}", f"```text\n{usage}\n```", _plain(command.help)]
    parts += ["\n".join([f"| {panel} | |", "|---|---|", *rows]) for panel, rows in panels.items()]
    if epilog := getattr(command, "epilog", None):
        parts.append(f"```text\n{_without_marks(epilog)}\n```")
    return "\n\n".join(parts)


def _row(names: str, meaning: str) -> str:
    options = names.replace("|", "\\|")
    return f"| `{options}` | {_escaped(meaning)} |"


def _without_marks(text: str) -> str:
    """Return a help text without the marks by which typer keeps its line breaks."""
    return text.replace("\b", "").strip()


def _plain(text: str) -> str:
    return _escaped(_without_marks(text))


def _escaped(text: str) -> str:
    return re.sub(r"([|<>*_\[\]])", r"\\\1", text)


def error_reference() -> str:
    """Return a table of all errors with their bases."""
    from milvus_hubness import errors

    kinds = [
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, errors.HubnessError)
    ]
    rows = (
        f"| `{kind.__name__}` | `{kind.__bases__[0].__name__}` | {' '.join(kind.__doc__.split())} |"
        for kind in kinds
    )
    return "\n".join(["| error | is a | meaning |", "|---|---|---|", *rows])


def state_reference() -> str:
    """Return a table for each part of the collection state, and its JSON schema.

    What a key means is the docstring under the field. Pydantic could put it into the schema, but
    would read the sources for that whenever the package is imported.
    """
    from milvus_hubness.correction.state import CollectionState

    schema = CollectionState.model_json_schema()
    definitions = {CollectionState.__name__: schema, **schema["$defs"]}
    texts = field_texts(ROOT / "milvus_hubness" / "correction")
    parts = [
        _state_section(name, definition, texts.get(name, {}))
        for name, definition in definitions.items()
    ]
    return "\n\n".join([*parts, "## JSON schema", f"```json\n{json.dumps(schema, indent=2)}\n```"])


def field_texts(folder: Path) -> dict[str, dict[str, str]]:
    """Return the docstrings under the fields of all classes in a folder, by class and field."""
    texts: dict[str, dict[str, str]] = {}
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ClassDef):
                texts.setdefault(node.name, {}).update(_texts_under_fields(node))
    return texts


def _texts_under_fields(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for field, text in itertools.pairwise(node.body):
        is_field = isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        is_text = isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
        if is_field and is_text:
            yield field.target.id, " ".join(str(text.value.value).split())


def _state_section(name: str, definition: dict[str, Any], texts: dict[str, str]) -> str:
    required = definition.get("required", ())
    lines = [
        f"## {name}",
        definition.get("description", ""),
        "| key | values | default | meaning |\n|---|---|---|---|",
    ]
    for key, value in definition.get("properties", {}).items():
        default = "required" if key in required else f"`{json.dumps(value.get('default'))}`"
        meaning = texts.get(key, "").replace("|", "\\|")
        lines[-1] += f"\n| `{key}` | {_type(value)} | {default} | {meaning} |"
    return "\n\n".join(lines)


def _type(value: dict[str, Any]) -> str:
    """Return the values that a JSON schema allows, in words."""
    if "anyOf" in value:
        return " or ".join(_type(option) for option in value["anyOf"])
    if "$ref" in value:
        name = value["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "enum" in value:
        return ", ".join(f"`{choice}`" for choice in value["enum"])
    if "const" in value:
        return f"`{value['const']}`"
    if value.get("type") == "array":
        return f"list of {_type(value['items'])}" if "items" in value else "list"
    for values in (value.get("additionalProperties"), *value.get("patternProperties", {}).values()):
        if isinstance(values, dict):
            return f"object of {_type(values)}"
    return str(value.get("format", value.get("type", "any"))) + _bounds(value)


def _bounds(value: dict[str, Any]) -> str:
    """Return the bounds of a number or of the length of a text, in words."""
    words = []
    for key, word in {
        "minimum": "from",
        "exclusiveMinimum": "above",
        "maximum": "to",
        "exclusiveMaximum": "below",
    }.items():
        if key in value:
            words.append(
                f"{word} {value[key]:,}"
                if isinstance(value[key], int)
                else f"{word} {value[key]:g}"
            )
    if "maxLength" in value:
        words.append(f"of at most {value['maxLength']} characters")
    return f" {' '.join(words)}" if words else ""


def front_page() -> str:
    """Return the first screen of README.md, up to its second heading, for the home of the site.

    Raises ValueError for a link to a file that the site does not have.
    """
    first_screen = (ROOT / "README.md").read_text("utf-8").partition("\n## ")[0]

    def from_docs(link: re.Match[str]) -> str:
        target = link[0]
        if "://" not in target and not target.startswith("docs/"):
            raise ValueError(f"the first screen of README.md links to {target!r}, outside of docs")
        return target.removeprefix("docs/")

    return LINK.sub(from_docs, first_screen)


def extending_reference() -> str:
    """Return a table for each group of names for extensions, with the reason why each is there."""
    stub = (ROOT / "milvus_hubness/extending.pyi").read_text("utf-8")
    lines = []
    reason = ""
    for line in map(str.strip, stub.partition("__all__ = [")[2].splitlines()):
        if line.startswith("# -- "):
            lines += ["", f"| {line.removeprefix('# -- ')} | |", "|---|---|"]
        elif line.startswith("# "):
            reason = line.removeprefix("# ").removesuffix(".")
        elif line.startswith('"'):
            lines.append(f"| `{ast.literal_eval(line.removesuffix(','))}` | {reason} |")
    return "\n".join(lines).strip()


GENERATED: dict[str, Callable[[], str]] = {
    "front": front_page,
    "commands": command_reference,
    "errors": error_reference,
    "extending": extending_reference,
    "state": state_reference,
}


def outside(page: str, link: str) -> str | None:
    """Return the file of the repository that a link of a page names, if it is outside the folder of the pages."""
    path = link.partition("#")[0]
    if not path or "://" in path or path.startswith("mailto:"):
        return None
    place = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), path))
    if place.startswith("docs/"):
        return None
    return posixpath.join(place, "README.md") if (ROOT / place).is_dir() else place


def on_files(files: Any, config: Any) -> Any:
    """Add copies of the files of the repository that pages link to."""
    from mkdocs.structure.files import File

    pages = [file for file in files if file.is_documentation_page()]
    named = {
        outside(page.src_uri, link) for page in pages for link in LINK.findall(page.content_string)
    }
    for place in sorted(filter(None, named)):
        text = (ROOT / place).read_text("utf-8")
        files.append(File.generated(config, f"{COPIES}/{place}.txt", content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **arguments: Any) -> str:
    """Fill in the generated parts, and point links to files of the repository at their copies."""

    def to_copy(link: re.Match[str]) -> str:
        place = outside(page.file.src_uri, link[0])
        folder = posixpath.dirname(page.file.src_uri)
        return posixpath.relpath(f"{COPIES}/{place}.txt", folder or ".") if place else link[0]

    return MARKER.sub(lambda marker: GENERATED[marker[1]](), LINK.sub(to_copy, markdown))
