"""The proxy itself: listens, passes on, and stops when its calls have ended."""

from __future__ import annotations

import asyncio

import grpc

from milvus_hubness.errors import InvalidParameter
from milvus_hubness.proxy.handler import ProxyHandler
from milvus_hubness.proxy.options import ProxyOptions
from milvus_hubness.proxy.sessions import Sessions


class Proxy:
    """Speaks Milvus's protocol to clients of any language, and passes it on to one Milvus; on corrected
    collections as HubnessClient does.

        async with Proxy(ProxyOptions("localhost:19530")) as proxy:
            await proxy.ended()
    """

    def __init__(self, options: ProxyOptions) -> None:
        self.options = options
        self.port = options.port
        self._sessions = Sessions(options)
        self._server: grpc.aio.Server | None = None
        self._channel: grpc.aio.Channel | None = None

    async def start(self) -> None:
        """Listen; `port` is then the one taken. Raises InvalidParameter where that cannot be, or a
        certificate is none."""
        self._channel = self.options.open_channel()
        handler = ProxyHandler(self.options, self._channel, self._sessions)
        self._server = grpc.aio.server(handlers=[handler], options=self.options.server_options())
        address = f"{self.options.host}:{self.options.port}"
        try:
            if self.options.tls is None:
                self.port = self._server.add_insecure_port(address)
            else:
                pair = (self.options.tls.key, self.options.tls.certificate)
                self.port = self._server.add_secure_port(address, grpc.ssl_server_credentials([pair]))
        except RuntimeError:
            self.port = 0
        if not self.port:
            await self._channel.close()
            raise InvalidParameter(f"cannot listen on {address}: it is taken, or the certificate is none")
        await self._server.start()

    async def ended(self) -> None:
        """Wait until it has been stopped."""
        if self._server is not None:
            await self._server.wait_for_termination()

    async def stop(self) -> None:
        """Take no more calls, wait `drain` seconds for those under way, and hang up."""
        if self._server is not None:
            await self._server.stop(self.options.drain)
        if self._channel is not None:
            await self._channel.close()
        await asyncio.to_thread(self._sessions.close)

    async def __aenter__(self) -> Proxy:
        await self.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.stop()
