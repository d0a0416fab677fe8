"""The memory that `--dry-run` plans beside the measured peak of the run: 1M, 100M and 0.5B weights, on a CPU.

python bench/memory.py                       # all; the largest needs 10 GB; writes bench/results/memory.json and .md
python bench/memory.py --sizes 1M 100M       # some; the others' results stay as they are

Each cell is `mtrl-train --config FILE`, whole, in a process of its own: rollouts that fill the plan, two updates in two
micro-batches each (the second update has the optimizer's state from its beginning), publishing and a checkpoint.
Measured is that process's VmHWM, the most memory that it ever had, interpreter and libraries with it. Planned is what
`mtrl-train --config FILE --dry-run` prints before.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

SHAPES: dict[str, dict[str, Any]] = {
    "1M": {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4}
    | {"num_key_value_heads": 2, "vocab_size": 4096},
    "100M": {"hidden_size": 640, "intermediate_size": 2560, "num_hidden_layers": 13, "num_attention_heads": 10}
    | {"num_key_value_heads": 2, "vocab_size": 32_000},
    "0.5B": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14}
    | {"num_key_value_heads": 2, "vocab_size": 151_936},
}
"""The last is Qwen2.5-0.5B's."""
TOKENS, ROLLOUTS = {"1M": 512, "100M": 256, "0.5B": 64}, {"1M": 16, "100M": 4, "0.5B": 4}
"""Of a rollout; of a step."""
STEPS = 2
REWARD = """from itertools import count

CALLS = count()


def rank(attempt):
    return float(next(CALLS))
"""
"""Differs between siblings in any case: a group with equal rewards trains nothing."""
FULL = 0.8
"""The share of the planned tokens that the rollouts of a step must have: a few random ones end early."""
PLANNED = re.compile(r"the process is expected to take ([\d.]+) GiB")
GIB = 1024**3
LIMIT_S = 2400
TOLERANCE = 0.1
RESULTS = ROOT / "bench" / "results" / "memory.json"
Row = dict[str, Any]


class MeasureError(Exception):
    """A cell could not be measured."""


def build_model(folder: Path, size: str) -> None:
    """Writes a model with random weights."""
    import torch
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    from tests.trainer.tokenizer_families import FAMILIES, save_tokenizer_folder

    save_tokenizer_folder(FAMILIES["hermes"], folder)
    torch.manual_seed(0)
    end = AutoTokenizer.from_pretrained(folder).eos_token_id
    special: dict[str, Any] = {"bos_token_id": None, "eos_token_id": end}
    config = Qwen2Config(**SHAPES[size], max_position_embeddings=32_768, tie_word_embeddings=True, **special)
    Qwen2ForCausalLM(config).save_pretrained(folder)


