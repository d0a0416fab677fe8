"""The command `export`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from gateway.plural import format_count
from trainer.cli.errors import print_line, report_errors
from trainer.cli.options import RUN_PANEL, app


@app.command(rich_help_panel=RUN_PANEL)
def export(
    checkpoint: Annotated[Path, typer.Argument(metavar="RUN|CHECKPOINT", help="A run, or one of its checkpoints.")],
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="The new folder; it must not exist yet.")],
    best: Annotated[
        bool, typer.Option("--best", help="Take the run's best step by its evaluations, instead of the latest.")
    ] = False,
    adapter: Annotated[bool, typer.Option("--adapter", help="With LoRA: write the adapters alone, for peft.")] = False,
    model: Annotated[
        Path | None, typer.Option(metavar="PATH", help="The model that training started from, if the run's has moved.")
    ] = None,
    push: Annotated[
        str | None, typer.Option(metavar="ORG/NAME", help="Upload it to the hub as well, into a private repository.")
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code of this folder and of --model's.")
    ] = False,
) -> None:
    """Write a trained model as a Hugging Face folder: weights, configuration, tokenizer, chat template, model card.

    mtrl-train export runs/NAME --out models/mine                     the latest checkpoint of a run

    mtrl-train export runs/NAME --best --out models/mine              its best one by `eval/greedy`

    mtrl-train export runs/NAME/checkpoints/000100 --out models/mine  an earlier one

    mtrl-train export runs/NAME --adapter --out models/adapter        the LoRA adapters alone

    mtrl-train export runs/NAME --out models/mine --push me/mine      and upload it, with the token of `hf auth login`

    Checkpoints of one process and of several ranks are read alike, without the ranks. Adapters are merged into their
    model. Weights have the dtype of the model that training started from. Nothing is written if anything is wrong.
    """
    with report_errors(stopped=lambda: "nothing was exported"):
        from trainer.hub import check_push, push_model
        from trainer.model import configure_torch
        from trainer.pretrained import trust_code
        from trainer.train.export_checkpoint import export_checkpoint

        configure_torch()
        if push is not None:
            check_push(push)
        if trust_remote_code:
            trust_code(checkpoint, *filter(None, (model,)))
        exported = export_checkpoint(checkpoint, out, adapter=adapter, best=best, model=model, warn=print_line)
        address = push_model(out, push) if push is not None else ""
    steps = format_count(exported.step, "step")
    sys.stdout.write(f"{exported.kind}, after {steps}, in {exported.dtype}: {out}\n")
    if address:
        sys.stdout.write(f"  uploaded to {address}\n")
    if exported.best.step not in (0, exported.step):
        better = f"step {exported.best.step} was better in the run's evaluations ({exported.best.value:.3f})"
        sys.stdout.write(f"  {better}; --best takes that one\n")
