"""What a plan says that a copy takes, from one page of rows."""

import numpy as np
import pytest

from milvus_hubness.jobs.migration.estimates import ESTIMATED_ROWS, estimated
from milvus_hubness.jobs.store.generations import Batch
from milvus_hubness.jobs.store.records import VectorField

FIELD = VectorField("vector", dim=4, metric="IP", index_type="FLAT")


def page_of(count):
    return Batch(list(range(count)), np.zeros((count, 4), np.float32), [{}] * count)


@pytest.mark.parametrize("count", [1, 100, 8_000])
def test_a_page_is_read_four_times_a_row_and_a_few_rows_are_corrected(count):
    """Copying reads and writes each row, and the comparison reads it on both sides."""
    corrected = []
    widths = {"source": 4, "target": 8}
    taken = estimated(
        page_of(count), 0.2, lambda rows: corrected.append(len(rows)), FIELD, widths, 1_000_000
    )
    assert corrected == [min(count, ESTIMATED_ROWS)], (
        "a fit on a whole page would take a plan seconds"
    )
    assert taken.seconds == pytest.approx(4 * 0.2 * 1_000_000 / count, rel=0.05)
    assert taken.memory_bytes["target"] - taken.memory_bytes["source"] == 4 * 4 * 1_000_000


def test_an_empty_page_takes_no_time():
    taken = estimated(page_of(0), 0.2, len, FIELD, {"source": 4, "target": 8}, 0)
    assert taken.seconds == 0
