"""What ms-swift takes where a script says nothing, as far as its releases or its models differ: told as if written."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

from trainer.verl.written import Given, Keys

CHANGED = {"top_k": (50, -1), "top_p": (0.9, 1.0)}
"""Before 4.0.3, and since."""
EARLIER = re.compile(r"^\s*(?:from|import)\s+swift\.(?:plugin|llm)\b", re.MULTILINE)
"""Modules that release 4 does not have."""


def left_out(keys: Keys, plugins: Iterable[str]) -> Keys:
    """`plugins` are their texts."""
    earlier, found = _of_release_3(keys, plugins), dict[str, Given]()
    for name, (before, since) in CHANGED.items():
        why = "as release 3 has it" if earlier else f"as releases since 4.0.3 have it; before, {before}"
        found[name] = Given(before if earlier else since, f"left out, and so {why}")
    model = keys.get("model", keys.get("model_id_or_path"))
    if model is not None and _sees(Path(str(model.value)).expanduser()):
        found["freeze_vit"] = Given(True, "left out, and so as all releases have it")
    return {name: given for name, given in found.items() if name not in keys}


def _sees(model: Path) -> bool:
    try:
        return "vision_config" in json.loads((model / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False


def _of_release_3(keys: Keys, plugins: Iterable[str]) -> bool:
    if "train_type" in keys or "sft_type" in keys:
        return True
    return "tuner_type" not in keys and any(EARLIER.search(text) for text in plugins)
