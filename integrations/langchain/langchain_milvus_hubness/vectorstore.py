"""HubnessMilvus: langchain-milvus's vector store with a HubnessClient."""

from functools import cached_property

from langchain_milvus import Milvus

from milvus_hubness import AsyncHubnessClient, HubnessClient


class HubnessMilvus(Milvus):
    """A Milvus store that ranks documents of corrected collections by the corrected score."""

    @cached_property
    def client(self) -> HubnessClient:
        return HubnessClient(**self._connection_args)

    @cached_property
    def aclient(self) -> AsyncHubnessClient:
        return AsyncHubnessClient(**self._connection_args)
