"""Typer command lines from plain functions: shared options, panels of the help, and its layout.

A command is a function whose parameters are its options:

    def refresh(
        collection: Annotated[str, typer.Argument(help="Corrected collection.")],
        connection: Connection,
        force: Annotated[bool, "Write all biases again."] = False,
        rows_per_second: Annotated[float | None, "Maximum rate.", {"min": 1}] = None,
    ) -> None: ...

`command_line` registers it with typer, after three changes that typer has no setting for:

1. A parameter whose type is a dataclass, such as `connection`, becomes one option for each field.
   The function still gets the dataclass. So commands share groups of options.
2. A parameter that is annotated with a text becomes an option of its own name with that text as
   its help. A dictionary after the text has further arguments of `typer.Option`. Parameters that
   are annotated with `typer.Option` or `typer.Argument` stay as they are.
3. PANELS says in which panel of the help each option is. Typer itself shows panels only with rich,
   whose import takes longer than most commands; `Command` and `Group` show them without it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import MISSING, fields, is_dataclass
from functools import wraps
from pathlib import Path
from textwrap import indent
from types import UnionType
from typing import Annotated, Any, ClassVar, Union, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command, get_group
from typer.models import ArgumentInfo, OptionInfo

PANELS = {
    "Source": (
        "uri",
        "field", "filter", "vector", "pairs",
        "pairs_queries", "key_column", "ignore_identical", "queries",
        "row", "query", "query_number", "items", "metric", "query_text", "collection",
        "encoder", "config", "upstream",
        "upstream_tls", "renamed_from",
    ),
    "Bank": (
        "bank", "bank_column", "bank_name", "file", "column", "target_bank", "rate", "size",
        "off",
    ),
    "Method": (
        "method", "param", "gate", "strength", "profile",
        "max_miss_rate", "refit", "refit_share", "form", "candidates", "limit",
        "with_bank", "one_to_one", "kind", "kinds", "prior", "prior_from", "prior_weight",
        "no_prior", "control_arm", "share",
    ),
    "Hub guard": (
        "on_hub", "suspicious", "alert_budget",
    ),
    "Copy": (
        "target", "alias", "rename", "index_type", "index_param", "keep_former",
        "restart", "drop", "keep", "keep_samples",
    ),
    "Load": (
        "rows_per_second", "max_calls", "workers",
        "max_message_mib", "max_in_flight_mib", "drain",
    ),
    "Control": (
        "init", "plan", "rehearse", "quick", "yes", "force", "replaces", "resume", "once", "check", "restart_ttl",
        "postpone_cutover", "control", "host", "port", "tls_cert", "tls_key",
        "purpose", "newer", "no_writers", "state_ttl",
    ),
    "Output": (
        "watch",
        "page", "out", "save_run", "save_qrels", "run_depth", "measure", "top",
        "slice_by", "group_by", "image_field", "image_folder", "show_all", "as_json",
    ),
}  # fmt: skip
"""The panels of the help in their order, each with the parameters whose options it shows."""
_PANEL_OF = {parameter: panel for panel, parameters in PANELS.items() for parameter in parameters}

RARE = {
    "pairs_queries", "ignore_identical", "query_text", "bank_column", "bank_name", "target_bank",
    "param", "gate", "profile", "max_miss_rate", "refit_share", "prior_weight", "no_prior",
    "on_hub", "alert_budget", "index_type", "index_param",
    "rows_per_second", "max_calls", "max_message_mib", "max_in_flight_mib", "drain",
    "control", "restart_ttl",
    "image_field", "image_folder", "save_run", "save_qrels", "run_depth",
}  # fmt: skip
"""Parameters whose options only --help-all shows: few users need them, and they would hide the others."""

WIDEST = 110
"""Columns of the help where the terminal has as many."""

METAVARS = {
    "FILE": (
        "bank", "target_bank", "queries", "query", "pairs", "pairs_queries", "prior_from",
        "file",
    ),
    "FOLDER": ("image_folder",),
    "URI": ("uri",),
    "HOST": ("host",),
    "HOST:PORT": ("upstream",),
    "PORT": ("port",),
    "COLLECTION": ("collection", "source", "target", "bank_name", "drop", "renamed_from"),
    "ALIAS": ("alias",),
    "FIELD": ("field", "vector", "kind", "prior", "group_by", "slice_by", "image_field"),
    "COLUMN": ("bank_column", "column", "query_text", "key_column"),
    "PROFILE": ("profile",),
    "ARM": ("control_arm",),
    "METHOD": ("method",),
    "MEASURE": ("measure",),
    "NAME=VALUE": ("param", "index_param"),
    "TYPE": ("index_type",),
    "FORM": ("form",),
    "KEY": ("key",),
    "EXPRESSION": ("filter",),
    "SECONDS": ("state_ttl", "drain"),
    "ROWS": ("rows_per_second",),
    "MIB": ("max_message_mib", "max_in_flight_mib"),
    "SHARE": (
        "rate", "share", "refit_share", "max_miss_rate", "alert_budget",
    ),
}  # fmt: skip
"""What the help calls the values of options and arguments, by parameter; others by their type."""
_METAVAR_OF = {parameter: word for word, parameters in METAVARS.items() for parameter in parameters}
_METAVAR_OF_TYPE = {str: "NAME", int: "N", float: "NUMBER", Path: "FILE"}

WIDTH = {"max_content_width": WIDEST}

# -- command lines ------------------------------------------------------------------------------


def command_line(
    text: str,
    *commands: Callable[..., None],
    completion: bool = False,
    **named: Callable[..., None],
) -> typer.Typer:
    """Return a command line of these functions.

    text: its help; the docstring of a function is the help of its command. After an empty line and
    "Example: ", each ends in an example.
    commands: functions whose commands have their names.
    completion: whether the options that install and show the completion of shells are added.
    named: functions whose commands have other names.
    """
    app = typer.Typer(
        cls=Group,
        **_help_and_epilog(text),
        context_settings=WIDTH,
        no_args_is_help=True,
        add_completion=completion,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )

    functions = {function.__name__: function for function in commands}
    functions.update(named)
    for name, function in functions.items():
        settings = _help_and_epilog(inspect.getdoc(function) or "")
        # `import_` is the command `import`, a name that no function can have.
        command = name.rstrip("_").replace("_", "-")
        app.command(command, cls=Command, context_settings=WIDTH, **settings)(_for_typer(function))

    return app


def as_command(target: typer.Typer | Callable[..., None]) -> Any:
    """Return the click command of a command line or of a single function."""
    if isinstance(target, typer.Typer):
        return get_group(target)
    # Typer makes no group of an app with one command, but this command.
    return get_command(command_line("", target))


def _help_and_epilog(text: str) -> dict[str, Any]:
    """Split a text into the arguments `help` and `epilog` of typer; the epilog is the example."""
    summary, _, example = text.partition("\n\nExample: ")
    return {"help": summary, "epilog": example or None}


# -- parameters ---------------------------------------------------------------------------------


def _for_typer(function: Callable[..., None]) -> Callable[..., None]:
    """Return `function` with a signature that typer can read. Raises TypeError without a panel."""
    # Not get_type_hints: on Python 3.10 it makes a type with the default None Optional, which hides
    # Annotated.
    parameters = inspect.signature(function, eval_str=True).parameters.values()
    groups: dict[str, Any] = {
        parameter.name: parameter.annotation
        for parameter in parameters
        if is_dataclass(parameter.annotation)
    }

    @wraps(function)
    def call_with_groups(**arguments: Any) -> None:
        for name, group in groups.items():
            values = {field.name: arguments.pop(field.name) for field in fields(group)}
            arguments[name] = group(**values)
        function(**arguments)

    options: list[inspect.Parameter] = []
    for parameter in parameters:
        if parameter.name in groups:
            options += _parameters_of(groups[parameter.name])
        else:
            options.append(parameter)
    signature = inspect.Signature([_with_option(option) for option in options])

    # Typer reads inspect.signature, which prefers this attribute to the parameters of the function.
    call_with_groups.__signature__ = signature  # type: ignore[attr-defined]
    # And it takes annotations from here first, where `wraps` has put those of `function`.
    call_with_groups.__annotations__ = {}
    return call_with_groups


def _parameters_of(group: Any) -> list[inspect.Parameter]:
    """Return a parameter for each field of a dataclass."""
    annotations = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is MISSING else field.default,
            annotation=annotations[field.name],
        )
        for field in fields(group)
    ]


def _with_option(parameter: inspect.Parameter) -> inspect.Parameter:
    """Return a keyword parameter with its `typer.Option`, which has its panel."""
    parameter = parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
    value_type, first, *rest = get_args(parameter.annotation) or (parameter.annotation, None)
    option: OptionInfo | ArgumentInfo
    if isinstance(first, str):
        option = _option(parameter, first, *rest)
    elif isinstance(first, OptionInfo | ArgumentInfo):
        # Commands share annotations: theirs stays without a panel.
        option = copy(first)
    else:
        return parameter

    option.metavar = option.metavar or _metavar(parameter.name, value_type)
    if isinstance(option, OptionInfo):
        option.rich_help_panel = _PANEL_OF.get(parameter.name)
        if option.rich_help_panel is None:
            raise TypeError(f"the option of {parameter.name!r} is in no panel of PANELS")
        # Typer keeps the name that an annotation gives as the default of the option: beside a further
        # one, both would be names of it.
        has_name = option.param_decls or str(option.default).startswith("--")
        if option.metavar and not has_name:
            # Typer 0.27 takes a metavar that is the option's name in capitals for its name.
            option.param_decls = (f"--{parameter.name.replace('_', '-')}",)
    return parameter.replace(annotation=Annotated[value_type, option])


def _metavar(name: str, value_type: Any) -> str | None:
    """Return what the help calls a value; None for a flag, and for a choice, which lists its own."""
    while get_origin(value_type) in {Union, UnionType, list}:
        value_type = get_args(value_type)[0]
    if value_type not in _METAVAR_OF_TYPE:
        return None
    return _METAVAR_OF.get(name, _METAVAR_OF_TYPE[value_type])


def _option(
    parameter: inspect.Parameter, help_text: str, settings: dict[str, Any] | None = None
) -> OptionInfo:
    """Return the option of a parameter that is annotated with its help."""
    # Without an explicit name, typer would add a negative form to each flag.
    name = f"--{parameter.name.replace('_', '-')}"
    has_shown_default = parameter.default not in (None, "", parameter.empty)
    # The first argument is the default, which the parameter has: a name in its place would be added
    # to those of the option, and shown twice.
    option: OptionInfo = typer.Option(
        ..., name, help=help_text, show_default=has_shown_default, **(settings or {})
    )
    return option


# -- layout of the help -------------------------------------------------------------------------

HELP_ALL = "--help-all"


def help_row(parameter: Any, context: Any) -> tuple[str, str] | None:
    """Return what the help says of an option or an argument; None if it is hidden."""
    row: tuple[str, str] | None = parameter.get_help_record(context)
    # Some versions of typer add the Python type to the name of an argument.
    if row is not None and parameter.param_type_name == "argument" and parameter.metavar:
        return parameter.metavar, row[1]
    return row


class _HelpWithPanels:
    """The layout of the help of commands and groups: options by panel, and an example at the end.

    click calls these methods to write the help of a command.
    """

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the words of the usage line, arguments without the braces of newer typers."""
        pieces: list[str] = super().collect_usage_pieces(ctx)  # type: ignore[misc]
        return [piece.strip("{}") for piece in pieces]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, the options by panel, and those without a panel under Help.

        Rare options are written if all are wanted.
        """
        rows: dict[str, list[tuple[str, str]]] = {
            heading: [] for heading in ("Arguments", *PANELS, "Help")
        }
        command: Any = self
        for parameter in command.get_params(ctx):
            row = help_row(parameter, ctx)
            is_shown = HELP_ALL in ctx.meta or parameter.name not in RARE
            if row is not None and is_shown:
                rows[_heading_of(parameter)].append(row)

        if self.has_rare(ctx):
            rows["Help"].append(
                (HELP_ALL, "Show this message with the rarer options too, and exit.")
            )
        for heading, its_rows in rows.items():
            if its_rows:
                with formatter.section(heading):
                    formatter.write_dl(its_rows)

    def has_rare(self, ctx: Any) -> bool:
        """Whether the command has options that only --help-all shows."""
        command: Any = self
        return any(parameter.name in RARE for parameter in command.get_params(ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the words of the command line, unless they ask for all of the help."""
        if HELP_ALL in args and self.has_rare(ctx):
            ctx.meta[HELP_ALL] = True
            typer.echo(ctx.get_help())
            raise typer.Exit
        rest: list[str] = super().parse_args(ctx, args)  # type: ignore[misc]
        return rest

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the example on one line, to be copied."""
        example = getattr(self, "epilog", None)
        if example:
            with formatter.section("Example"):
                formatter.write(indent(example, " " * formatter.current_indent) + "\n")


def _heading_of(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return "Arguments"
    # Options that typer adds itself, such as --help, have no panel.
    return getattr(parameter, "rich_help_panel", None) or "Help"


class Command(_HelpWithPanels, TyperCommand):
    """A command with panels in its help."""


class Group(_HelpWithPanels, TyperGroup):
    """A group of commands, whose help shows the whole summary of each."""

    headings: ClassVar[Mapping[str, str]] = {}
    """The heading over each command, by its name; others are under Commands."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the summaries of the commands under their headings, and then the options."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for name, command in self.commands.items():
            summary = str(command.help).split("\n\n")[0]
            sections.setdefault(self.headings.get(name, "Commands"), []).append((name, summary))

        # The same column of summaries in all of them.
        width = max(map(len, self.commands))
        for heading, summaries in sections.items():
            with formatter.section(heading):
                formatter.write_dl([(name.ljust(width), text) for name, text in summaries])
        super().format_options(ctx, formatter)
