"""Writes that were held up until a copy had taken the name of their collection."""

from pymilvus.grpc_gen import milvus_pb2

from milvus_hubness import NNN, Layout
from milvus_hubness.clients.steps import Ask, drive
from milvus_hubness.correction.fitted import initial_state
from milvus_hubness.correction.overrides import NONE
from milvus_hubness.correction.state import BankReference
from milvus_hubness.milvus.client.operations import Operations
from milvus_hubness.milvus.client.steps import LearnSchema
from milvus_hubness.milvus.proxy.messages import Send, TimeOfWrite
from milvus_hubness.milvus.proxy.writing import delete

FIELDS = [{"name": "id", "is_primary": True}, {"name": "vector"}]
TIME = 7


def test_a_deletion_that_is_made_again_is_answered_with_a_message():
    bank = BankReference(collection="b", generation="01", fingerprint="", count=9, size=9)
    fixed = {"field": "vector", "suffix": "", "dtype": "float32", "source": "c", "phase": "ready"}
    state = initial_state(Layout(6, "IP"), NNN(4), bank, **fixed)
    properties = {state.property_name: state.to_json()}
    names = ["source"]
    deleted_from = []

    def answer(step):
        if isinstance(step, LearnSchema):
            return None
        if isinstance(step, TimeOfWrite):
            return TIME
        if isinstance(step, Send):
            deleted_from.append(step.args[0].collection_name)
            names.append("copy")
            return milvus_pb2.MutationResult(delete_cnt=1)

        assert isinstance(step, Ask)
        if step.method == "describe_collection":
            return {"collection_name": names[-1], "fields": FIELDS, "properties": properties}
        deleted_from.append(step.args[0])
        return {"delete_count": 1}

    request = milvus_pb2.DeleteRequest(collection_name="alias", expr="id == 1")
    result = drive(delete(Operations(NONE, 0.0, 1 << 20), request), answer)
    assert deleted_from == ["source", "copy"]
    assert isinstance(result, milvus_pb2.MutationResult)
    assert (result.delete_cnt, result.timestamp) == (1, TIME)
