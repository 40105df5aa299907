"""What `check` shows beside its verdict: a page with the hubs, their figures, and files for evaluators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from milvus_hubness.basics.defaults import RUN_DEPTH
from milvus_hubness.basics.files.writing import check_writable, expect_different
from milvus_hubness.basics.texts import points
from milvus_hubness.cli import console, options

if TYPE_CHECKING:
    from milvus_hubness.jobs.common.judgements import Judgements
    from milvus_hubness.quality.groups import Group
    from milvus_hubness.quality.measures import Interval
    from milvus_hubness.reports.report import Detail, Diagnosis
    from milvus_hubness.reports.runs import RunFiles


@dataclass(frozen=True)
class PageOptions:
    """The options about the hubs; with one of them, `check` searches for these."""

    page: Annotated[
        Path | None, "HTML page to write: the hubs, and what correction does about them."
    ] = None
    query_text: options.QueryText = None
    image_field: Annotated[
        str | None,
        "Scalar field with the URL of an image of the row, or with its path below --image-folder.",
    ] = None
    image_folder: Annotated[
        Path | None, "Folder of the images that the page embeds; files elsewhere are not read."
    ] = None
    slice_by: Annotated[
        str | None, "Scalar field; each of its frequent values gets a report of its own."
    ] = None
    group_by: Annotated[
        str | None,
        "Scalar field; each of its frequent values gets its share of the answers, and the share "
        "due to it.",
    ] = None
    save_run: Annotated[
        tuple[Path, Path] | None,
        "Two files to write for evaluators such as trec_eval: the rankings of all queries without "
        "and with correction, as TREC runs, or as dictionaries if the names end in .json.",
        {"metavar": "RAW CORRECTED"},
    ] = None
    save_qrels: Annotated[
        Path | None,
        "File to write with the judgements that the figures are about; needs --save-run.",
    ] = None
    run_depth: Annotated[int, "Rows of each query in --save-run.", {"min": 1}] = RUN_DEPTH

    def __post_init__(self) -> None:
        if self.image_folder is not None:
            if self.image_field is None:
                raise typer.BadParameter(
                    "--image-folder needs --image-field, the field that names the images"
                )
            if not self.image_folder.is_dir():
                raise typer.BadParameter(
                    f"--image-folder {str(self.image_folder)!r} is no folder: name one"
                )
        if self.image_field is not None and self.page is None:
            raise typer.BadParameter("--image-field is about a page: pass --page")
        if self.save_qrels is not None and self.save_run is None:
            raise typer.BadParameter(
                "--save-qrels needs --save-run, whose rankings they are to judge"
            )
        if self.run_depth != RUN_DEPTH and self.save_run is None:
            raise typer.BadParameter("--run-depth is of the files of --save-run: name these")

    @property
    def is_given(self) -> bool:
        """Whether the hubs are to be searched, which takes as long again as the verdict."""
        return self != PageOptions()

    @cached_property
    def runs(self) -> RunFiles | None:
        """The files for evaluators; None without any."""
        from milvus_hubness.reports.runs import RunFiles

        if self.save_run is None:
            return None
        return RunFiles(*self.save_run, qrels=self.save_qrels, depth=self.run_depth)

    def expect_possible(self, read: Sequence[tuple[str, str | None]], queries: str | None) -> None:
        """Check before the work that the files can be written, and what goes with which queries.

        read: files that the command reads, each with its option. queries: the file of queries apart
        from the bank, with or without right rows. Raises typer.BadParameter and UnreadableFile.
        """
        needs_queries = {"--query-text": self.query_text, "--save-run": self.save_run}
        for option, value in needs_queries.items():
            if value is not None and queries is None:
                raise typer.BadParameter(
                    f"{option} is about queries apart from the bank: pass --pairs or --queries"
                )

        written = [] if self.page is None else [("--page", self.page)]
        if self.runs is not None:
            written += self.runs.named
        if not written:
            return
        # Two inputs may be one file.
        for option, path in read:
            if path:
                expect_different([(option, Path(path)), *written])
        if self.page is not None:
            check_writable(self.page)

    def detail(self, texts: Sequence[str] | None) -> Detail | None:
        """Return what is to be shown of the hubs; None if no option is about them.

        texts: of the queries, unless these are of judgements.
        """
        from milvus_hubness.reports.report import Detail

        if not self.is_given:
            return None
        return Detail(texts, self.slice_by, self.group_by, self.runs, self.image_field)


@dataclass(frozen=True)
class Hubs:
    """The hubs as a command reports them, whose page is written."""

    diagnosis: Diagnosis
    named: PageOptions
    """What the caller named."""
    images_left_out: int
    """Number of images that the page does not show."""
    remarks: tuple[str, ...]
    """Warnings about the files that are written."""

    @classmethod
    def written(
        cls, diagnosis: Diagnosis, named: PageOptions, judgements: Judgements | None
    ) -> Hubs:
        """Write the page that is named, if one is. Raises UnreadableFile."""
        from milvus_hubness.reports.images import Images
        from milvus_hubness.reports.page import render

        images = Images(named.image_folder)
        if named.page is not None:
            console.write_page(named.page, render(diagnosis, named.image_field, images))

        remarks = [images.remark]
        if named.runs is not None and judgements is not None:
            remarks.append(named.runs.remark(diagnosis.measure, diagnosis.n_items, judgements))
        return cls(diagnosis, named, images.left_out, tuple(filter(None, remarks)))

    @property
    def run_paths(self) -> list[str]:
        """The files for evaluators."""
        return list(map(str, self.named.runs.paths)) if self.named.runs is not None else []

    def to_dict(self) -> dict[str, Any]:
        """Return what --json has of them."""
        page = {} if self.named.page is None else {"page": str(self.named.page)}
        return {
            "diagnosis": self.diagnosis.to_dict(),
            **page,
            "images_left_out": self.images_left_out,
            "runs": self.run_paths,
        }

    def warn(self) -> None:
        """Print the warnings to standard error."""
        for remark in self.remarks:
            console.say(f"milvus-hubness: warning: {remark}", to_stderr=True)


def show_diagnosis(diagnosis: Diagnosis, files: Sequence[str] = ()) -> None:
    """Print the figures of the hubs. files: those for evaluators."""
    from milvus_hubness.quality.verdict import chance_excess

    before = diagnosis.before
    after = diagnosis.after
    measured = None
    if diagnosis.gain is not None:
        values = f"{diagnosis.value_before:.1%} -> {diagnosis.value_after:.1%}"
        measured = f"{values}: {points(diagnosis.gain)}"

    chance = chance_excess(diagnosis.k * diagnosis.n_queries / diagnosis.n_items)
    antihubs = diagnosis.antihubs
    reciprocity = diagnosis.reciprocity
    at_most = f"; at most {reciprocity.at_most:.1%}" if reciprocity.at_most < 1 else ""
    facts = {
        "queries": f"{diagnosis.n_queries:,} over {diagnosis.n_items:,} items",
        "strength": f"{diagnosis.strength:g}",
        f"skewness of N_{diagnosis.k}": f"{before.skewness:.2f} -> {after.skewness:.2f}",
        "reciprocity": (
            f"{reciprocity.before:.1%} -> {reciprocity.after:.1%} of {reciprocity.distinct:,} "
            f"distinct queries{at_most}"
        ),
        "largest hub": (
            f"{before.largest:,} -> {after.largest:,} of {diagnosis.n_queries:,} queries"
        ),
        f"answers from hubs, N_{diagnosis.k} ≥ {2 * diagnosis.k}": (
            f"{before.hub_occurrence:.1%} -> {after.hub_occurrence:.1%}"
        ),
        "excess answers taken by hubs": (
            f"{before.excess_answers:.1%} -> {after.excess_answers:.1%}; {chance:.1%} by chance"
        ),
        "items never found": (
            f"{antihubs.before:,} -> {antihubs.after:,}; {antihubs.by_chance:,.0f} by chance, with "
            f"{diagnosis.n_queries:,} queries"
        ),
        diagnosis.measure: measured,
        "the bank": next((str(one) for one in diagnosis.findings if one.name == "log"), None),
        "demand": diagnosis.demand.sentence if diagnosis.demand else None,
        "runs": ", ".join(files) or None,
    }
    console.show_facts(f"\n{diagnosis.title}, without and with correction", facts)
    if diagnosis.slices:
        _show_slices(diagnosis)
    if diagnosis.kinds:
        _show_kinds(diagnosis)
    if diagnosis.groups:
        _show_groups(diagnosis)


def _show_slices(diagnosis: Diagnosis) -> None:
    rows = [
        (
            value.name,
            f"{value.items:,}",
            f"{value.share_before:.1%} -> {value.share_after:.1%}",
            f"{value.before.skewness:.2f} -> {value.after.skewness:.2f}",
            f"{100 * value.gain.estimate:+.1f}" if value.gain else "",
            ", ".join(str(hub.key) for hub in value.hubs),
        )
        for value in diagnosis.slices
    ]
    measures = ("items", "share of answers", "skewness", "gain, points", "worst hubs")
    console.show_table("\nBy value", (str(diagnosis.slice_by), *measures), rows)


def _show_kinds(diagnosis: Diagnosis) -> None:
    rows = []
    for kind in diagnosis.kinds:
        value = ""
        if kind.value_before is not None and kind.value_after is not None:
            value = f"{kind.value_before:.1%} -> {kind.value_after:.1%}"
        rows.append((*_share_cells(kind.shares), value))

    headings = ("kind", *_share_headings(diagnosis), diagnosis.measure if diagnosis.gain else "")
    title = f"\nBy kind: {diagnosis.kind}; excess of the first answers in points, 95%"
    console.show_table(title, headings, rows)


def _show_groups(diagnosis: Diagnosis) -> None:
    rows = list(map(_share_cells, diagnosis.groups))
    headings = (str(diagnosis.group_by), *_share_headings(diagnosis))
    title = "\nShares by value; excess of the first answers in points, 95%"
    console.show_table(title, headings, rows)


def _share_headings(diagnosis: Diagnosis) -> tuple[str, ...]:
    """Return the headings of what `_share_cells` returns, without the first."""
    answers = ("first answers", f"first {diagnosis.k}", "excess, raw", "corrected")
    return ("items", "right answers", *answers)


def _share_cells(group: Group) -> tuple[str, ...]:
    return (
        group.name,
        f"{group.gallery:.1%}",
        f"{group.right.estimate:.1%}" if group.right else "",
        f"{group.first_before.estimate:.1%} -> {group.first_after.estimate:.1%}",
        f"{group.top_before.estimate:.1%} -> {group.top_after.estimate:.1%}",
        _in_points(group.excess_before),
        _in_points(group.excess_after),
    )


def _in_points(interval: Interval) -> str:
    estimate, low, high = (100 * bound for bound in interval)
    return f"{estimate:+.1f} ({low:+.1f} … {high:+.1f})"
