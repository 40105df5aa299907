"""Asynchronous clients that are closed at the end of a block."""

from contextlib import asynccontextmanager

from pymilvus.exceptions import MilvusException
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_fixed

from milvus_hubness import AsyncHubnessClient


@asynccontextmanager
async def opened(backend, cls=AsyncHubnessClient, **options):
    """A client with its own connection.

    pymilvus shares connections by the id of the event loop, and a later loop may have the same.
    """
    if cls is AsyncHubnessClient:
        options.setdefault("state_ttl", 0.0)
    again = retry_if_exception_type(MilvusException)
    retrying = AsyncRetrying(
        retry=again, stop=stop_after_attempt(5), wait=wait_fixed(0.5), reraise=True
    )
    client = cls(backend.uri, dedicated=True, **options)
    await retrying(client.__aenter__)
    try:
        yield client
    finally:
        await client.close()