def write_job(folder: Path, model: Path, size: str, checkpointing: bool, lora: bool) -> Path:
    """Writes a run file, tasks and a reward; two micro-batches are half of the rollouts each."""
    tokens, rollouts = TOKENS[size], ROLLOUTS[size]
    update: dict[str, Any] = {"micro_batch_tokens": tokens * rollouts // 2, "gradient_checkpointing": checkpointing}
    settings = {
        "model": str(model),
        "engine": "torch",
        "engine_dtype": "float32",
        "data": str(folder / "tasks.jsonl"),
        "tools": [],
        "out": str(folder / "run"),
        "steps": STEPS,
        "prompts": 1,
        "n": rollouts,
        "update": update | ({"lora": {}} if lora else {}),
        "limits": {"rollout_tokens": tokens, "turn_tokens": tokens, "assistant_turns": 1},
        "concurrency": {"running_requests": rollouts},
        "reward": {"components": {"rank": {"function": str(folder / "reward.py:rank"), "weight": 1.0}}},
        "evaluation": {"every": 0},
    }
    (folder / "reward.py").write_text(REWARD)
    (folder / "tasks.jsonl").write_text("".join(json.dumps({"prompt": f"Count to {n}."}) + "\n" for n in range(8)))
    (folder / "run.json").write_text(json.dumps(settings))
    return folder / "run.json"


def run_child(arguments: list[str]) -> None:
    """Runs `mtrl-train` in this process, and says in its last line how much memory that took at most."""
    from trainer.cli import main
    from trainer.policy import machine_use

    machine_use.reset_peak_memory = lambda: False  # Else VmHWM is that of a phase.
    sys.argv = ["mtrl-train", *arguments]
    try:
        main()
    finally:
        lines = Path("/proc/self/status").read_text().splitlines()
        print("peak", 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")))


def start(*arguments: str) -> str:
    """The output of `mtrl-train` in a process of its own."""
    command = [sys.executable, __file__, "--child", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S, cwd=ROOT)
    if done.returncode:
        raise MeasureError(f"`mtrl-train {' '.join(arguments)}` failed:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return done.stdout


def check_updates(size: str, metrics: Sequence[Mapping[str, float]]) -> None:
    """Raises MeasureError if a step did not train nearly all that was planned: its peak is not that of a step."""
    if len(metrics) != STEPS:
        raise MeasureError(f"{size}: {len(metrics)} steps of {STEPS} were made")
    for number, step in enumerate(metrics, 1):
        changed = step.get("update/grad_norm", 0.0) > 0 and step.get("update/lr", 0.0) > 0
        rows, tokens = step.get("update/rows", 0.0), step.get("rollout/tokens", 0.0)
        if not changed or rows != ROLLOUTS[size] or tokens < FULL * TOKENS[size]:
            raise MeasureError(f"{size}: step {number} did not train all of its rollouts: {dict(step)}")


def measure(model: Path, size: str, checkpointing: bool, lora: bool, kept: Row | None = None) -> Row:
    """Plans and runs one cell. With a `kept` row, only plans it again: its measured peak stays."""
    with TemporaryDirectory() as folder:
        job = write_job(Path(folder), model, size, checkpointing, lora)
        text = start("--config", str(job), "--dry-run", "-v")
        plan = next(line for line in text.splitlines() if line.startswith("memory: "))
        planned = round(float(PLANNED.findall(text)[0]) * GIB)
        if kept is not None:
            return kept | {"planned": planned, "ratio": round(planned / kept["measured"], 3), "plan": plan}
        began = time.monotonic()
        measured = int(start("--config", str(job)).split()[-1])
        metrics = [json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()]
    check_updates(size, metrics)
    ratio = planned / measured
    about = {"size": size, "checkpointing": checkpointing, "lora": lora}
    print(f"{about}: planned {planned / GIB:.2f} GiB, measured {measured / GIB:.2f} GiB, ratio {ratio:.3f}", flush=True)
    print(f"  {plan}", flush=True)
    seconds = round(time.monotonic() - began, 1)
    trained = {"tokens": [round(step["rollout/tokens"] * step["update/rows"]) for step in metrics]}
    sizes = {"planned": planned, "measured": measured, "ratio": round(ratio, 3)}
    return about | trained | sizes | {"seconds": seconds, "plan": plan}


def read_rows() -> list[Row]:
    """The rows of the last results."""
    rows: list[Row] = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else []
    return rows


def save(rows: list[Row]) -> None:
    """Writes the results; those of other cells stay."""
    import torch
    import transformers

    def key(row: Row) -> tuple[Any, ...]:
        return list(SHAPES).index(row["size"]), row["checkpointing"], row["lora"]

    merged = {key(row): row for row in (*read_rows(), *rows)}
    rows = [merged[name] for name in sorted(merged)]
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__}"
    machine = f"{platform.system()} {platform.machine()}, {os.cpu_count()} processors"
    about = {"date": time.strftime("%Y-%m-%d"), "machine": machine, "versions": versions, "tolerance": TOLERANCE}
    RESULTS.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")
    RESULTS.with_suffix(".md").write_text(report(about, rows))


def report(about: dict[str, Any], rows: list[Row]) -> str:
    """The results as a page."""
    return "\n".join(
        [
            "# Planned and measured memory",
            "",
            f"{about['date']}, {about['machine']}, {about['versions']}. `make bench-memory`; how: `bench/memory.py`.",
            f"The promise: the plan of `--dry-run` is within {TOLERANCE:.0%} of the measured peak.",
            "",
            format_rows(rows),
            "",
        ]
    )


def format_rows(rows: list[Row]) -> str:
    """The results as a table."""
    lines = [
        "| weights | checkpointing | LoRA | planned GiB | measured GiB | planned / measured | promise |",
        "|---|---|---|--:|--:|--:|---|",
    ]
    for row in rows:
        flags = " | ".join("yes" if row[name] else "no" for name in ("checkpointing", "lora"))
        met = "met" if abs(row["ratio"] - 1) <= TOLERANCE else "**missed**"
        sizes = f"{row['planned'] / GIB:.2f} | {row['measured'] / GIB:.2f} | {row['ratio']:.2f}"
        lines.append(f"| {row['size']} | {flags} | {sizes} | {met} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="*", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--only", help="only one cell of each size: `checkpointing` and `lora` as 0 or 1, as in 01")
    parser.add_argument("--models", help="where built models are kept for later runs; by default they are removed")
    parser.add_argument("--plan", action="store_true", help="only plan again; measured peaks stay as they are")
    parser.add_argument("--dry", action="store_true", help="write no results")
    parser.add_argument("--child", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        run_child(options.child)
        return
    failures = 0
    for size in options.sizes:
        with TemporaryDirectory() as temporary:
            folder = Path(options.models or temporary) / size
            if not (folder / "model.safetensors").exists():
                build_model(folder, size)
            for checkpointing, lora in product((False, True), (False, True)):
                cell: dict[str, Any] = {"size": size, "checkpointing": checkpointing, "lora": lora}
                kept = next((row for row in read_rows() if row.items() >= cell.items()), None) if options.plan else None
                if options.only not in (None, f"{checkpointing:d}{lora:d}") or (options.plan and not kept):
                    continue
                try:
                    row = measure(folder, **cell, kept=kept)
                except (MeasureError, subprocess.TimeoutExpired) as error:
                    print(f"{size}, checkpointing {checkpointing}, lora {lora}: {error}", file=sys.stderr, flush=True)
                    failures += 1
                    continue
                if not options.dry:
                    save([row])
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
