"""A Qdrant server in this process, over qdrant-client's local mode, that behaves as a real one was measured to.

It speaks HTTP to an unchanged QdrantClient or AsyncQdrantClient, so that requests have their true size and errors are
those that the client makes of a server's answers. In what a server does otherwise than the local mode:

- A request that names a missing point is carried out in part: see `collection`.
- Cosine vectors of nearly unit length are kept as they came, others are divided by their length in float32; float16
  and uint8 are rounded. A search moves no vector.
- Points with equal scores come in another order in each collection.
- Numbers are printed as the shortest decimals of a float32.
- Requests above 32 MB, and those that strict mode of a collection forbids, are refused: see `limits`.
- Settings and payload indexes of a collection are kept and shown, and its status may be YELLOW after writes.
"""

from tests.qdrant.strict.listening import listening
from tests.qdrant.strict.server import StrictServer

__all__ = ["StrictServer", "listening"]
