"""Messages of Milvus's protocol: search parameters, metadata, responses and errors. No I/O."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any

from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass
from pymilvus.exceptions import MilvusException
from pymilvus.grpc_gen import common_pb2, milvus_pb2

from milvus_hubness.clients.steps import Ask
from milvus_hubness.correction.codec.arrays import encode
from milvus_hubness.correction.overrides import NONE, Overrides
from milvus_hubness.correction.state import read_states
from milvus_hubness.errors import HubnessError, InvalidInput, InvalidParameter
from milvus_hubness.milvus.client.catalog import aliases_out, is_ours
from milvus_hubness.milvus.client.messages import RANGE_BOUNDS, SEARCHED_AT_LEAST
from milvus_hubness.milvus.client.rewrite import FieldRequest
from milvus_hubness.milvus.client.state_cache import CachedState
from milvus_hubness.milvus.proxy.columns import (
    column_named,
    json_in,
    put_all,
    put_vectors,
    vectors_in,
)
from milvus_hubness.milvus.proxy.headers import (
    CORRECTION_HEADERS,
    KINDS_HEADER,
    PROFILE_HEADER,
    STRENGTH_HEADER,
    header,
)


class Send(Ask):
    """Send a request message to the server.

    The outcome is the response message, or `with_bytes` a pair of it and its bytes. Raises Refused.
    """

    def __init__(self, request: Any, *, with_bytes: bool = False) -> None:
        super().__init__(method_of(request), (request, with_bytes))


class TimeOfWrite(Ask):
    """Look up Milvus's timestamp of the last write that pymilvus has sent to a collection.

    The outcome is 0 if none is known. Nothing is sent, and nothing can fail once rows are stored. A
    client's next search names the timestamp, and sees the write at the consistency level Session.
    """

    def __init__(self, collection: str) -> None:
        super().__init__("time_of_write", (collection,))


def addressed(request: Any, cached: CachedState) -> Any:
    """Return the request under the name that `cached` needs: itself, or a copy of it."""
    if cached.real_name in ("", request.collection_name):
        return request

    copied = deepcopy(request)
    copied.collection_name = cached.real_name
    return copied


def method_of(request: Any) -> str:
    name: str = request.DESCRIPTOR.name
    return name.removesuffix("Request")


class Refused(MilvusException):  # type: ignore[misc]
    """The server refused a request. response: the message with the refusal."""

    def __init__(self, response: Any, status: Any) -> None:
        result = MilvusException.from_status(status)
        super().__init__(result.code, result.message, result.compatible_code)
        self.response = response


PARAMETER_INVALID = 1100
UNEXPECTED = 65535
"""Milvus's codes of errors."""

MOST_REASON = 2_000
"""Characters of a refusal: some name what the caller sent, which may be megabytes."""

_METHODS = milvus_pb2.DESCRIPTOR.services_by_name["MilvusService"].methods_by_name


def may_stream(method: str) -> bool:
    """Return whether a caller may send several messages to a method.

    An unknown method is not of this Milvus.
    """
    return method not in _METHODS or bool(_METHODS[method].client_streaming)


def request_type(method: str) -> Any:
    """Return the descriptor of the request of a method."""
    return _METHODS[method].input_type


def request_of(method: str, message: bytes) -> Any:
    """Parse the request of a method.

    Raises google.protobuf.message.DecodeError, and InvalidInput for more rows than it can hold.
    """
    request = GetMessageClass(request_type(method)).FromString(message)
    # Each row takes a byte of a column at least, and the number alone would make objects of rows.
    row_count = getattr(request, "num_rows", 0)
    if row_count > len(message):
        raise InvalidInput(
            f"the columns of a write of {len(message):,} bytes cannot have {row_count:,} rows: "
            "correct num_rows"
        )

    return request


def response_of(method: str, message: bytes) -> Any:
    """Parse the response of a method. Raises google.protobuf.message.DecodeError."""
    return GetMessageClass(_METHODS[method].output_type).FromString(message)


def status_in(response: Any) -> Any:
    """Return the Status of a response, which may be the response itself."""
    return response if isinstance(response, common_pb2.Status) else response.status


def is_refusal(method: str, message: bytes) -> bool:
    """Return whether a response says that Milvus has refused the call."""
    try:
        status = status_in(response_of(method, message))
    except DecodeError:
        return False

    return bool(status.code or status.error_code)


