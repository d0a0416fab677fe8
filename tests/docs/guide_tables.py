"""Writes the tables of guides that are made from those in code: `python -m tests.docs.guide_tables`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

from mtrl_plugins.scripts.key_table import Effect, KeyTable
from mtrl_plugins.swift import compat_names as swift_names
from mtrl_plugins.swift.conversions import SWIFT_TABLE as SWIFT_FLAGS
from mtrl_plugins.trl.conversions import TRL_TABLE as TRL_ARGUMENTS
from mtrl_plugins.verl import compat_names as verl_names
from mtrl_plugins.verl.conversions import VERL_TABLE as VERL_KEYS
from tests.docs.blocks import ROOT
from tests.trainer.trl_templates import FAMILIES, NO_CALLS, NO_TOOLS, ONE_CALL, RUNS, TrlFamily
from trainer.parse.choose import PARSERS, find_parser_class
from trainer.policy.memory_parts import GIB
from trainer.policy.memory_plan import plan_memory
from trainer.train.settings import TrainSettings

VERL, SWIFT, TRL = (ROOT / "docs" / f"migration-{framework}.md" for framework in ("verl", "swift", "trl"))


def names_table(modules: Mapping[str, Mapping[str, str]], framework: str) -> str:
    """The modules that users' files may import, with their names."""
    rows = [f"| {framework} | Names |", "|---|---|"]
    alike: dict[str, list[str]] = {}
    for module, names in modules.items():
        alike.setdefault(_code(names), []).append(module)
    rows += [f"| {_code(of)} | {names} |" for names, of in alike.items() if names]
    return "\n".join(rows)


def keys_table(table: KeyTable) -> str:
    """The keys that do something else here; `mtrl-train translate --table` has the others."""
    rows = [f"| {table.framework} | mtrl | what differs, and why |", "|---|---|---|"]
    alike: dict[tuple[str, str], list[str]] = {}
    for rule in table.rules:
        if rule.effect is Effect.CHANGED:
            setting = f"`{rule.setting}`" if rule.setting else "-"
            alike.setdefault((setting, rule.note.replace("|", "\\|")), []).extend(rule.names)
    rows += [f"| {_code(names)} | {setting} | {note} |" for (setting, note), names in alike.items()]
    return "\n".join(rows)


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


OUTCOMES = {
    RUNS: "runs",
    ONE_CALL: "runs, with one call a turn",
    NO_CALLS: "refused: it writes no calls. `template.calls: text`",
    NO_TOOLS: "refused: it does not write the tools. `template.calls: text`",
}
PARSER_MODELS = {
    "cohere": "Command R7B, Command A; Tiny Aya's answers",
    "deepseek": "DeepSeek-V3.1",
    "deepseek_v3": "DeepSeek-V3, R1",
    "gemma4": "Gemma 4, DiffusionGemma",
    "glm": "GLM-4.5 and later",
    "harmony": "gpt-oss",
    "hermes": "Hermes, Qwen2.5, Qwen3, QwQ; everything with `template.calls: text`",
    "kimi": "Kimi K2",
    "lfm2": "LFM2, LFM2.5",
    "llama3": "Llama 3.1, 3.2, 3.3",
    "minimax": "MiniMax M2",
    "mistral": "Mistral, with a JSON list",
    "mistral_args": "Mistral, with `[ARGS]`",
    "muse": "Muse Glimmer",
    "phi4": "Phi-4-mini",
    "plain_text": "any model, in a job without tools: a turn is its text, reasoning included",
    "qwen3_coder": "Qwen3-Coder, Qwen3.5 and later, Nemotron 3",
}


def families_table() -> str:
    """What happens to each family of TRL's templates."""
    rows = ["| Models | Template | Parser | A job with tools | Without tools |", "|---|---|---|---|---|"]
    return "\n".join([*rows, *map(_family_row, FAMILIES)])


def _family_row(family: TrlFamily) -> str:
    own = [file for file in family.files if not file.endswith("_training")]
    files = ", ".join(f"`{file}`" for file in own)
    parser = f"`{family.parser}`" if family.parser and family.outcome in (RUNS, ONE_CALL) else "—"
    outcome = OUTCOMES[family.outcome]
    if "qwen2_5_vl" in own:
        outcome += ", or `template.chat_template: qwen2_vl`, which has images too"
    plain = "runs" if family.takes_system else "runs; refused where there is a system message"
    return f"| {family.models} | {files} | {parser} | {outcome} | {plain} |"


