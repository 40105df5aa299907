"""What an operation on wire messages asks of the outside world, beside what `client.steps` has. No I/O."""

from __future__ import annotations

from typing import Any

from pymilvus.exceptions import MilvusException

from milvus_hubness.client.steps import Ask


class Send(Ask):
    """Send a request message on: its outcome is the response message. Raises Refused."""

    def __init__(self, method: str, request: Any) -> None:
        super().__init__(method, (request,))

    @property
    def request(self) -> Any:
        """The message."""
        return self.args[0]


class Refused(MilvusException):  # type: ignore[misc]
    """The server refused a request. response: the message in which it said so."""

    def __init__(self, response: Any, status: Any) -> None:
        result = MilvusException.from_status(status)
        super().__init__(result.code, result.message, result.compatible_code)
        self.response = response
