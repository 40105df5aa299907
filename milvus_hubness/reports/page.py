"""The HTML page of a diagnosis."""

from __future__ import annotations

from milvus_hubness.quality.verdict import EXPECTED_GAIN, LITTLE_EXCESS, expected_gain
from milvus_hubness.reports import charts
from milvus_hubness.reports.images import Images

LONGEST = 160
"""Letters of a text that the page shows."""


def render(diagnosis: object, image_field: str | None = None, images: Images | None = None) -> str:
    """Return the HTML page of a `Diagnosis` in UTF-8; write it with encoding="utf-8".

    image_field: a field of items with the path or URL of an image, which the page shows. images:
    embeds the files of its folder; by default of none.
    """
    images = images or Images()
    template = charts.page_template(__package__, "report.html", LONGEST, picture=images.element)
    facts = {
        "expected": EXPECTED_GAIN,
        "gain_at": expected_gain,
        "little": LITTLE_EXCESS,
        "images": images,
    }
    return template.render(d=diagnosis, charts=charts, image_field=image_field, **facts)
