"""The commands milvus-hubness quari train, eval and show."""

from __future__ import annotations

from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from milvus_hubness.charts import learning_curves
from milvus_hubness.cli.console import (
    DEFAULT_URI,
    AsJson,
    Database,
    TokenFile,
    Uri,
    check_writable,
    open_store,
    out,
    progress_bars,
    show_facts,
    show_json,
    write_page,
)
from milvus_hubness.quari import Checkpoint, QuariConfig, QuariReranker, TrainingSettings
from milvus_hubness.quari import train as train_network
from milvus_hubness.quari.reranker import read_labelled

PairsFile = Annotated[
    str,
    typer.Option(
        "--pairs",
        help="Labelled pairs: .npz, .parquet or .arrow with 'query' and either 'item', the vector of the "
        "right answer, or with --collection 'key', of its row.",
        show_default=False,
    ),
]
Collection = Annotated[
    str | None,
    typer.Option(help="Collection, corrected or not, whose rows are the gallery; without it the items are."),
]
Field = Annotated[str | None, typer.Option(help="Vector field, where there are several.")]
Encoder = Annotated[
    str | None,
    typer.Option(
        help="Name and version of what made the vectors; a network is for the one it was trained on."
    ),
]
Device = Annotated[str, typer.Option(help="Where to compute: auto, cpu, cuda or cuda:<number>.")]
NetworkFile = Annotated[Path, typer.Argument(help="The network, as quari train wrote it.")]


SIZES, TRAINING = QuariConfig(dim=1), TrainingSettings()


