"""`mtrl-train dice`: rolls once."""

from random import Random

import typer

from trainer.cli.options import app


@app.command()
def dice(sides: int = 6, seed: int = 0) -> None:
    """Roll a die once."""
    typer.echo(Random(seed).randint(1, sides))
