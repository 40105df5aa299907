"""How a training went, as one SVG that stands by itself."""

from __future__ import annotations

from collections.abc import Sequence

from milvus_hubness.quality.report_charts import round_ticks, svg_text
from milvus_hubness.quari.checkpoint import Checkpoint

WIDTH, HEIGHT = 640, 420
LEFT, RIGHT, GAP = 60, 20, 44
STYLE = """
svg{font:13px system-ui,sans-serif;background:#fff} text{fill:#222} .soft{fill:#666}
.grid{stroke:#e3e3e3} .loss{stroke:#b4531a} .mrr{stroke:#1a6fb4} .r1{stroke:#6a9f2d}
polyline{fill:none;stroke-width:2} text.loss{fill:#b4531a;stroke:none} text.mrr{fill:#1a6fb4;stroke:none}
text.r1{fill:#4c7a17;stroke:none} .best{stroke:#222;stroke-dasharray:4 3}
"""

Points = Sequence[tuple[int, float]]


def learning_curves(trained: Checkpoint) -> str:
    """The training loss above, MRR and R@1 of the validation pairs below, against the epochs; the epoch that
    was kept is marked."""
    history = trained.history
    last = max(history[-1].epoch, 1)
    losses = [(each.epoch, each.loss) for each in history if each.loss is not None]
    mrr = [(each.epoch, 100 * each.mrr) for each in history]
    r1 = [(each.epoch, 100 * each.r1) for each in history]
    middle = HEIGHT // 2
    kept = LEFT + (WIDTH - LEFT - RIGHT) * trained.best_epoch / last
    parts = [
        *_panel("training loss", [("loss", losses)], last, 24, middle - GAP // 2),
        *_panel("validation, %: MRR", [("mrr", mrr), ("r1", r1)], last, middle + GAP // 2, HEIGHT - 34),
        svg_text(LEFT + 160, middle + GAP // 2 - 8, "R@1", "start", "r1"),
        f'<line class="best" x1="{kept:.1f}" x2="{kept:.1f}" y1="24" y2="{HEIGHT - 34}"/>',
        svg_text(
            kept, 14, f"kept: epoch {trained.best_epoch}", "end" if kept > WIDTH / 2 else "start", "soft"
        ),
        svg_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 4, "epoch", "middle", "soft"),
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="How the training went"><style>{STYLE}</style>{"".join(parts)}</svg>\n'
    )


def _panel(title: str, lines: Sequence[tuple[str, Points]], last: int, top: int, bottom: int) -> list[str]:
    """Lines over the epochs 0 … last, between two heights."""
    parts = [svg_text(LEFT, top - 8, title, "start", lines[0][0])]
    values = [value for _, points in lines for _, value in points]
    if not values:
        return parts
    ticks = round_ticks(min(values), max(values))
    low, high = min(*values, ticks[0]), max(*values, ticks[-1])

    def x(epoch: int) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * epoch / last

    def y(value: float) -> float:
        return bottom - (bottom - top) * (value - low) / (high - low)

    for tick in ticks:
        at = f'y1="{y(tick):.1f}" y2="{y(tick):.1f}"'
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" {at}/>')
        parts.append(svg_text(LEFT - 6, y(tick) + 4, f"{tick:.4g}", "end", "soft"))
    for epoch in sorted({round(last * nth / 5) for nth in range(6)}):
        parts.append(svg_text(x(epoch), bottom + 15, str(epoch), "middle", "soft"))
    for name, points in lines:
        corners = " ".join(f"{x(epoch):.1f},{y(value):.1f}" for epoch, value in points)
        parts.append(f'<polyline class="{name}" points="{corners}"/>')
    return parts
