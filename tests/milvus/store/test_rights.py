"""Rights are tried by requests of every kind, whose answers have a status or are one."""

from typing import get_args

import pytest
from pymilvus.grpc_gen import common_pb2, milvus_pb2

from milvus_hubness.jobs.migration.rights import Right
from milvus_hubness.milvus.store import rights


class Stub:
    """A server that knows no other request than those of pymilvus's protocol."""

    def __init__(self, reason):
        self._status = common_pb2.Status(code=1, reason=reason)
        self.sent = []

    def __getattr__(self, method):
        service = milvus_pb2.DESCRIPTOR.services_by_name["MilvusService"]
        of_answer = service.methods_by_name[method].output_type.name

        def ask(request, timeout):
            self.sent.append(request)
            if of_answer == "Status":
                return self._status
            return getattr(milvus_pb2, of_answer)(status=self._status)

        return ask


@pytest.mark.parametrize("reason", ["permission deny to user", "collection not found"])
def test_each_right_is_lacking_where_the_server_says_so_and_not_otherwise(monkeypatch, reason):
    stub = Stub(reason)
    monkeypatch.setattr(rights, "stub_of", lambda client: stub)
    monkeypatch.setattr(rights, "database_of", lambda client: "shop")
    every = [*get_args(Right)]
    expected = every if reason.startswith("permission") else []
    assert rights.denied(None, "products", every) == expected
    assert {request.db_name for request in stub.sent} == {"shop"}
    named = [
        list(getattr(each, "collection_names", [])) or [each.collection_name] for each in stub.sent
    ]
    assert named == [["products"]] * len(every)
