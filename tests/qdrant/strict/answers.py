"""Answers of the server: refusals with their status, and results as JSON."""

from __future__ import annotations

import json
from typing import Any

import httpx
import numpy as np
from pydantic import BaseModel
from qdrant_client.http import models

SIGNIFICANT = 9
"""Digits of a decimal that is equal to a float32 as a float32."""


class Refused(Exception):
    """An answer other than 200."""

    def __init__(self, status: int, text: str, retry_after: int | None = None) -> None:
        super().__init__(text)
        self.status = status
        self.text = text
        self.retry_after = retry_after

    def response(self) -> httpx.Response:
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        return httpx.Response(
            self.status, json={"status": {"error": self.text}, "time": 0.0}, headers=headers
        )


def refusal_of(error: Exception) -> Refused:
    """Return the answer of a server where the local mode raises this error."""
    text = str(error)
    if isinstance(error, Refused):
        return error
    if isinstance(error, KeyError):
        return Refused(404, f"Not found: No point with id {error.args[0]} found")
    if text.startswith("Collection ") and text.endswith(" not found"):
        name = text.removeprefix("Collection ").removesuffix(" not found")
        return Refused(404, f"Not found: Collection `{name}` doesn't exist!")
    if text.endswith("already exists"):
        return Refused(409, f"Wrong input: {text}!")
    return Refused(400, text if text.startswith("Wrong input") else f"Wrong input: {text}")


def result_of(value: Any, *, is_exact: bool) -> httpx.Response:
    """Return a result as a server sends it. is_exact: numbers as a float32 has them, as over gRPC."""
    result = _plain(value)
    if is_exact:
        result = _exact(result)
    # The root of the server is the only answer without an envelope.
    is_bare = isinstance(value, models.VersionInfo)
    text = json.dumps(result if is_bare else {"result": result, "status": "ok", "time": 0.0})
    return httpx.Response(200, content=text, headers={"Content-Type": "application/json"})


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, models.Record | models.ScoredPoint):
        # Not model_dump, which takes most of the time of a page.
        fields = {"id": value.id, "payload": value.payload, "vector": _vectors(value.vector)}
        if isinstance(value, models.ScoredPoint):
            fields |= {"score": float(as_decimals(value.score)), "version": value.version}
        return fields
    if isinstance(value, models.QueryResponse):
        return {"points": _plain(value.points)}
    if isinstance(value, models.GroupsResult):
        return {
            "groups": [
                {"id": group.id, "hits": _plain(group.hits), "lookup": _plain(group.lookup)}
                for group in value.groups
            ]
        }
    return value.model_dump(mode="json") if isinstance(value, BaseModel) else value


def _vectors(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _vectors(vector) for name, vector in value.items()}
    return value.model_dump() if isinstance(value, models.SparseVector) else value


def _exact(value: Any) -> Any:
    """Return a result with each vector and score as the double that equals the float32."""
    if isinstance(value, list):
        is_vector = bool(value) and isinstance(value[0], float)
        return np.float32(value).tolist() if is_vector else [_exact(item) for item in value]
    if not isinstance(value, dict):
        return value
    result = {name: item if name == "payload" else _exact(item) for name, item in value.items()}
    if isinstance(result.get("score"), float):
        result["score"] = float(np.float32(result["score"]))
    return result


def as_decimals(numbers: Any) -> np.ndarray:
    """Return float32 numbers as the doubles that a client reads in JSON.

    A server prints the shortest decimals, here they have nine digits. Both are equal to the numbers as float32 only.
    """
    doubles = np.asarray(numbers, np.float32).astype(np.float64)
    magnitudes = np.abs(np.where(doubles == 0, 1.0, doubles))
    scale = 10.0 ** (SIGNIFICANT - 1 - np.floor(np.log10(magnitudes)))
    return np.round(doubles * scale) / scale
