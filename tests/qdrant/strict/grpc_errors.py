"""The errors that qdrant-client raises over gRPC, in place of those over REST."""

from __future__ import annotations

import json
from typing import Any

import grpc
import httpx
from grpc import aio

OVER_GRPC = "x-over-grpc"
"""A header of requests that stand for gRPC: no limit of size, and numbers as a float32 has them."""
CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    409: grpc.StatusCode.ALREADY_EXISTS,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    500: grpc.StatusCode.INTERNAL,
}
RETRY_AFTER = "Retry-After"


class CallFailed(grpc.RpcError, grpc.Call):  # type: ignore[misc]
    """As the error of a sync call."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(details)
        self._code = code
        self._details = details

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details

    def initial_metadata(self) -> tuple[Any, ...]:
        return ()

    def trailing_metadata(self) -> tuple[Any, ...]:
        return ()

    def is_active(self) -> bool:
        return False

    def time_remaining(self) -> None:
        return None

    def cancel(self) -> bool:
        return False

    def add_callback(self, callback: Any) -> bool:
        return False


def as_grpc(request: httpx.Request, send: Any) -> httpx.Response:
    """A middleware of the sync REST client."""
    response: httpx.Response = send(request)
    failure = _failure(response)
    if failure:
        raise CallFailed(*failure)
    return response


async def as_grpc_async(request: httpx.Request, send: Any) -> httpx.Response:
    """A middleware of the async REST client."""
    response: httpx.Response = await send(request)
    failure = _failure(response)
    if failure:
        code, details = failure
        raise aio.AioRpcError(code, aio.Metadata(), aio.Metadata(), details)
    return response


def _failure(response: httpx.Response) -> tuple[grpc.StatusCode, str] | None:
    """Return code and text; None for a success, and for a rate, which both ways report alike."""
    if response.status_code < 400 or RETRY_AFTER in response.headers:
        return None
    error = json.loads(response.content)["status"]["error"]
    return CODES.get(response.status_code, grpc.StatusCode.UNKNOWN), error