def parsers_table() -> str:
    """The parsers with the models that write so."""
    names = {find_parser_class(name).name: [] for name in PARSERS}  # type: ignore[var-annotated]
    for alias in PARSERS:
        parser = find_parser_class(alias)
        names[parser.name] += [alias] if alias != parser.name else []
    rows = ["| `template.parser` | Also | Models |", "|---|---|---|"]
    for name, models in PARSER_MODELS.items():
        rows.append(f"| `{name}` | {', '.join(f'`{alias}`' for alias in names[name])} | {models} |")
    return "\n".join(rows)


SHAPES = {
    "Qwen2.5-0.5B": (896, 24, 14, 2, 4864, 151936, True),
    "Qwen2.5-1.5B": (1536, 28, 12, 2, 8960, 151936, True),
    "Qwen2.5-3B": (2048, 36, 16, 2, 11008, 151936, True),
    "Qwen2.5-7B": (3584, 28, 28, 4, 18944, 152064, False),
}
"""Width, layers, heads, those of keys and values, inner width, vocabulary, and whether the head is the embedding."""
SHAPE_KEYS = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size",
    "tie_word_embeddings",
)  # fmt: skip
CARD = int(23.5 * GIB)
PLANS = {"LoRA, 2,048 tokens": (2048, 16), "LoRA, 8,192 tokens": (8192, 16), "all weights, 2,048 tokens": (2048, 0)}
"""Tokens of a rollout, and the rank of the adapters."""


def lora_table() -> str:
    """What the memory plan says of training models of several sizes on one card."""
    rows = [f"| | {' | '.join(PLANS)} |", f"|---|{'--:|' * len(PLANS)}"]
    has_gpu, has_bf16 = (
        patch(f"torch.cuda.{name}", return_value=True) for name in ("is_available", "is_bf16_supported")
    )
    with TemporaryDirectory() as folder, has_gpu, has_bf16:
        for name, shape in SHAPES.items():
            config = {"model_type": "qwen2", **dict(zip(SHAPE_KEYS, shape, strict=True))}
            (model := Path(folder) / name).mkdir()
            (model / "config.json").write_text(json.dumps(config), encoding="utf-8")
            rows.append(f"| {name} | {' | '.join(_plan_lora(model, *plan) for plan in PLANS.values())} |")
    return "\n".join(rows)


def _plan_lora(model: Path, tokens: int, rank: int) -> str:
    lora = {"lora": {"rank": rank}} if rank else {}
    settings = TrainSettings.model_validate(
        {
            "engine": "torch", "engine_dtype": "bfloat16", "limits": {"rollout_tokens": tokens},
            "concurrency": {"running_requests": 16},
            "update": {"gradient_checkpointing": True, "micro_batch_tokens": tokens, **lora},
        }
    )  # fmt: skip
    planned = plan_memory(settings, model, CARD)
    return f"{planned.needed / GIB:.1f}" if planned.fits else f"({planned.needed / GIB:.1f})"


TABLES: Mapping[tuple[Path, str], Callable[[], str]] = {
    (VERL, "names"): lambda: names_table(verl_names.OFFERED, "verl"),
    (VERL, "keys"): lambda: keys_table(VERL_KEYS),
    (SWIFT, "names"): lambda: names_table(swift_names.OFFERED, "ms-swift"),
    (SWIFT, "keys"): lambda: keys_table(SWIFT_FLAGS),
    (TRL, "arguments"): lambda: keys_table(TRL_ARGUMENTS),
    (ROOT / "docs" / "templates.md", "families"): families_table,
    (ROOT / "docs" / "templates.md", "parsers"): parsers_table,
    (ROOT / "docs" / "your-own-job.md", "lora"): lora_table,
}


def updated_guides() -> dict[Path, str]:
    """Each guide with its tables as they should be, between their two marks."""
    texts = {guide: guide.read_text(encoding="utf-8") for guide, _ in TABLES}
    for (guide, mark), render in TABLES.items():
        parts = re.split(rf"(<!-- {mark} -->\n)(.*?)(<!-- /{mark} -->)", texts[guide], flags=re.DOTALL)
        assert len(parts) == 5, f"{guide} has one place for {mark}"
        texts[guide] = f"{parts[0]}{parts[1]}\n{render()}\n\n{parts[3]}{parts[4]}"
    return texts


if __name__ == "__main__":
    for file, text in updated_guides().items():
        file.write_text(text, encoding="utf-8")
