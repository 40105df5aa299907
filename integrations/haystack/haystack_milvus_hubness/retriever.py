"""HubnessEmbeddingRetriever: milvus-haystack's retriever, loaded from saved pipelines."""

from typing import Any

from haystack import DeserializationError, component, default_from_dict
from milvus_haystack import MilvusEmbeddingRetriever

from haystack_milvus_hubness.document_store import HubnessDocumentStore


@component
class HubnessEmbeddingRetriever(MilvusEmbeddingRetriever):
    """A MilvusEmbeddingRetriever that restores its HubnessDocumentStore from a saved pipeline."""

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "HubnessEmbeddingRetriever":
        """Return a retriever from the dictionary of to_dict."""
        parameters = data.get("init_parameters", {})
        if "document_store" not in parameters:
            raise DeserializationError(
                "the saved retriever has no 'document_store': save the pipeline again"
            )
        parameters["document_store"] = HubnessDocumentStore.from_dict(parameters["document_store"])
        return default_from_dict(cls, data)
