"""Requests and responses of fields whose augmented form lies in a second vector field. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from milvus_hubness.client.reading import Row
from milvus_hubness.client.rewrite import Rewrite
from milvus_hubness.halves import decode
from milvus_hubness.layout import Floats


@dataclass(frozen=True)
class SecondVectorRewrite(Rewrite):
    """Rows carry the vectors as the user gave them, and beside these the augmented form, which is searched.
    Answers that need vectors take the former."""

    def vectors_found(self, hits: list[Any]) -> Floats:
        return self._own([hit["entity"] for hit in hits])

    def _loaded(self, entities: Sequence[Row]) -> Floats:
        own = self._own(entities)
        return self.layout.augment(own, np.zeros(len(own), np.float32))

    def _own(self, entities: Sequence[Row]) -> Floats:
        """(n, d) the vectors of n rows, as the user gave them."""
        found = decode([entity[self.state.field] for entity in entities], self.state.dtype)
        return found.reshape(-1, self.state.dim)
