"""Each public parameter that takes one of a few words refuses any other one, and names those that it takes."""

import dataclasses
import inspect
import re
import sys
from importlib import import_module
from pkgutil import iter_modules
from types import FunctionType
from typing import Literal, get_args, get_origin

import numpy as np
import pytest

import milvus_hubness
from milvus_hubness import HubnessClient, InvalidInput, InvalidParameter, MilvusStore, api
from milvus_hubness.basics.words import expect_word
from milvus_hubness.correction.kernels import policy
from milvus_hubness.extras.quari import settings

RESULTS = {"RefreshResult"}
"""Records that a caller gets and does not make."""

OTHERS = [settings.QuariConfig, policy.KernelPolicy]
"""Records that pages explain, and that are not among the names of the package."""

BANK = np.random.default_rng(0).standard_normal((40, 4)).astype(np.float32)
VALID = {
    "store": MilvusStore.__new__(MilvusStore),
    "database": MilvusStore.__new__(MilvusStore),
    "source": "items",
    "collection": "items",
    "collection_name": "items",
    "target": "copy",
    "bank": BANK,
    "data": [],
    "folder": "folder",
    "dim": 4,
}
"""Valid values of the parameters that have no default."""


def words_of(annotation):
    """Return the texts that an annotation allows, and whether it is of texts at all."""
    if get_origin(annotation) is Literal:
        return [word for word in get_args(annotation) if isinstance(word, str)]
    return [word for part in get_args(annotation) for word in words_of(part)]


def all_words():
    """Return the names of all annotations of words in modules that are loaded."""
    modules = [module for name, module in sys.modules.items() if name.startswith("milvus_hubness")]
    return {
        name
        for module in modules
        for name, value in vars(module).items()
        if get_origin(value) is Literal
    }


def resolved(text, module):
    """Return the words of an annotation that is a text in this module."""
    if not isinstance(text, str):
        return words_of(text)
    try:
        return words_of(eval(text, {**vars(module)}))
    except (NameError, AttributeError, TypeError):
        # Imported for type checkers only: that must be no annotation of words.
        assert not (set(re.findall(r"\w+", text)) & (all_words() | {"Literal"})), text
        return []


def fields_of(record):
    module_of = {
        name: sys.modules[base.__module__]
        for base in reversed(record.__mro__)
        for name in vars(base).get("__annotations__", {})
    }
    for field in dataclasses.fields(record):
        if field.init and (words := resolved(field.type, module_of[field.name])):
            yield record.__name__, record, field.name, words


def parameters_of(name, function):
    function = inspect.unwrap(function)
    for parameter, text in function.__annotations__.items():
        words = resolved(text, sys.modules[function.__module__])
        if words and parameter != "return":
            yield name, function, parameter, words


def found():
    """Yield the name, the callable, the parameter and its words, for each that is public."""
    modules = [
        import_module(f"{api.__name__}.{found.name}") for found in iter_modules(api.__path__)
    ]
    public = {name: getattr(milvus_hubness, name) for name in dir(milvus_hubness)}
    for module in modules:
        public |= {
            name: value for name, value in vars(module).items() if isinstance(value, FunctionType)
        }
    public |= {record.__name__: record for record in OTHERS}

    for name, value in public.items():
        if name in RESULTS or name.startswith("_"):
            continue
        if inspect.isclass(value):
            if dataclasses.is_dataclass(value) and not inspect.isabstract(value):
                yield from fields_of(value)
            for method, function in inspect.getmembers(value, inspect.isfunction):
                if not method.startswith("_"):
                    for _, *rest in parameters_of(method, function):
                        yield f"{name}.{method}", *rest
        elif isinstance(value, FunctionType):
            yield from parameters_of(name, value)


FOUND = list(found())


def test_the_parameters_are_found():
    names = {(name, parameter) for name, _, parameter, _ in FOUND}
    assert names >= {
        ("Recipe", "on_hub"),
        ("Recipe", "verdict"),
        ("HubnessClient.insert", "bias"),
        ("NNN", "kernel"),
        ("Layout", "metric"),
    }


@pytest.mark.parametrize(
    ("name", "called", "parameter", "words"),
    FOUND,
    ids=[f"{found[0]}-{found[2]}" for found in FOUND],
)
def test_a_misspelt_word_is_refused(name, called, parameter, words):
    signature = inspect.signature(called)
    arguments = {
        needed: VALID.get(needed)
        for needed, described in signature.parameters.items()
        if described.default is inspect.Parameter.empty
        and described.kind not in (described.VAR_KEYWORD, described.VAR_POSITIONAL)
    }
    if "self" in arguments:
        owner = getattr(milvus_hubness, name.split(".")[0])
        arguments["self"] = owner.__new__(owner)

    for wrong in (f"{words[0]}s", words[0].swapcase(), "auto2", ["auto"], 7j):
        with pytest.raises(InvalidInput, match=parameter) as refused:
            called(**{**arguments, parameter: wrong})
        if isinstance(wrong, str):
            assert words[0] in str(refused.value)


def test_the_message_names_the_words():
    with pytest.raises(InvalidParameter) as refused:
        expect_word("size", "huge", Literal["large", "small"])
    assert str(refused.value) == "size is one of large, small, not 'huge'"


def test_writes_refuse_as_pymilvus_does():
    from pymilvus.exceptions import MilvusException

    with pytest.raises(MilvusException, match="bias is one of compute, pending, not 'later'"):
        HubnessClient.__new__(HubnessClient).insert("items", [], bias="later")
