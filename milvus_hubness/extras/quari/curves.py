"""The page with the learning curves of a network."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from milvus_hubness.extras.quari.checkpoint import Epoch
from milvus_hubness.reports.charts import curve, page_template

HEIGHT = 220
"""Height of a chart, in pixels."""
LONGEST = 160
"""Most characters of a text on the page."""


def learning_curves(history: Sequence[Epoch], best: int) -> str:
    """Return an HTML page with the training loss, and MRR and R@1 of the validation pairs.

    best: the epoch whose weights the network has. Write the page with encoding="utf-8".
    """
    losses = [(epoch.epoch, epoch.loss) for epoch in history]
    mrr = [(epoch.epoch, epoch.mrr) for epoch in history]
    r1 = [(epoch.epoch, epoch.r1) for epoch in history]

    charts = [
        _chart("Training loss", losses, best),
        _chart("Validation MRR", mrr, best, percent=True),
        _chart("Validation R@1", r1, best, percent=True),
    ]
    template = page_template(__package__, "curves.html", LONGEST)
    return template.render(history=history, best=best, charts=list(filter(None, charts)))


def _chart(
    title: str, values: Sequence[tuple[int, float | None]], best: int, *, percent: bool = False
) -> Markup | None:
    """Return a chart of the epochs that have a value; None if none has."""
    # Epoch 0 is the network before its first step, which has no loss.
    measured = [(epoch, value) for epoch, value in values if value is not None]
    if not measured:
        return None

    epochs, heights = zip(*measured, strict=True)
    axis_names = ("epoch", "the epoch", "best")
    return curve(title, epochs, heights, best, HEIGHT, percent=percent, of=axis_names)
