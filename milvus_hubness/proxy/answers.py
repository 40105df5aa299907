"""What a caller is told who is refused, in Milvus's own form. No I/O."""

from __future__ import annotations

from typing import Any

from pymilvus.exceptions import MilvusException
from pymilvus.grpc_gen import common_pb2, milvus_pb2

from milvus_hubness.errors import HubnessError, InvalidInput

PARAMETER_INVALID, UNEXPECTED = 1100, 65535

_SERVICE = milvus_pb2.DESCRIPTOR.services_by_name["MilvusService"]


def request_of(method: str, message: bytes) -> Any:
    """The request message of a method. Raises DecodeError."""
    return _class(_SERVICE.methods_by_name[method].input_type).FromString(message)


def response_of(method: str, message: bytes) -> Any:
    """The response message of a method. Raises DecodeError."""
    return _class(_SERVICE.methods_by_name[method].output_type).FromString(message)


def status_in(response: Any) -> Any:
    """The Status of a response, which may be nothing else."""
    return response if isinstance(response, common_pb2.Status) else response.status


def refusal(method: str, error: Exception) -> Any:
    """The response of a method that says so. What nobody foresaw is an unexpected error of Milvus's, too: as
    gRPC's UNKNOWN clients would repeat the call for minutes."""
    response = _class(_SERVICE.methods_by_name[method].output_type)()
    status = status_in(response)
    if isinstance(error, MilvusException) and not isinstance(error, HubnessError):
        status.code = int(error.code) or UNEXPECTED
        status.error_code = int(error.compatible_code) or common_pb2.ErrorCode.UnexpectedError
        status.reason = error.message
    else:
        wrong = isinstance(error, InvalidInput)
        status.code = PARAMETER_INVALID if wrong else UNEXPECTED
        status.error_code = (
            common_pb2.ErrorCode.IllegalArgument if wrong else common_pb2.ErrorCode.UnexpectedError
        )
        status.reason = f"{type(error).__name__}: {error}"
        if wrong:
            status.extra_info["is_input_error"] = "true"
    return response


def _class(descriptor: Any) -> Any:
    for module in (milvus_pb2, common_pb2):
        if descriptor.file.name == module.DESCRIPTOR.name:
            return getattr(module, descriptor.name)
    raise LookupError(descriptor.full_name)
