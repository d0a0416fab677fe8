"""SGLang's pins and ours never fight: it has a Python of its own, of which only the path is known here."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from trainer.engine.base import EngineError

NAMED = "MTRL_SGLANG_PYTHON"
PATH = "MTRL_SGLANG_PYTHONPATH"
"""What that Python finds beside its own packages: where they cannot be installed, but carried to."""
MADE = ".sglang/bin/python"
"""By `make sglang`, in the folder one works in or in that of the source."""
OURS = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
"""Would lead that Python to our packages."""
SIGHT = "SGLANG_VLM_CACHE_SIZE_MB"
"""Of what was seen of pictures: SGLang finds it again by the picture alone, also under new weights."""
CHOSEN: Mapping[str, str] = {SIGHT: "0"}


def python() -> Path:
    """What is named; else what `make sglang` made; else this one, where SGLang is installed beside the trainer."""
    if named := os.environ.get(NAMED):
        if os.access(named, os.X_OK):
            return Path(named)
        raise EngineError(f"{NAMED} is {named!r}, which cannot be run: name the Python that SGLang is installed for")
    made = next((place / MADE for place in _places() if os.access(place / MADE, os.X_OK)), None)
    if made is not None:
        return made
    if find_spec("sglang"):
        return Path(sys.executable)
    looked = " and ".join(str(place / MADE) for place in _places())
    raise EngineError(f"no SGLang here (looked at {looked}): run `make sglang`, or set {NAMED} to its Python")


def environment() -> Mapping[str, str]:
    """Whoever sets a variable of SGLang's has the last word."""
    own = {"PYTHONPATH": os.environ[PATH]} if os.environ.get(PATH) else {}
    given = {name: value for name, value in os.environ.items() if name not in OURS}
    return {**CHOSEN, **given, **own}


def _places() -> tuple[Path, ...]:
    return tuple(dict.fromkeys((Path.cwd(), Path(__file__).parents[3])))
