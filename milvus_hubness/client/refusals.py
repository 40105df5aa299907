"""Our errors as pymilvus's own, for callers who catch MilvusException."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pymilvus.exceptions import ErrorCode, MilvusException

from milvus_hubness.errors import HubnessError, InvalidInput


@contextmanager
def refusing() -> Iterator[None]:
    """What is raised of ours within is raised as a MilvusException as well."""
    try:
        yield
    except HubnessError as error:
        raise as_milvus(error) from error


_KINDS: dict[type[HubnessError], type[HubnessError]] = {}


def as_milvus(error: HubnessError) -> HubnessError:
    """The same error as a MilvusException as well: of both kinds, with the same message."""
    kind = type(error)
    if issubclass(kind, MilvusException):
        return error
    refusal = _of_both(kind)()
    is_input_error = isinstance(error, InvalidInput)
    MilvusException.__init__(refusal, ErrorCode.UNEXPECTED_ERROR, str(error), is_input_error=is_input_error)
    refusal.args = error.args
    return refusal


def _of_both(kind: type[HubnessError]) -> type[HubnessError]:
    """One class for each of ours, of the same name."""
    if kind not in _KINDS:
        result = {
            "__str__": lambda self: self.message,
            "__module__": kind.__module__,
            "__doc__": kind.__doc__,
        }
        _KINDS[kind] = type(kind.__name__, (kind, MilvusException), result)
    return _KINDS[kind]
