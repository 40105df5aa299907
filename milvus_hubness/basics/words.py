"""Parameters that take one of a few words, which the annotation of each lists as a Literal, or a
value of one class, and the names of arguments.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, get_args

from milvus_hubness.errors import InvalidParameter

ALIKE = 0.75
"""The similarity from which on a name counts as mistyped; pymilvus's own names are less alike."""


def expect_word(name: str, value: object, words: Any) -> None:
    """Raise InvalidParameter unless `value` is one of the words.

    name: of the parameter, for the message. words: the Literal of its annotation.
    """
    choices = get_args(words)
    # A value that is no text may be equal to none of them, and need not be hashable.
    if not (isinstance(value, str) and value in choices):
        raise InvalidParameter(f"{name} is one of {', '.join(choices)}, not {value!r}")


def expect_words(name: str, values: Any, words: Any) -> list[Any]:
    """Return the words of a list, or of one word. Raises InvalidParameter as `expect_word` does."""
    listed = list(values) if isinstance(values, list | tuple | set | frozenset) else [values]
    for value in listed:
        expect_word(name, value, words)
    return listed


def expect_instance(name: str, value: object, kind: type, remedy: str = "") -> None:
    """Raise InvalidParameter unless `value` is one of this class.

    name: of the parameter, for the message. remedy: what to pass instead.
    """
    if not isinstance(value, kind):
        given = f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__
        advice = f": {remedy}" if remedy else ""
        raise InvalidParameter(f"{name} must be of {kind.__name__}, not {given}{advice}")


def expect_arguments(options: Collection[str], names: Sequence[str]) -> None:
    """Raise InvalidParameter for the name of an argument that looks like one of `names`, or is one.

    options: further arguments of a call, which none of its parameters has taken. Clients of databases
    ignore arguments that they do not know: a mistyped one, or one that only another method has, would
    have no effect.
    """
    if not options:
        return

    from difflib import get_close_matches

    for name in options:
        if name in names:
            raise InvalidParameter(f"{name!r} is no argument of this method: leave it out")
        alike = get_close_matches(name, names, n=1, cutoff=ALIKE)
        if alike:
            raise InvalidParameter(f"unknown argument {name!r}: did you mean {alike[0]!r}?")
