"""Prints what gateway and trainer need, without torch: its oldest release has no small build for CPUs."""

from __future__ import annotations

import tomllib
from pathlib import Path

PROJECT = tomllib.loads(Path(__file__).parents[1].joinpath("pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
for requirement in (*PROJECT["dependencies"], *EXTRAS["tokens"], *EXTRAS["train"]):
    if not requirement.startswith(("torch>", "mtrl-rl[")):
        print(requirement)
