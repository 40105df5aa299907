"""What Prometheus sees of a migration."""

import math
import tempfile
from datetime import datetime, timezone
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from milvus_hubness.jobs.common.control import MigrationMetrics
from milvus_hubness.jobs.common.progress import PHASES, Event

PREFIX = "milvus_hubness_migration_"
AT = datetime(2025, 1, 2, tzinfo=timezone.utc)


@pytest.fixture
def metrics():
    return MigrationMetrics("products", "products_hubness")


def samples(metrics):
    """Values by name without the prefix; those of a further label by name and its value."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "migration.prom"
        metrics.write_textfile(path)
        # The collector of node_exporter may read it at any moment: it is replaced as a whole.
        assert list(path.parent.iterdir()) == [path]
        text = path.read_text()
    read = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert (labels.pop("source"), labels.pop("target")) == ("products", "products_hubness")
            assert sample.name.startswith(PREFIX)
            read[(sample.name.removeprefix(PREFIX), *labels.values())] = sample.value
    return read


def copied(rows, size, seconds, eta):
    facts = {
        "rows": rows,
        "rows_total": 1_000,
        "bytes": size,
        "seconds": seconds,
        "eta_seconds": eta,
    }
    return Event("copying", facts, AT)


def test_copying_is_counted(metrics):
    assert math.isnan(samples(metrics)[("eta_seconds",)])
    metrics(copied(100, 4_000, 0.2, None))
    assert math.isnan(samples(metrics)[("eta_seconds",)])
    metrics(copied(250, 6_000, 3.0, 12.5))
    read = samples(metrics)
    assert read[("rows_copied_total",)] == 250
    assert read[("bytes_copied_total",)] == 10_000
    assert read[("source_rows",)] == 1_000
    assert read[("eta_seconds",)] == 12.5
    assert read[("last_progress_timestamp_seconds",)] == AT.timestamp()
    assert (read[("chunk_seconds_count",)], read[("chunk_seconds_sum",)]) == (2, pytest.approx(3.2))
    assert (read[("chunk_seconds_bucket", "0.25")], read[("chunk_seconds_bucket", "5.0")]) == (1, 2)


def test_a_run_that_continues_has_what_earlier_runs_did(metrics):
    facts = {"phase": "catching up", "rows": 1_000, "rows_total": 1_000}
    metrics(Event("continuing", facts, AT))
    read = samples(metrics)
    assert (read[("source_rows",)], read[("rows_copied_total",)]) == (1_000, 1_000)
    assert read[("last_progress_timestamp_seconds",)] == AT.timestamp()
    assert (read[("phase", "catching up")], read[("phase", "copying")]) == (1, 0)


def test_an_alert_on_missing_progress_counts_from_the_start(metrics):
    read = samples(metrics)
    assert read[("last_progress_timestamp_seconds",)] == pytest.approx(
        datetime.now(timezone.utc).timestamp(), abs=60
    )


def test_passes_are_added_up(metrics):
    for number, differing, repaired in [(1, 3, 2), (1, 8, 8), (2, 8, 1), (3, 0, 0)]:
        facts = {
            "pass": number,
            "rows": 9,
            "rows_total": 9,
            "differing": differing,
            "repaired": repaired,
        }
        metrics(Event("catching-up", facts, AT))
    read = samples(metrics)
    assert (read[("rows_differing_total",)], read[("rows_repaired_total",)]) == (16, 9)


@pytest.mark.parametrize(("name", "phase"), PHASES.items())
def test_exactly_one_phase_holds(metrics, name, phase):
    metrics(Event("paused", {"reason": "the control file"}, AT))
    metrics(Event(name, copied(1, 1, 1, 1).facts | {"pass": 1, "differing": 0, "repaired": 0}, AT))
    metrics(Event("rate", {}, AT))
    read = samples(metrics)
    assert [key[1] for key, value in read.items() if key[0] == "phase" and value] == [phase]


def test_a_pause_is_shown_until_its_end(metrics):
    assert samples(metrics)[("paused",)] == 0
    metrics(Event("paused", {"reason": "the control file"}, AT))
    metrics(copied(100, 4_000, 0.2, None))
    assert samples(metrics)[("paused",)] == 1
    metrics(Event("resumed", {"reason": "the control file"}, AT))
    assert samples(metrics)[("paused",)] == 0


def test_two_migrations_in_one_process_do_not_mix(metrics):
    MigrationMetrics("products", "products_hubness")(copied(100, 1, 1, 1))
    assert samples(metrics)[("rows_copied_total",)] == 0
