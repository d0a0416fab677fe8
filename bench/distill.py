"""A larger shape teaches the default job's model, by sampled tokens and by its most likely ones, beside GRPO.

All with the same core-seconds, on the same seeds.

python bench/distill.py                   # writes bench/results/distill.{json,md}
python bench/distill.py --seeds 0         # only prints
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

import torch  # noqa: E402
from transformers import Qwen3Config, Qwen3ForCausalLM  # noqa: E402

from mtrl_plugins.demo.facts.facts_demo import MODEL_SHAPE, SPECIAL_TOKENS, build_tokenizer, build_warm_start  # noqa: E402
from mtrl_plugins.demo.warm_start import Recipe, warm_start  # noqa: E402

RESULTS = ROOT / "bench" / "results" / "distill"
SEEDS = (0, 1, 2)
TEACHER_SHAPE = {
    **MODEL_SHAPE,
    "hidden_size": 96,
    "intermediate_size": 288,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
}
TOP_K = 8
BUDGETS = (5, 10)
"""Core-seconds after the model was loaded."""
COMMON = ("early_stop=null", "record=false", "evaluation.after=false", "evaluation.every=3", "evaluation.rows=100")
POLL_S = 0.1
TICKS = os.sysconf("SC_CLK_TCK")


def build_teacher(folder: Path) -> Path:
    """A model of a larger shape with the same tokens, which was shown how tasks are solved, and no bad habit."""
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(folder)
    end = tokenizer.get_vocab()[SPECIAL_TOKENS[1]]
    torch.manual_seed(7)
    rope = {"rope_type": "default", "rope_theta": 1e4}
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 512, "eos_token_id": end, "pad_token_id": None}
    model = Qwen3ForCausalLM(Qwen3Config(**TEACHER_SHAPE, **sizes, rope_parameters=rope))
    warm_start(model, build_warm_start(folder), Recipe(habit_steps=0, seed=7))
    model.save_pretrained(folder)
    return folder


def read_core_s(process: int) -> float:
    """Core-seconds of a process and of the children that it waited for."""
    fields = Path(f"/proc/{process}/stat").read_text("ascii").rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / TICKS


def train(seed: int, words: list[str], folder: Path) -> list[tuple[float, float]]:
    """The core-seconds since the first evaluation, and greedy success, of each evaluation within the largest budget."""
    command = [sys.executable, "-m", "trainer.cli", "--tools", str(ROOT / "tool_configs"), "--out", str(folder)]
    command += ["--seed", str(seed), "--steps", "400", *COMMON, *words]
    curve: list[tuple[float, float]] = []
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL) as process:
        lines, started = 0, 0.0
        try:
            while process.poll() is None and (not curve or read_core_s(process.pid) - started < BUDGETS[-1]):
                time.sleep(POLL_S)
                with suppress(OSError):
                    whole, _, _ = (folder / "metrics.jsonl").read_text("utf-8").rpartition("\n")
                    found = whole.splitlines()
                    for line in found[lines:]:
                        metrics = json.loads(line)
                        used = read_core_s(process.pid)
                        started = started or used
                        if "eval/greedy" in metrics:
                            curve.append((round(used - started, 1), metrics["eval/greedy"]))
                    lines = len(found)
        finally:
            process.terminate()
    if not curve:
        raise SystemExit(f"the run in {folder} ended with {process.returncode} before its first evaluation")
    return curve


def success_within(curve: list[tuple[float, float]], budget: float) -> float:
    """Greedy success in the last evaluation that the budget allows."""
    return [value for used, value in curve if used <= budget][-1]


def format_results(results: dict[int, dict[str, list[tuple[float, float]]]]) -> str:
    """The results as a Markdown table."""
    heads = [f"{method}, {budget} s" for method in ("GRPO", "teacher", f"top {TOP_K}") for budget in BUDGETS]
    lines = [f"| seed | before | {' | '.join(heads)} |", "|--:" * (len(heads) + 2) + "|"]
    for seed, curves in results.items():
        cells = [f"{success_within(curve, budget):.2f}" for curve in curves.values() for budget in BUDGETS]
        lines.append(f"| {seed} | {curves['grpo'][0][1]:.2f} | {' | '.join(cells)} |")
    legend = f'"teacher" is the estimate from sampled tokens, "top {TOP_K}" the KL over the teacher\'s likeliest ones.'
    return "\n".join([*lines, "", legend]) + "\n"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    args = options.parse_args()
    torch.set_num_threads(1)
    results = {}
    with tempfile.TemporaryDirectory(prefix="mtrl-distill-") as place:
        teacher = build_teacher(Path(place) / "teacher")
        taught = ["n=1", "prompts=128", f"algorithm.kl.reference.model={teacher}"]
        methods = {"grpo": [], "teacher": taught, "top": [*taught, f"algorithm.kl.top_k={TOP_K}"]}
        for seed in args.seeds:
            runs = {name: Path(place) / f"{name}-{seed}" for name in methods}
            results[seed] = {name: train(seed, methods[name], runs[name]) for name in methods}
            print(seed, results[seed], file=sys.stderr, flush=True)
    print(format_results(results))
    if tuple(args.seeds) == SEEDS:
        RESULTS.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n", "utf-8")
        about = f"{time.strftime('%Y-%m-%d')}, torch {torch.__version__}; greedy success by core-seconds"
        RESULTS.with_suffix(".md").write_text(f"{about}\n\n{format_results(results)}", "utf-8")


if __name__ == "__main__":
    main()
