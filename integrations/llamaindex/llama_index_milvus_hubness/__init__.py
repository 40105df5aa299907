"""A LlamaIndex vector store on Milvus, with hubness correction."""

from llama_index_milvus_hubness.vector_store import HubnessVectorStore

__all__ = ["HubnessVectorStore"]