def train(
    context: typer.Context,
    pairs: PairsFile,
    out: Annotated[Path, typer.Option(help="Where to keep the network; its curves go beside, as .svg.")],
    collection: Collection = None,
    field: Field = None,
    validation: Annotated[
        float, typer.Option(help="Share of the answered items held out to choose the epoch by.")
    ] = 0.1,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Go on with the training that --out holds, with the same options."),
    ] = False,
    encoder: Encoder = None,
    rank: Annotated[int, typer.Option(help="Products u vᵀ that make T.")] = SIZES.rank,
    width: Annotated[int, typer.Option(help="Of a token.")] = SIZES.width,
    layers: Annotated[int, typer.Option(help="Of the transformer.")] = SIZES.layers,
    steps: Annotated[int, typer.Option(help="How often the transformer is applied.")] = SIZES.steps,
    form: Annotated[
        str, typer.Option(help="published, residual (T = I + …) or anchored (maps for all queries first).")
    ] = SIZES.form,
    anchors: Annotated[
        int, typer.Option(help="Axes that tell lengths under the anchored form's map.")
    ] = SIZES.anchors,
    memory: Annotated[
        int, typer.Option(help="Training pairs that it remembers (ours, not as published); 0 for none.")
    ] = SIZES.memory,
    dropout: Annotated[float, typer.Option(help="In the transformer, while training.")] = SIZES.dropout,
    adapt_query: Annotated[
        bool, typer.Option(help="Whether the query is customised: an ablation where not.")
    ] = True,
    adapt_gallery: Annotated[
        bool, typer.Option(help="Whether the gallery is transformed: an ablation where not.")
    ] = True,
    epochs: Annotated[int, typer.Option(help="At most.")] = TRAINING.epochs,
    patience: Annotated[int, typer.Option(help="Epochs without a better one that end it.")] = (
        TRAINING.patience
    ),
    batch: Annotated[int, typer.Option(help="Pairs in a step.")] = TRAINING.batch,
    learning_rate: Annotated[float, typer.Option(help="Where the cosine begins.")] = TRAINING.learning_rate,
    least_rate: Annotated[float, typer.Option(help="Where it ends.")] = TRAINING.least_rate,
    anchor_epochs: Annotated[
        int, typer.Option(help="At first, in which only the anchored form's maps learn.")
    ] = TRAINING.anchor_epochs,
    anchor_rate: Annotated[
        float, typer.Option(help="Where their cosine begins in these.")
    ] = TRAINING.anchor_rate,
    weight_decay: Annotated[float, typer.Option(help="Of AdamW.")] = TRAINING.weight_decay,
    temperature: Annotated[float, typer.Option(help="Of the loss.")] = TRAINING.temperature,
    noise: Annotated[float, typer.Option(help="On queries; 0 for none.")] = TRAINING.noise,
    semi_positives: Annotated[
        int, typer.Option(help="Near items of each answer that count in part; 0 for none.")
    ] = TRAINING.semi_positives,
    seed: Annotated[int, typer.Option(help="Of all that is drawn.")] = TRAINING.seed,
    device: Device = "auto",
    uri: Uri = DEFAULT_URI,
    db: Database = "",
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Train a network on labelled pairs of vectors. It is written after every epoch, so that a training that
    was ended goes on with --resume."""
    settings = TrainingSettings(**_named(TrainingSettings, context))
    sizes = _named(QuariConfig, context)
    QuariConfig(dim=1, **sizes)
    curves = out.with_suffix(".svg")
    check_writable(curves)
    with progress_bars() as progress:
        labelled = read_labelled(
            pairs,
            collection,
            open_store=partial(open_store, uri, db, token_file),
            field=field,
            progress=progress,
        ).pairs
        learned, held = labelled.split(validation, seed)
        trained = train_network(
            learned,
            QuariConfig(learned.dim, **sizes),
            settings,
            validation=held,
            path=out,
            resume=resume,
            encoder=encoder,
            device=device,
            progress=progress,
        )
    write_page(curves, learning_curves(trained.history, trained.best_epoch))
    found = {
        **training_facts(trained),
        "left_out": labelled.left_out,
        "network": str(out),
        "curves": str(curves),
    }
    if as_json:
        show_json({"quari": found})
    else:
        show_facts(f"Trained on {trained.pairs} pairs, judged on {len(held)}", in_words(found))


def _named(kind: type[TrainingSettings] | type[QuariConfig], context: typer.Context) -> dict[str, Any]:
    """Return the options that have the name of a field of `kind`."""
    return {each.name: context.params[each.name] for each in fields(kind) if each.name in context.params}


def training_facts(trained: Checkpoint) -> dict[str, Any]:
    """Return the facts about a network, with its first and best epochs."""
    best = next(each for each in trained.history if each.epoch == trained.best_epoch)
    return {
        **trained.facts(),
        "parameters": sum(each.numel() for each in trained.weights.values()),
        "before": trained.history[0]._asdict(),
        "best": best._asdict(),
    }


def in_words(found: dict[str, Any]) -> dict[str, object]:
    """Return the facts in words, for people."""
    before, best, sizes = found["before"], found["best"], found["config"]
    return {
        "network": found.get("network"),
        "curves": found.get("curves"),
        "encoder": found["encoder"],
        "sizes": f"d {sizes['dim']}, rank {sizes['rank']}, width {sizes['width']}, {sizes['layers']} layers "
        f"× {sizes['steps']} steps, {sizes['form']}; {found['parameters']:,} parameters",
        "remembers": f"{sizes['memory']} pairs" if sizes["memory"] else None,
        "epochs": f"{found['history'][-1]['epoch']} of {found['settings']['epochs']}, kept {best['epoch']}",
        "validation R@1": f"{100 * before['r1']:.1f}% → {100 * best['r1']:.1f}%",
        "validation MRR": f"{100 * before['mrr']:.1f}% → {100 * best['mrr']:.1f}%",
        "left out": f"{found['left_out']} pairs without a direction" if found.get("left_out") else None,
    }


def show(
    network: NetworkFile,
    plot: Annotated[Path | None, typer.Option(help="Write its learning curves there, as .svg.")] = None,
    as_json: AsJson = False,
) -> None:
    """Tell what a network is: its sizes, what it was trained on, and how that went."""
    kept = Checkpoint.load(network)
    if plot is not None:
        write_page(plot, learning_curves(kept.history, kept.best_epoch))
    found = {**training_facts(kept), "network": str(network), "curves": str(plot) if plot else None}
    if as_json:
        show_json({"quari": found})
    else:
        show_facts(f"Trained on {kept.pairs} pairs", in_words(found))


def evaluate(
    network: NetworkFile,
    pairs: PairsFile,
    collection: Collection = None,
    field: Field = None,
    candidates: Annotated[int, typer.Option(help="How many items of the search are re-ranked.")] = 1000,
    correction: Annotated[
        float, typer.Option(help="What of the bias is subtracted from re-ranked scores too.")
    ] = 0.0,
    encoder: Encoder = None,
    device: Device = "auto",
    uri: Uri = DEFAULT_URI,
    db: Database = "",
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Judge a network on labelled pairs that it was not trained on: the search as it is, corrected where the
    collection carries biases, and re-ranked."""
    reranker = QuariReranker.load(
        network, encoder=encoder, candidates=candidates, correction=correction, device=device
    )
    with progress_bars() as progress:
        labelled = read_labelled(
            pairs,
            collection,
            open_store=partial(open_store, uri, db, token_file),
            field=field,
            progress=progress,
        )
        found = labelled.evaluate(reranker).to_dict()
    if as_json:
        show_json({"quari": found})
        return
    table = Table(box=None, title=f"{found['queries']} queries", title_justify="left")
    measures = list(found["raw"])
    for heading in ("", *measures):
        table.add_column(heading, justify="right" if heading else "left")
    for name in ("raw", "corrected", "reranked"):
        if name in found:
            values = found[name]
            table.add_row(name, *(_shown(measure, values[measure]) for measure in measures))
    out.print(table)
    for name, gain in found["gain"].items():
        low, high = f"{100 * gain['low']:+.1f}", f"{100 * gain['high']:+.1f}"
        out.print(
            f"R@1 against {name}: {100 * gain['estimate']:+.1f} points ({low} … {high})", highlight=False
        )
    out.print(f"{found['milliseconds']:.1f} ms a query for {found['candidates']} candidates", highlight=False)


def _shown(measure: str, value: float) -> str:
    return f"{value:.1f}" if measure in ("MdR", "MnR") else f"{100 * value:.1f}"


app = typer.Typer(
    help="Train a network that re-ranks corrected candidates by each query's own view of them, and judge it.",
    no_args_is_help=True,
)
app.command("train")(train)
app.command("show")(show)
app.command("eval")(evaluate)
