"""A gRPC proxy in front of Milvus, for clients of any language."""

from milvus_hubness.milvus.proxy.options import ProxyOptions, Tls
from milvus_hubness.milvus.proxy.server import Proxy

__all__ = ["Proxy", "ProxyOptions", "Tls"]
