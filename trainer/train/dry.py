"""A dry run finds everything that a run would, shows what it would do, and does none of it."""

from __future__ import annotations

from contextlib import AsyncExitStack

from rich.console import Console
from rich.text import Text

from trainer.check import seeing, shown
from trainer.policy.placement import placement
from trainer.train import modes
from trainer.train.job import opened
from trainer.train.reports import packages
from trainer.train.settings import TrainSettings
from trainer.view.show import show
from trainer.view.warming import warming


async def dry_run(settings: TrainSettings, console: Console) -> bool:
    """True where it could begin. A demo's model that is not there yet is made, as nothing can be shown without it."""
    packages(settings.report)
    async with AsyncExitStack() as stack:
        with warming(console) as told:
            job = await stack.enter_async_context(opened(settings, warming=told))
        console.print_json(settings.model_dump_json())
        placed = placement(settings, job.model)
        planned = placed.plan
        console.print(Text(str(placed)), soft_wrap=True)
        if not planned.fits:
            console.print(Text(f"  it does not fit\n  remedy: {planned.remedy}"), soft_wrap=True)
        rows = {name or settings.data: len(source) for name, source in job.tasks.train.items()}
        for name, count in rows.items():
            console.print(Text(f"{count} tasks of {name}; {settings.prompts} x {settings.n} rollouts a step"))
        console.print(Text(modes.told(settings)), soft_wrap=True)
        console.print(Text(seeing(job.template)), soft_wrap=True)
        for note in job.tasks.notes:
            console.print(Text(note))
        console.print()
        show([shown(job.template, job.gateway.specs)], console, rollout=0, decode=job.template.tokens.decode)
        console.print(Text("\nnothing stands in its way" if planned.fits else "\n1 to mend"))
        return planned.fits
