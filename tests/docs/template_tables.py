"""Writes tables of docs/templates.md and docs/your-own-job.md: `python -m tests.docs.template_tables`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

from tests.docs.blocks import ROOT
from tests.docs.migration_tables import marked
from tests.trainer.trl_templates import FAMILIES, NO_CALLS, NO_TOOLS, ONE_CALL, RUNS, TrlFamily
from trainer.parse.choose import PARSERS, find_parser_class
from trainer.policy.memory_parts import GIB
from trainer.policy.memory_plan import plan_memory
from trainer.train.settings import TrainSettings

PAGE = ROOT / "docs" / "templates.md"
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


TABLES: Mapping[str, tuple[Path, Callable[[], str]]] = {
    "families": (PAGE, families_table),
    "parsers": (PAGE, parsers_table),
    "lora": (ROOT / "docs" / "your-own-job.md", lora_table),
}


def updated_pages() -> dict[Path, str]:
    """The pages with their tables as they should be."""
    texts = {page: page.read_text(encoding="utf-8") for page, _ in TABLES.values()}
    for mark, (page, render) in TABLES.items():
        parts = marked(mark).split(texts[page])
        assert len(parts) == 5, f"{page} has one place for {mark}"
        texts[page] = f"{parts[0]}{parts[1]}\n{render()}\n\n{parts[3]}{parts[4]}"
    return texts


if __name__ == "__main__":
    for file, text in updated_pages().items():
        file.write_text(text, encoding="utf-8")
