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
        """Return a retriever from the dictionary of to_dict."""
        parameters = data.get("init_parameters", {})
        if "document_store" not in parameters:
            raise DeserializationError("Missing 'document_store' in serialization data")
        parameters["document_store"] = HubnessDocumentStore.from_dict(parameters["document_store"])
        return default_from_dict(cls, data)
