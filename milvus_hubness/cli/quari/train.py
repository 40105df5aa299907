"""milvus-hubness quari train"""

from __future__ import annotations

from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from milvus_hubness.charts import learning_curves
from milvus_hubness.cli.console import (
    DEFAULT_URI,
    AsJson,
    Database,
    TokenFile,
    Uri,
    check_writable,
    open_store,
    progress_bars,
    show_facts,
    show_json,
    write_page,
)
from milvus_hubness.cli.quari.options import Collection, Device, Encoder, Field, PairsFile
from milvus_hubness.jobs.quari import read_labelled
from milvus_hubness.quari import Checkpoint, QuariConfig, TrainingSettings
from milvus_hubness.quari import train as train_network

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
    """What the options say that are named as its fields are."""
    return {each.name: context.params[each.name] for each in fields(kind) if each.name in context.params}


def training_facts(trained: Checkpoint) -> dict[str, Any]:
    """What is known of a network, and its first and best epochs."""
    best = next(each for each in trained.history if each.epoch == trained.best_epoch)
    return {
        **trained.facts(),
        "parameters": sum(each.numel() for each in trained.weights.values()),
        "before": trained.history[0]._asdict(),
        "best": best._asdict(),
    }


def in_words(found: dict[str, Any]) -> dict[str, object]:
    """The same for people."""
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
