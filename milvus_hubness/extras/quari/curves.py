"""The page with the learning curves of a network."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from milvus_hubness.extras.quari.checkpoint import Epoch
from milvus_hubness.reports.charts import curve, page_template

HEIGHT = 220
LONGEST = 160


def learning_curves(history: Sequence[Epoch], best: int) -> str:
    """Return an HTML page with the training loss, and MRR and R@1 of the validation pairs.

    best: the epoch that is kept. Write the page with encoding="utf-8".
    """
    charts = [
        _chart("Training loss", [(one.epoch, one.loss) for one in history], best),
        _chart("Validation MRR", [(one.epoch, one.mrr) for one in history], best, percent=True),
        _chart("Validation R@1", [(one.epoch, one.r1) for one in history], best, percent=True),
    ]
    template = page_template(__package__, "curves.html", LONGEST)
    return template.render(history=history, best=best, charts=list(filter(None, charts)))


def _chart(
    title: str, values: Sequence[tuple[int, float | None]], best: int, *, percent: bool = False
) -> Markup | None:
    """Return a chart of the epochs whose value is known; None if there is none."""
    measured = [(epoch, value) for epoch, value in values if value is not None]
    if not measured:
        return None

    epochs, heights = zip(*measured, strict=True)
    names = ("epoch", "the epoch", "best")
    return curve(title, epochs, heights, best, HEIGHT, percent=percent, of=names)
