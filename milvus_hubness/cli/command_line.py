"""Command lines: functions as commands of typer, the panels of their options, and the layout of their help."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from copy import copy
from dataclasses import fields, is_dataclass
from functools import wraps
from textwrap import indent
from typing import Annotated, Any, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup
from typer.models import OptionInfo

PANELS = {
    "Source": "uri db token_file field filter vector pairs queries query query_number query_text collection encoder "
    "config upstream upstream_tls upstream_ca renamed_from",
    "Bank": "bank bank_column bank_name target_bank rate size seed_share half_life duplicate_cosine off live",
    "Method": "method param k alpha gate gate_targets strength profile where max_miss_rate refit tolerance form memory "
    "epochs candidates limit with_bank one_to_one correction",
    "Copy": "target alias rename profiles index_type index_param rebuild_share rebuild_rows restart drop keep",
    "Load": "rows_per_second bytes_per_second chunk_seconds max_load critical_load load_every engine "
    "max_calls workers max_message_mib max_in_flight_mib drain",
    "Control": "plan yes force revert repair resume once check restart_ttl postpone_cutover control http on "
    "host port tls_cert tls_key no_writers client_ttl state_ttl max_skewness min_gain",
    "Output": "output out metrics_file measure top slice_by group_by image_field image_folder as_csv as_json",
}
"""The parameters of commands, by the panel of the help that shows their options; the order of the panels."""
_PANEL_OF = {name: panel for panel, names in PANELS.items() for name in names.split()}


def spread(command: Callable[..., None]) -> Callable[..., None]:
    """Return `command` for typer: with the fields of a dataclass in place of each parameter of its type, and with an
    option for each parameter that is annotated with its help."""
    # On Python 3.10, get_type_hints makes annotations of the default None Optional, which hides Annotated.
    parameters = inspect.signature(command, eval_str=True).parameters
    annotations = {name: parameter.annotation for name, parameter in parameters.items()}
    groups: dict[str, Any] = {
        name: group for name, group in annotations.items() if is_dataclass(group)
    }

    @wraps(command)
    def with_groups(**arguments: Any) -> None:
        for name, group in groups.items():
            arguments[name] = group(
                **{field.name: arguments.pop(field.name) for field in fields(group)}
            )
        command(**arguments)

    options: list[inspect.Parameter] = []
    for parameter in parameters.values():
        if group := groups.get(parameter.name):
            hints = get_type_hints(group, include_extras=True)
            options += (
                parameter.replace(
                    name=field.name, default=field.default, annotation=hints[field.name]
                )
                for field in fields(group)
            )
        else:
            options.append(parameter)
    with_groups.__dict__["__signature__"] = inspect.Signature(
        [_with_help(option) for option in options]
    )
    with_groups.__annotations__ = {}
    return with_groups


def _with_help(option: inspect.Parameter) -> inspect.Parameter:
    """Return a keyword with an option of typer for its help, panel and further settings. A flag has no negative
    form. Raises KeyError for an option without a panel."""
    kind, [text, *settings] = option.annotation, getattr(option.annotation, "__metadata__", (None,))
    if isinstance(text, str):
        is_shown = option.default not in (None, "", option.empty)
        name = f"--{option.name.replace('_', '-')}"
        further = settings[0] if settings else {}
        text = typer.Option(name, help=text, show_default=is_shown, **further)
    if isinstance(text, OptionInfo):
        text = copy(text)
        text.rich_help_panel = _PANEL_OF[option.name]
        kind = Annotated[kind.__origin__, text]
    return option.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=kind)


def _write_panels(command: Any, context: Any, formatter: Any) -> None:
    """Write the arguments, the options by panel, and those without a panel under Help."""
    panels: dict[str, list[tuple[str, str]]] = {
        "Arguments": [],
        **{name: [] for name in PANELS},
        "Help": [],
    }
    for parameter in command.get_params(context):
        if record := parameter.get_help_record(context):
            is_argument = parameter.param_type_name == "argument"
            panels[
                "Arguments"
                if is_argument
                else getattr(parameter, "rich_help_panel", None) or "Help"
            ].append(record)
    for name, records in panels.items():
        if records:
            with formatter.section(name):
                formatter.write_dl(records)


class _Help:
    """Help with options by panel, and with the epilog as an example."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        _write_panels(self, ctx, formatter)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        if epilog := getattr(self, "epilog", None):
            with formatter.section("Example"):
                formatter.write(indent(epilog, " " * formatter.current_indent) + "\n")


class Command(_Help, TyperCommand):
    """A command."""


class Group(_Help, TyperGroup):
    """A group of commands, whose help shows the whole summary of each."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, str(one.help).split("\n\n")[0]) for name, one in self.commands.items()]
            )
        super().format_options(ctx, formatter)


def command_line(
    text: str,
    *commands: Callable[..., None],
    completion: bool = False,
    **named: Callable[..., None],
) -> typer.Typer:
    """Return a command line of commands under the names of their functions, or under other names. text: its help. After
    "Example: ", this and the docstrings of commands have an example. completion: whether it has options that install
    and show the completion for shells."""
    app = typer.Typer(
        cls=Group,
        **_help_of(text),
        no_args_is_help=True,
        add_completion=completion,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    for name, command in {**{command.__name__: command for command in commands}, **named}.items():
        settings = _help_of(inspect.getdoc(command) or "")
        app.command(name.replace("_", "-"), cls=Command, **settings)(spread(command))
    return app


def _help_of(text: str) -> dict[str, Any]:
    text, _, example = text.partition("\n\nExample: ")
    return {"help": text, "epilog": example or None}