def refusal(method: str, error: Exception) -> Any:
    """Return the response of a method that reports an error.

    Unforeseen errors are Milvus's unexpected error too: gRPC's UNKNOWN would make clients call
    again for minutes.
    """
    response = response_of(method, b"")
    status = status_in(response)
    if isinstance(error, MilvusException) and not isinstance(error, HubnessError):
        # A server may set only one of them: see `store.server.is_missing`.
        status.code = int(error.code)
        status.error_code = int(error.compatible_code)
        if not (status.code or status.error_code):
            status.code = UNEXPECTED
            status.error_code = common_pb2.UnexpectedError
        status.reason = error.message
    else:
        is_input_error = isinstance(error, InvalidInput)
        status.code = PARAMETER_INVALID if is_input_error else UNEXPECTED
        status.error_code = (
            common_pb2.IllegalArgument if is_input_error else common_pb2.UnexpectedError
        )
        status.reason = f"{type(error).__name__}: {error}"[:MOST_REASON]
        if is_input_error:
            status.extra_info["is_input_error"] = "true"

    return response


MOST_SHOWN = 80
"""Characters of a value in a message."""

OF_CORRECTION = ("hubness_strength", "hubness_kinds", "hubness_profile")
"""Parameters of a search for its correction, in the order of `Overrides`."""

METRIC = "metric_type"
FIELD = "anns_field"
_PARAMS = "params"
"""Parameters of a search by Milvus's names."""

_REWRITTEN = (*RANGE_BOUNDS, *SEARCHED_AT_LEAST)
"""Parameters that a client may send in pairs of their own, and that `Rewrite` may change."""


def read_overrides(strength: Any, kinds: Any, profile: Any) -> Overrides:
    """Return the settings in these texts, which may be empty or None. Raises InvalidParameter."""
    return Overrides(
        None if strength in (None, "") else _number("strength", strength),
        None if kinds in (None, "") else _number("kinds", kinds),
        str(profile) if profile else None,
    )


class SearchParameters:
    """Parameters of a SearchRequest, without the correction settings, which are in `overrides`.

    Clients send a parameter in a pair of its own or in the JSON of the pair "params".
    """

    def __init__(self, request: Any, default: Overrides = NONE) -> None:
        """Parse the request's pairs.

        default: settings where these have none. Raises InvalidParameter.
        """
        self.request = request
        self._pairs = dict(pairs_of(request.search_params))
        text = self._pairs.get(_PARAMS)
        self._inner = json_in(text, "params of search_params") if text else {}
        if not isinstance(self._inner, dict):
            raise InvalidParameter(
                f"params of search_params must be a JSON object, not {str(text)[:80]!r}"
            )

        # Milvus would refuse them, so both forms are removed; the outer one counts.
        inner = [self._inner.pop(name, None) for name in OF_CORRECTION]
        outer = [self._pairs.pop(name, None) for name in OF_CORRECTION]
        settings = (own or within for own, within in zip(outer, inner, strict=True))
        _expect_settings((*self._pairs, *self._inner), OF_CORRECTION)
        self.overrides = read_overrides(*settings).over(default)

    def value(self, name: str) -> Any:
        """Return a parameter as received; None if it is missing."""
        return self._pairs.get(name, self._inner.get(name))

    def number(self, name: str, default: int) -> int:
        value = self.value(name)
        try:
            return default if value in (None, "", "None") else int(str(value))
        except ValueError:
            raise InvalidParameter(f"{name} must be a whole number, got {_short(value)}") from None

    def put(self, name: str, value: object) -> None:
        """Set a parameter, and remove it from the inner parameters."""
        self._inner.pop(name, None)
        self._pairs[name] = str(value)

    def for_rewrite(self) -> dict[str, Any]:
        """Return search parameters as `Rewrite` takes them.

        Raises InvalidParameter if a bound is not a number.
        """
        inner = {name: value for name, value in self._inner.items() if name != METRIC}
        outer = {name: self._pairs[name] for name in _REWRITTEN if name in self._pairs}
        for params in (outer, inner):
            params |= {
                name: _number(name, params[name])
                for name in RANGE_BOUNDS
                if params.get(name) is not None
            }

        return {_PARAMS: inner, METRIC: self.value(METRIC), **outer}

    def take(self, rewritten: Mapping[str, Any]) -> None:
        """Replace the parameters by the result of `Rewrite`, which has no metric."""
        self._inner = dict(rewritten.get(_PARAMS) or {})
        self._pairs.pop(METRIC, None)
        for name in _REWRITTEN:
            if self._pairs.pop(name, None) is not None and name in rewritten:
                self._pairs[name] = str(rewritten[name])

    def sent(self) -> Any:
        """Return a copy of the request that has these parameters."""
        sent = deepcopy(self.request)
        if _PARAMS in self._pairs or self._inner:
            self._pairs[_PARAMS] = json.dumps(self._inner)
        pairs = [
            common_pb2.KeyValuePair(key=name, value=value) for name, value in self._pairs.items()
        ]
        put_all(sent.search_params, pairs)
        return sent


