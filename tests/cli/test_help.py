"""The help of the commands: a summary, panels, an example that parses, and the completion of shells."""

import os
import re
import shlex
import subprocess
import sys
from typing import Annotated

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from milvus_hubness.cli import COMMANDS as LISTED
from milvus_hubness.cli import app
from milvus_hubness.cli.command_line import PANELS, RARE, WIDEST, command_line, help_row
from milvus_hubness.correction.estimators.base import ALIASES

VERBS = {
    "Add", "Carry", "Catch", "Change", "Compare", "Compute", "Copy", "Correct", "Do", "Drop", "Evaluate", "Keep",
    "List", "Make", "Match", "Remove", "Run", "Show", "Train", "Try", "Turn", "Undo", "Write",
}  # fmt: skip


def commands(name, command):
    """Each command and group under a name, by the words that call it."""
    yield name, command
    for word, inner in getattr(command, "commands", {}).items():
        yield from commands(f"{name} {word}", inner)


COMMANDS = dict(commands("milvus-hubness", get_command(app)))


def test_the_help_names_each_estimator():
    told = CliRunner().invoke(app, ["refresh", "--help"]).output
    for alias in ALIASES:
        assert re.search(rf"\b{alias}\b", told), alias


@pytest.mark.parametrize("words", COMMANDS)
def test_a_command_has_a_summary_in_one_line_that_says_what_to_do(words):
    summary, *rest = COMMANDS[words].help.splitlines()
    assert summary.split()[0].strip(",") in VERBS
    assert summary.endswith(".")
    assert len(summary) <= 110
    assert not rest or not rest[0], "an empty line follows the summary"


@pytest.mark.parametrize("words", COMMANDS)
def test_the_example_of_a_command_calls_it_and_is_valid(words):
    command = COMMANDS[words]
    example = shlex.split(command.epilog)
    assert example[: len(words.split())] == words.split()
    called, group = words.split(), command
    while hasattr(group, "commands"):
        called.append(example[len(called)])
        group = group.commands[called[-1]]
    arguments = example[len(called) :]
    context = group.make_context(" ".join(called), list(arguments))
    assert not context.args
    for option in (word for word in arguments if word.startswith("--")):
        assert any(option in parameter.opts for parameter in group.params), option


def help_of(words, command):
    """All that the help of a command has, which its usual help may leave out."""
    has_rare = any(parameter.name in RARE for parameter in command.params)
    option = "--help-all" if has_rare else "--help"
    return CliRunner().invoke(app, [*words.split()[1:], option], terminal_width=100).output


@pytest.mark.parametrize("words", COMMANDS)
def test_rare_options_are_behind_help_all_alone(words):
    command = COMMANDS[words]
    usual = CliRunner().invoke(app, [*words.split()[1:], "--help"], terminal_width=100).output
    rare = {name for each in command.params if each.name in RARE for name in each.opts}
    assert bool(rare) == ("--help-all" in usual)
    for option in rare:
        assert f"  {option} " not in usual
        assert f"  {option} " in help_of(words, command)


def test_a_wide_terminal_is_used(run):
    for columns, widest in (("70", 70), ("100", 100), ("200", WIDEST)):
        shown = run("refresh", "--help", COLUMNS=columns).stdout.split("\nExample")[0]
        width = max(map(len, shown.splitlines()))
        assert widest - 12 < width <= widest


def test_an_option_in_no_panel_is_named():
    def command(stray: Annotated[bool, "An option."] = False) -> None: ...

    with pytest.raises(TypeError, match="the option of 'stray' is in no panel"):
        command_line("Text.", command)


@pytest.mark.parametrize("words", COMMANDS)
def test_every_option_is_in_a_panel_of_the_help(words):
    command = COMMANDS[words]
    shown = help_of(words, command)
    heading, panel_of = "", {}
    for line in shown.splitlines():
        if line.endswith(":") and not line.startswith(" "):
            heading = line[:-1]
        elif line.startswith("  --"):
            panel_of[line.split()[0].strip(",")] = heading
    own = {
        parameter.opts[0]: parameter
        for parameter in command.params
        if parameter.param_type_name == "option"
    }
    assert panel_of.pop("--help") == "Help"
    if any(parameter.name in RARE for parameter in command.params):
        assert panel_of.pop("--help-all") == "Help"
    assert panel_of.keys() == own.keys()
    for option, parameter in own.items():
        is_help = option in ("--version", "--install-completion", "--show-completion")
        assert panel_of[option] == ("Help" if is_help else parameter.rich_help_panel), option
        assert is_help or panel_of[option] in PANELS, option
    headings = [
        line[:-1] for line in shown.splitlines() if line[:-1] in PANELS and line.endswith(":")
    ]
    assert headings == [name for name in PANELS if name in headings]
    assert command.epilog in shown, "the example is on one line, to be copied"


