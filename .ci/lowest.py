"""Prints what gateway and trainer need, without torch: its oldest release has no small build for CPUs."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

PROJECT = tomllib.loads(Path(__file__).parents[1].joinpath("pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
NEEDED = (*PROJECT["dependencies"], *EXTRAS["tokens"], *EXTRAS["train"])
sys.stdout.writelines(f"{each}\n" for each in NEEDED if not each.startswith(("torch>", "mtrl-rl[")))
