"""Calls of Milvus's gRPC service as bytes, by users whose tokens are valid or not."""

import grpc
import pytest

SERVICE = "/milvus.proto.milvus.MilvusService/"
VALID, OTHER, INVALID = ("dmFsaWQ=", "b3RoZXI=", "d3Jvbmc=")
"""Authorizations of three users."""

UNLIMITED = [("grpc.max_send_message_length", -1)]
"""Options of a connection."""


def by(token, *further):
    return [("authorization", token), *further]


def refused(call):
    with pytest.raises(grpc.RpcError) as failed:
        call()
    return failed.value