@pytest.mark.parametrize(
    ("words", "choices"),
    [
        ("enable", "off|warn|refuse"),
        ("migrate run", "off|warn|refuse"),
        ("hubs", "off|warn|refuse"),
    ],
)
def test_the_help_lists_the_choices_of_an_option(words, choices):
    assert choices in CliRunner().invoke(app, [*words.split(), "--help-all"]).output


def completed(text):
    """What the completion of bash offers for the last word of a command line."""
    variables = {
        "_MILVUS_HUBNESS_COMPLETE": "complete_bash",
        "COMP_WORDS": text,
        "COMP_CWORD": str(len(text.split(" ")) - 1),
    }
    code = "import sys; sys.argv[0] = 'milvus-hubness'; from milvus_hubness.cli import main; main()"
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command, env={**os.environ, **variables}, capture_output=True, text=True, check=False
    ).stdout


@pytest.mark.parametrize(
    ("text", "offered"),
    [
        ("milvus-hubness s", ["status", "sweep", "serve"]),
        ("milvus-hubness migrate r", ["run", "rollback"]),
        (
            "milvus-hubness enable products --on-hub ",
            ["off", "warn", "refuse"],
        ),
        ("milvus-hubness enable products --method d", ["dn", "dualis", "dbsn", "demand"]),
    ],
)
def test_a_shell_completes_commands_options_and_choices(text, offered):
    assert completed(text).split() == offered


def test_the_completion_of_a_shell_can_be_shown(tmp_path):
    """The shell is the process that calls the command."""
    code = "import sys; sys.argv = ['milvus-hubness', '--show-completion']; from milvus_hubness.cli import main; main()"
    script = tmp_path / "script.sh"
    script.write_text(f"{shlex.quote(sys.executable)} -c {shlex.quote(code)}\ntrue\n")
    done = subprocess.run(["bash", script], capture_output=True, text=True, check=False)
    assert "complete -o default -F _milvus_hubness_completion milvus-hubness" in done.stdout, (
        done.stderr
    )


@pytest.mark.parametrize("words", COMMANDS)
def test_one_convention_says_which_commands_write(words):
    """Commands write; with --plan they only show; --yes confirms what drops data for good, and the
    switch, for which a terminal gets a question."""
    parameters = {
        name: parameter for parameter in COMMANDS[words].params for name in parameter.opts
    }
    assert not parameters.keys() & {"--execute", "--apply", "--commit", "--dry-run", "--confirm"}
    if "--plan" in parameters:
        assert parameters["--plan"].help.endswith("; write nothing.")
    drops = "--drop" in parameters or words == "milvus-hubness sweep"
    assert (drops or words == "milvus-hubness migrate run") == ("--yes" in parameters)


@pytest.mark.parametrize("words", COMMANDS)
def test_each_option_has_its_name_once(words):
    """At a terminal too. No option has a second name that nobody has given it."""
    shown = help_of(words, COMMANDS[words])
    for parameter in COMMANDS[words].params:
        if parameter.param_type_name == "option":
            assert [parameter.opts, parameter.secondary_opts] == [parameter.opts[:1], []]
    assert "  --help" in shown
    assert not re.search(r"^  --[\w-]+, ", shown, re.MULTILINE)


PYTHON_WORDS = re.compile(r"<[a-z]|\{|\b(TEXT|INTEGER|FLOAT|PATH|DIRECTORY)\b")
"""What typer calls values by default, in one version or another."""


@pytest.mark.parametrize("words", COMMANDS)
def test_values_are_called_by_words_of_users(words):
    command = COMMANDS[words]
    usage = help_of(words, command).split("\n\n")[0]
    context = command.context_class(command, info_name=words)
    rows = [
        row for parameter in command.get_params(context) if (row := help_row(parameter, context))
    ]
    for text in (usage, *(names for names, _ in rows)):
        # Choices list their values.
        assert not PYTHON_WORDS.search(re.sub(r"<[^>]*\|[^>]*>", "", text)), text


def test_the_help_says_what_commands_are_for():
    shown = CliRunner().invoke(app, ["--help"], terminal_width=100).output
    sections = {}
    for line in shown.splitlines():
        if line.endswith(":") and not line.startswith(" "):
            sections[line[:-1]] = []
        elif re.match(r"  [a-z]", line):
            sections[next(reversed(sections))].append(line.split()[0])
    del sections["Help"], sections["Example"]
    assert list(sections) == ["Look", "Correct", "Keep", "Serve"]
    listed = [name for names in sections.values() for name in names]
    assert listed == list(LISTED), "the order is that of the list"
