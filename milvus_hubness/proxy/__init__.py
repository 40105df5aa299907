"""A gRPC proxy in front of Milvus, for clients of any language."""

from milvus_hubness.proxy.options import ProxyOptions, Tls
from milvus_hubness.proxy.server import Proxy

__all__ = ["Proxy", "ProxyOptions", "Tls"]
