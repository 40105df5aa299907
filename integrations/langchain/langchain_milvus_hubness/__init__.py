"""Hubness correction for LangChain on Milvus."""

from langchain_milvus_hubness.vectorstore import HubnessMilvus

__all__ = ["HubnessMilvus"]