def _expect_settings(names: Iterable[str], known: Sequence[str]) -> None:
    """Raise InvalidParameter if others than the `known` ones begin as these do.

    Milvus takes parameters and metadata that it does not know: a mistyped setting would have no effect.
    """
    for name in names:
        if name.startswith(("hubness_", "hubness-")):
            raise InvalidParameter(f"no setting {_short(name)}: choose one of {', '.join(known)}")


def _number(name: str, value: Any) -> float:
    # JSON has true, which Python counts as 1.
    if isinstance(value, bool):
        raise InvalidParameter(f"{name} must be a number, got {_short(value)}")
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise InvalidParameter(f"{name} must be a number, got {_short(value)}") from None


def _short(value: Any) -> str:
    """Return a value as a message shows it: a caller may send megabytes."""
    text = repr(value)
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}…"


def overrides_in(headers: Mapping[str, str | bytes]) -> Overrides:
    """Return the correction settings for searches that have none of their own.

    Raises InvalidParameter.
    """
    _expect_settings(headers.keys() - set(CORRECTION_HEADERS), CORRECTION_HEADERS)
    return read_overrides(
        header(headers, STRENGTH_HEADER),
        header(headers, KINDS_HEADER),
        header(headers, PROFILE_HEADER),
    )


def columns_out(cached: CachedState, message: Any, fields: FieldRequest) -> bool:
    """Convert the fields_data and output_fields of a message to the user's form, in place.

    Return whether they may have changed. Raises StateError if the stored vectors have another width
    than the state says.
    """
    columns = message.fields_data
    if cached.reading.changed.isdisjoint(
        [*message.output_fields, *(column.field_name for column in columns)]
    ):
        return False

    for state in cached.states.values():
        codec = state.codec
        column = column_named(columns, state.field)
        if column is None or codec.leaves_vectors:
            continue

        stored = codec.unpack(vectors_in(column, codec.dtype))
        hidden = {
            name: _values_of(column_named(columns, name).scalars) if len(stored) else []
            for name in codec.decoding_fields
        }
        vectors = codec.decode_rows({codec.field: stored, **hidden})
        put_vectors(column, encode(vectors, codec.dtype), codec.layout.dim, codec.dtype)

    put_all(columns, [column for column in columns if column.field_name not in fields.hidden])
    message.output_fields[:] = [name for name in message.output_fields if name not in fields.hidden]
    return True


def _values_of(scalars: Any) -> list[Any]:
    """Return the values of a hidden column, of numbers or texts."""
    return list(getattr(scalars, scalars.WhichOneof("data")).data)


def index_out(cached: CachedState, indexes: Any) -> None:
    """Convert index descriptions to the user's metrics, in place."""
    for index in indexes:
        if state := cached.states.get(index.field_name):
            put_pair(index.params, METRIC, state.metric)


def description_out(description: Any) -> None:
    """Convert a DescribeCollectionResponse to the collection that the user created, in place.

    Raises StateError.
    """
    states = read_states(pairs_of(description.properties), description.collection_name)
    hidden = {name for state in states.values() for name in state.codec.hidden_fields}
    fields = description.schema.fields
    if states:
        put_all(fields, [field for field in fields if field.name not in hidden])
    for field in fields:
        if field.name in states:
            put_pair(field.type_params, "dim", states[field.name].dim)
    description.aliases[:] = aliases_out(description.aliases)
    for properties in (description.properties, description.schema.properties):
        put_all(properties, [pair for pair in properties if not is_ours(pair.key)])


def pairs_of(pairs: Iterable[Any]) -> Mapping[str, str]:
    return {pair.key: pair.value for pair in pairs}


def put_pair(pairs: Any, key: str, value: object) -> None:
    """Set the value of the pairs with that key; add a pair if there is none."""
    matches = [pair for pair in pairs if pair.key == key] or [pairs.add(key=key)]
    for pair in matches:
        pair.value = str(value)
