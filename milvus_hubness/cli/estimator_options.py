"""The options that name an estimator and its parameters, shared by the commands."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from milvus_hubness.errors import InvalidParameter
from milvus_hubness.estimators import NNN, Estimator, from_dict
from milvus_hubness.estimators.registry import METHODS, class_name, with_parameters

UNREMARKABLE = {"kernel": "dense", "iterations": 10, "tol": 0.001, "neighbors": None}
_SHOWN = object()

Method = Annotated[
    str | None, typer.Option("--method", help=f"One of {', '.join(METHODS)}.", show_default=False)
]
Params = Annotated[
    list[str] | None,
    typer.Option(
        "--param",
        help="NAME=VALUE, a parameter of the method; may be given again. tau is in units of the score, "
        "temperature in units of the spread of scores.",
        show_default=False,
    ),
]
K = Annotated[int | None, typer.Option("--k", help="NNN and CSLS: how many bank queries count.")]
Alpha = Annotated[float | None, typer.Option("--alpha", help="NNN: share of their mean score to subtract.")]


def chosen_estimator(
    method: str | None,
    params: list[str] | None,
    k: int | None,
    alpha: float | None,
    current: dict[str, Any] | None = None,
) -> Estimator | None:
    """What the options ask for; None where they ask for nothing.

    current: the estimator in use, as its dictionary, whose parameters hold where the options name none.
    --k and --alpha without --method mean NNN. Raises InvalidParameter.
    """
    asked = {name: value for name, value in (("k", k), ("alpha", alpha)) if value is not None}
    asked |= pairs_of(params, "--param")
    if isinstance(asked.get("alpha"), int | float) and asked["alpha"] <= 0:
        raise InvalidParameter(f"alpha must be above 0, not {asked['alpha']!r}: at 0 nothing is corrected")
    if method is None and not asked:
        return None
    if method is None and current is not None:
        options = {"k": "--method nnn or csls", "alpha": "--method nnn"}
        for option in (name for name in asked if name in options and name not in current):
            raise InvalidParameter(
                f"--{option} needs {options[option]}: the estimator in use, {describe(current)}, has none"
            )
        return from_dict(with_parameters(current, asked))
    name = NNN.__name__ if method is None else class_name(method)
    return from_dict(with_parameters({"name": name}, asked))


def pairs_of(texts: list[str] | None, option: str) -> dict[str, Any]:
    """What NAME=VALUE texts say. Raises InvalidParameter naming the option."""
    found: dict[str, Any] = {}
    for text in texts or []:
        name, equals, value = text.partition("=")
        if not (name and equals):
            raise InvalidParameter(f"{option} takes NAME=VALUE, got {text!r}")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found


def describe(estimator: dict[str, Any]) -> str:
    """An estimator's dictionary as people write it, ½ NNN(k=16, alpha=0.75) + …, less what is always so."""
    if "estimators" in estimator:
        shares = rounded_shares(estimator["weights"])
        pairs = zip(shares, estimator["estimators"], strict=True)
        return " + ".join(f"{share / 100:g} {_part(part)}" for share, part in pairs)
    shown = {name: value for name, value in estimator.items() if UNREMARKABLE.get(name, _SHOWN) != value}
    params = ", ".join(
        f"{name}={_number(each)}" for name, each in shown.items() if name not in ("name", "items")
    )
    return f"{estimator['name']}({params})"


def rounded_shares(weights: Sequence[float]) -> list[int]:
    """Return the weights of a Blend in hundredths, rounded so that they add up to 100."""
    shares = [int(100 * weight) for weight in weights]
    left = sorted(range(len(shares)), key=lambda i: shares[i] - 100 * weights[i])
    for i in left[: 100 - sum(shares)]:
        shares[i] += 1
    return shares


def _number(value: Any) -> Any:
    return f"{value:.3g}" if isinstance(value, float) else value


def _part(estimator: dict[str, Any]) -> str:
    return f"({describe(estimator)})" if "estimators" in estimator else describe(estimator)
