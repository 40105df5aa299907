"""milvus-haystack's embedding retriever, which pipelines can be saved and loaded with."""

from typing import Any

from haystack import DeserializationError, component, default_from_dict
from milvus_haystack import MilvusEmbeddingRetriever

from haystack_milvus_hubness.document_store import HubnessDocumentStore


@component
class HubnessEmbeddingRetriever(MilvusEmbeddingRetriever):
    """A MilvusEmbeddingRetriever that loads its HubnessDocumentStore again as one."""

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "HubnessEmbeddingRetriever":
        """As MilvusEmbeddingRetriever.from_dict."""
        result = data.get("init_parameters", {})
        if "document_store" not in result:
            raise DeserializationError("Missing 'document_store' in serialization data")
        result["document_store"] = HubnessDocumentStore.from_dict(result["document_store"])
        return default_from_dict(cls, data)
