"""milvus-haystack's document store over a client that corrects."""

from typing import Any

from milvus_haystack import MilvusDocumentStore

from milvus_hubness import HubnessClient
from milvus_hubness.state import STATE_TTL


class HubnessDocumentStore(MilvusDocumentStore):
    """A MilvusDocumentStore whose retrieval from corrected collections is ranked by the corrected score.

    Beside what MilvusDocumentStore takes: strength, w of every search, None for the collection's own; and
    state_ttl, the seconds for which what a collection says of its biases is believed.
    """

    def __init__(
        self, *args: Any, strength: float | None = None, state_ttl: float = STATE_TTL, **kwargs: Any
    ) -> None:
        self.strength, self.state_ttl = strength, state_ttl
        self._hubness_client: HubnessClient | None = None
        super().__init__(*args, **kwargs)

    @property
    def client(self) -> HubnessClient:
        """The client that all calls go through."""
        if self._hubness_client is None:
            arguments = {
                name: self._resolve_value(value) if name in ("token", "password") else value
                for name, value in self.connection_args.items()
            }
            arguments |= {"strength": self.strength, "state_ttl": self.state_ttl}
            self._hubness_client = HubnessClient(**arguments)
        return self._hubness_client

    def to_dict(self) -> dict[str, Any]:
        """As MilvusDocumentStore.to_dict."""
        told = super().to_dict()
        told["init_parameters"] |= {"strength": self.strength, "state_ttl": self.state_ttl}
        return told
