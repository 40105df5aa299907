"""Parameters that take one of a few words, which the annotation of each lists as a Literal."""

from __future__ import annotations

from typing import Any, get_args

from milvus_hubness.errors import InvalidParameter


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
