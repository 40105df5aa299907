"""Estimators as plain dictionaries and back, for the JSON of a collection state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from milvus_hubness.errors import InvalidParameter
from milvus_hubness.estimators.base import TEMPERATURE_OF, Estimator
from milvus_hubness.estimators.blend import Blend
from milvus_hubness.estimators.csls import CSLS
from milvus_hubness.estimators.distribution_normalization import DistributionNormalization
from milvus_hubness.estimators.dual_inverted_softmax import DualInvertedSoftmax
from milvus_hubness.estimators.inverted_softmax import InvertedSoftmax
from milvus_hubness.estimators.nnn import NNN
from milvus_hubness.estimators.sinkhorn import DualBankSinkhorn, Sinkhorn

ESTIMATORS: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        NNN,
        CSLS,
        InvertedSoftmax,
        DualInvertedSoftmax,
        DistributionNormalization,
        Sinkhorn,
        DualBankSinkhorn,
        Blend,
    )
}

METHODS = {name.lower(): name for name in ESTIMATORS} | {
    "is": "InvertedSoftmax",
    "dualis": "DualInvertedSoftmax",
    "dn": "DistributionNormalization",
    "sn": "Sinkhorn",
    "dbsn": "DualBankSinkhorn",
}
"""The classes by their user-facing names; case does not matter."""
SHORT_METHODS = [
    min((method for method in METHODS if METHODS[method] == name), key=len) for name in ESTIMATORS
]


def class_name(method: str) -> str:
    """Return the name in ESTIMATORS of a method as users write it. Raises InvalidParameter."""
    if method.lower() not in METHODS:
        raise InvalidParameter(f"no method {method!r}: use one of {', '.join(SHORT_METHODS)}")
    return METHODS[method.lower()]


def to_dict(estimator: Estimator) -> dict[str, Any]:
    """Return {"name": "NNN", "k": 128, …}: the class and its parameters, fit for JSON.

    The device is left out, and so is each tau, temperature or number of items that is not set. Raises
    InvalidParameter for an estimator that is not one of this package's.
    """
    name = type(estimator).__name__
    if ESTIMATORS.get(name) is not type(estimator):
        raise InvalidParameter(f"{name} cannot be kept with a collection; use one of {', '.join(ESTIMATORS)}")
    if isinstance(estimator, Blend):
        return {
            "name": name,
            "estimators": [to_dict(part) for part in estimator.estimators],
            "weights": list(estimator.weights),
        }
    values = {parameter: getattr(estimator, parameter) for parameter in _parameters(type(estimator))}
    optional = {*TEMPERATURE_OF, *TEMPERATURE_OF.values(), "items"}
    return {"name": name} | {
        parameter: value
        for parameter, value in values.items()
        if value is not None or parameter not in optional
    }


def from_dict(values: Mapping[str, Any], *, device: str = "auto") -> Estimator:
    """Return the estimator that `to_dict` described, to run on `device`.

    Missing parameters have their defaults. Raises InvalidParameter for an unknown name, an unknown parameter
    or a value out of range.
    """
    if not isinstance(values, Mapping):
        raise InvalidParameter(f"an estimator is described by a dictionary, not by {values!r}")
    parameters = dict(values)
    name = parameters.pop("name", None)
    if name not in ESTIMATORS:
        raise InvalidParameter(f"no estimator is named {name!r}; there are {', '.join(ESTIMATORS)}")
    kind = ESTIMATORS[name]
    known = _parameters(kind)
    unknown = [parameter for parameter in parameters if parameter not in known]
    if unknown:
        raise InvalidParameter(f"{name} has no parameter {unknown[0]!r}: use one of {', '.join(known)}")
    if kind is Blend:
        parts = parameters.get("estimators", [to_dict(part) for part in Blend().estimators])
        if not isinstance(parts, list | tuple):
            raise InvalidParameter(f"a Blend's estimators are a list of dictionaries, not {parts!r}")
        parameters["estimators"] = tuple(from_dict(part, device=device) for part in parts)
    elif "device" in kind.__dataclass_fields__:
        parameters["device"] = device
    estimator: Estimator = kind(**parameters)
    return estimator


def is_same(estimator: Estimator, values: Mapping[str, Any]) -> bool:
    """Return whether `to_dict` described this estimator, apart from values measured in a fit."""
    return estimator.unmeasured() == from_dict(values).unmeasured()


def with_parameters(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the dictionary of an estimator with some parameters changed.

    A tau replaces its temperature, and a temperature replaces its tau. Raises InvalidParameter if both are in
    `changes`.
    """
    changed = dict(values)
    for tau, temperature in TEMPERATURE_OF.items():
        if tau in changes and temperature in changes:
            raise InvalidParameter(
                f"both {tau} and {temperature} are given: choose {tau}, in units of the score, or "
                f"{temperature}, in units of the spread of scores"
            )
        if tau in changes or temperature in changes:
            changed.pop(tau, None)
            changed.pop(temperature, None)
    return changed | dict(changes)


def _parameters(kind: type[Any]) -> list[str]:
    return [field.name for field in fields(kind) if field.name != "device"]
