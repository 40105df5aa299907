"""The pages of the documentation, their code blocks, and the commands in them."""

import importlib.util
import re
import shlex
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from typer.main import get_command

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
README = ROOT / "README.md"
PAGES = [README, *sorted(DOCS.rglob("*.md"))]
SERVER = "http://localhost:19530"

FENCE = re.compile(
    r"(?:^[ ]*<!-- check: (?P<check>\w+) -->\n)?"
    r"^(?P<indent>[ ]*)```(?P<language>\w+)(?P<info>[^\n]*)\n(?P<text>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)
INLINE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")


@dataclass(frozen=True)
class Block:
    """A code block. check: "run" unless the comment before it names another check. title: of the file that it is."""

    page: Path
    line: int
    language: str
    title: str
    text: str
    check: str

    @property
    def place(self):
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def name_of(page):
    return page.relative_to(ROOT).as_posix()


@cache
def blocks(page):
    text = page.read_text()
    return [
        Block(
            page,
            text.count("\n", 0, found.start("language")) + 1,
            found["language"],
            (re.findall(r'title="([^"]+)"', found["info"]) or [""])[0],
            re.sub(rf"^{found['indent']}", "", found["text"], flags=re.MULTILINE),
            found["check"] or "run",
        )
        for found in FENCE.finditer(text)
    ]


@cache
def prose(page):
    """The text of a page without its code blocks and comments."""
    return re.sub(r"<!--.*?-->", "", FENCE.sub("", page.read_text()), flags=re.DOTALL)


def inline_code(page):
    return INLINE.findall(prose(page))


def command_lines(block):
    """The words of each command of a shell block."""
    for line in block.text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while words:
            ends = [place for place, word in enumerate(words) if word in ("&&", "|")]
            end = ends[0] if ends else len(words)
            yield words[:end]
            words = words[end + 1 :]


PROGRAM = "milvus-hubness"


@cache
def program():
    from milvus_hubness.cli import app

    return get_command(app)


def resolve(words):
    """The command that words after that of the program call, its name, and the rest. Raises KeyError."""
    command, called = program(), words[:1]
    while getattr(command, "commands", None) and len(called) < len(words):
        command = command.commands[words[len(called)]]
        called = words[: len(called) + 1]
    return command, " ".join(called), words[len(called) :]


@cache
def all_commands():
    """Each command that is no group, by the words that call it."""

    def below(group, name):
        for word, command in group.commands.items():
            if getattr(command, "commands", None):
                yield from below(command, f"{name} {word}")
            else:
                yield f"{name} {word}", command

    return dict(below(program(), PROGRAM))


def options(command):
    return {
        name for parameter in command.params for name in parameter.opts if name.startswith("-")
    } | {"--help"}


@cache
def hooks():
    """The module that generates parts of the pages."""
    spec = importlib.util.spec_from_file_location("docs_hooks", DOCS / "hooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def table_rows(text, heading):
    """The cells of each row of the first table after a heading."""
    section = re.split(rf"^#+ {re.escape(heading)}$", text, flags=re.MULTILINE)[1]
    lines = [
        line
        for line in re.split(r"^#", section, flags=re.MULTILINE)[0].splitlines()
        if line.startswith("|")
    ]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines[2:]]
