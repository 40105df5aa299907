"""milvus-hubness migrate pause, resume, set-rate and release: of a run, through its control file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from milvus_hubness.cli.console import AsJson, out, show_json
from milvus_hubness.cli.migrate.narration import limit_words
from milvus_hubness.cli.migrate.options import BytesPerSecond, ChunkSeconds, RowsPerSecond
from milvus_hubness.jobs.migration.control_file import write_control

Control = Annotated[Path, typer.Option(help="The file that the run was given as --control.")]
Free = Annotated[
    list[str] | None,
    typer.Option("--free", help="Limit to take away: rows, bytes or chunk; may be given again."),
]
LIMITS = {"rows": "rows_per_second", "bytes": "bytes_per_second", "chunk": "chunk_seconds"}


def pause(control: Control, as_json: AsJson = False) -> None:
    """Have the run rest before its next request. It stays alive, and clients go on writing to both."""
    _write(control, as_json, paused=True)


def resume(control: Control, as_json: AsJson = False) -> None:
    """Have a paused run go on."""
    _write(control, as_json, paused=False)


def set_rate(
    control: Control,
    rows_per_second: RowsPerSecond = None,
    bytes_per_second: BytesPerSecond = None,
    chunk_seconds: ChunkSeconds = None,
    free: Free = None,
    as_json: AsJson = False,
) -> None:
    """Change how fast the run writes, while it does."""
    unknown = [each for each in free or [] if each not in LIMITS]
    given = {
        "rows_per_second": rows_per_second,
        "bytes_per_second": bytes_per_second,
        "chunk_seconds": chunk_seconds,
    }
    changes: dict[str, float | None] = {name: value for name, value in given.items() if value is not None}
    changes |= {LIMITS[each]: None for each in free or [] if each in LIMITS}
    if unknown or not changes:
        raise typer.BadParameter("give a limit, or --free rows, bytes or chunk to take one away")
    _write(control, as_json, **changes)


def release(control: Control, as_json: AsJson = False) -> None:
    """Let the run that was told to --postpone-cutover switch as soon as the copy has caught up."""
    _write(control, as_json, cutover="now")


def _write(control: Path, as_json: bool, **changes: Any) -> None:
    settings = write_control(control, **changes)
    if as_json:
        show_json({"control": settings})
    else:
        out.print(f"{control}: {limit_words(settings)}", highlight=False, markup=False, soft_wrap=True)
