"""langchain-milvus's vector store over clients that correct."""

from functools import cached_property

from langchain_milvus import Milvus

from milvus_hubness import AsyncHubnessClient, HubnessClient


class HubnessMilvus(Milvus):
    """A Milvus store whose searches on corrected collections are ranked by the corrected score."""

    @cached_property
    def client(self) -> HubnessClient:
        return HubnessClient(**self._connection_args)

    @cached_property
    def aclient(self) -> AsyncHubnessClient:
        return AsyncHubnessClient(**self._connection_args)
