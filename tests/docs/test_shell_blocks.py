"""The commands on the pages parse: each option and argument exists in the program that the page calls."""

import json
import re
import shlex

import pytest

from milvus_hubness.jobs.common.control_file import check_settings
from tests.docs import pages
from tests.support.projects import project

SHELLS = [block for page in pages.PAGES for block in pages.blocks(page) if block.language == "sh"]
OTHERS = {"--index-url", "--build-arg", "--help-all"}
"""Options of pip and Docker in the text, and one of most commands."""


@pytest.mark.parametrize("block", SHELLS, ids=lambda block: block.place)
def test_commands_parse(block):
    for words in pages.command_lines(block):
        if words[0] == pages.PROGRAM:
            command, name, arguments = pages.resolve(words)
            assert not getattr(command, "commands", None), f"{name} is a group of commands"
            command.make_context(name, list(arguments))
        elif words[0] == "make":
            assert re.search(
                rf"^{words[1]}:", (pages.ROOT / "Makefile").read_text(), re.MULTILINE
            ), words
        elif words[0] == "python":
            assert words[1] in {other.title for other in pages.blocks(block.page)}, words
        elif words[0] == "echo":
            assert words[2:] == [">", "control.json"], words
            check_settings(json.loads(words[1]))
        else:
            assert words[0] in {".", "export", "pip", "python3", "docker"}, words


def test_commands_in_the_text_exist():
    seen = 0
    for page in pages.PAGES:
        for code in pages.inline_code(page):
            words = (
                shlex.split(code.replace("…", ""))
                if re.match(r"(milvus|qdrant)-hubness ", code)
                else []
            )
            if words and not words[1].isupper():
                command, name, arguments = pages.resolve(words)
                named = {word.partition("=")[0] for word in arguments if word.startswith("--")}
                assert named <= pages.options(command), (
                    f"{pages.name_of(page)}: {name} has no {named}"
                )
                seen += 1
    assert seen > 20


def commands_of(page):
    """The commands that a page calls in its blocks or names in its text, of which a group stands for all its own; all
    for the pages of the reference."""
    if page.parent.name == "reference":
        return set(pages.all_commands())
    text = page.read_text()
    calls = [
        words for block in SHELLS if block.page == page for words in pages.command_lines(block)
    ]
    called = {pages.resolve(words)[1] for words in calls if words[0] == pages.PROGRAM}
    short = {
        name
        for name in pages.all_commands()
        if re.search(rf"`{name.split(' ', 1)[1]}(?![\w-])", text)
    }
    groups = {
        name
        for name in pages.all_commands()
        if len(name.split()) == 3 and re.search(rf"`{name.split()[1]}[ `]", text)
    }
    return called | short | groups | {name for name in pages.all_commands() if name in text}


def test_options_in_the_text_belong_to_a_command_of_the_page():
    seen = set()
    for page in pages.PAGES:
        exist = set().union(
            OTHERS, *(pages.options(pages.all_commands()[name]) for name in commands_of(page))
        )
        named = {
            name
            for code in pages.inline_code(page)
            for name in re.findall(r"(?<![\w-])--[a-z][a-z-]*", code)
        }
        assert named <= exist, f"{pages.name_of(page)} names {named - exist}"
        seen |= named
    assert len(seen) > 40


def test_every_command_is_shown_in_a_block():
    shown = {
        pages.resolve(words)[1]
        for block in SHELLS
        for words in pages.command_lines(block)
        if words[0] == pages.PROGRAM
    }
    assert shown == pages.all_commands().keys()


def test_extras_that_are_installed_exist():
    extras = set(project(".")["optional-dependencies"])
    named = {
        name
        for page in pages.PAGES
        for name in re.findall(r"milvus-hubness\[(\w+)\]", page.read_text())
    }
    assert named <= extras
    table = {
        name
        for row in pages.table_rows(pages.README.read_text(), "Install")
        for name in re.findall(r"\[(\w+)\]`", row[0])
    }
    assert table == extras
