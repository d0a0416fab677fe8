"""Writes the tables of docs/templates.md from those that the tests check: `python -m tests.docs.template_tables`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tests.docs.blocks import ROOT
from tests.docs.migration_tables import marked
from tests.trainer.trl_templates import FAMILIES, NO_CALLS, NO_TOOLS, ONE_CALL, RUNS, TrlFamily
from trainer.parse.choose import PARSERS, find_parser_class

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


TABLES: Mapping[str, Callable[[], str]] = {"families": families_table, "parsers": parsers_table}


def updated_page() -> str:
    """The page with its tables as they should be."""
    text = PAGE.read_text(encoding="utf-8")
    for mark, render in TABLES.items():
        parts = marked(mark).split(text)
        assert len(parts) == 5, f"{PAGE} has one place for {mark}"
        text = f"{parts[0]}{parts[1]}\n{render()}\n\n{parts[3]}{parts[4]}"
    return text


if __name__ == "__main__":
    PAGE.write_text(updated_page(), encoding="utf-8")
