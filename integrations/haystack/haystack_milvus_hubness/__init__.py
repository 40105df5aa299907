"""Hubness correction for Haystack's Milvus document store."""

from haystack_milvus_hubness.document_store import HubnessDocumentStore
from haystack_milvus_hubness.retriever import HubnessEmbeddingRetriever

__all__ = ["HubnessDocumentStore", "HubnessEmbeddingRetriever"]
