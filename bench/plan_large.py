"""How long it takes to plan 1,024 devices with 100,000 rollouts under way, on one core.

python bench/plan_large.py                                  # prints the seconds, and what was simulated
python bench/plan_large.py --devices 64 --rollouts 2000     # smaller
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

import torch  # noqa: E402

from mtrl_plugins.plan.plan_run import PlanOptions, plan_run  # noqa: E402
from trainer.train.settings import TrainSettings  # noqa: E402

DEVICES, ROLLOUTS, N = 1024, 100_000, 16
MAX_S = 60.0
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 4096, "num_hidden_layers": 36,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 12288,
    "vocab_size": 151936, "tie_word_embeddings": False,
}  # fmt: skip
"""A model of 8B parameters, of which only the shapes matter."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=DEVICES)
    parser.add_argument("--rollouts", type=int, default=ROLLOUTS)
    options = parser.parse_args()
    print(json.dumps(measure(options.devices, options.rollouts), indent=1))


def measure(devices: int, rollouts: int) -> dict[str, Any]:
    """Plans a job whose steps have that many rollouts, all of which may be under way at once."""
    torch.set_num_threads(1)
    with TemporaryDirectory(prefix="mtrl-plan-") as folder:
        model = Path(folder)
        (model / "config.json").write_text(json.dumps(CONFIG))
        began, cpu = time.perf_counter(), time.process_time()
        planned = plan_run(make_settings(model, rollouts), model, (), PlanOptions(devices, "h100"))
        seconds, cpu_s = time.perf_counter() - began, time.process_time() - cpu
    best = planned.plan.recommended
    return {
        "devices": devices,
        "seconds": round(seconds, 1),
        "cpu_s": round(cpu_s, 1),
        "splits": len(planned.plan.splits),
        "under_way": best.simulation.most_under_way,
        "part": best.part,
        "kept": best.simulation.most_under_way >= rollouts // N * N and best.part == 1 and cpu_s <= MAX_S,
    }


def make_settings(model: Path, rollouts: int) -> TrainSettings:
    """A job with as many rollouts in a step as may be under way."""
    return TrainSettings.model_validate(
        {
            "model": str(model), "data": "x", "prompts": rollouts // N, "n": N, "steps": 100,
            "concurrency": {"inflight_rollouts": rollouts, "running_requests": rollouts},
            "update": {"gradient_checkpointing": True},
            "limits": {"assistant_turns": 6, "turn_tokens": 512, "rollout_tokens": 8192},
        }
    )  # fmt: skip


if __name__ == "__main__":
    main()
