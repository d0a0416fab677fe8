"""TRL's update on rollouts that it did not make, in an environment of its own: seconds, and how long the gradient was.

What it would generate and score is put in its place as it is: the same tokens, the same mask, the same advantages.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

WORD = "given"


class Given(GRPOTrainer):
    """Learns from `batch`, whatever it is asked to roll out."""

    batch: Mapping[str, torch.Tensor]

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, torch.Tensor]:
        return {name: value.to(self.accelerator.device) for name, value in self.batch.items()}


class Timed(TrainerCallback):
    """Seconds of each step, the optimizer's included."""

    def __init__(self) -> None:
        self.steps: list[float] = []
        self._began = 0.0

    def on_step_begin(self, *args: Any, **more: Any) -> None:
        self._began = _now()

    def on_step_end(self, *args: Any, **more: Any) -> None:
        self.steps.append(_now() - self._began)


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def batch(rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """Openings end, and what follows them begins, at one place: padding is before the one and after the other."""
    begins = [row["mask"].index(True) for row in rows]
    before, after = max(begins), max(len(row["ids"]) - begin for row, begin in zip(rows, begins, strict=True))

    def left(values: Sequence[int]) -> list[int]:
        return [0] * (before - len(values)) + [*values]

    def right(values: Sequence[float]) -> list[float]:
        return [*values] + [0] * (after - len(values))

    each = list(zip(rows, begins, strict=True))
    masks = [right([int(one) for one in row["mask"][begin:]]) for row, begin in each]
    return {
        "prompt_ids": torch.tensor([left(row["ids"][:begin]) for row, begin in each]),
        "prompt_mask": torch.tensor([left([1] * begin) for _, begin in each]),
        "completion_ids": torch.tensor([right(row["ids"][begin:]) for row, begin in each], dtype=torch.long),
        "completion_mask": torch.tensor([right([1] * (len(row["ids"]) - begin)) for row, begin in each]),
        "tool_mask": torch.tensor(masks),
        "advantages": torch.tensor([row["advantage"] for row in rows]),
        "num_items_in_batch": torch.tensor(sum(map(sum, masks))),
    }


def words() -> PreTrainedTokenizerFast:
    """It wants one, and has nothing to read with it."""
    one = WordLevel({WORD: 0}, unk_token=WORD)
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(one), pad_token=WORD, eos_token=WORD, unk_token=WORD)


def settings(job: Mapping[str, Any], out: Path) -> GRPOConfig:
    """The precision, the loss and the optimizer of the other trainer; nothing is computed twice."""
    cuda = torch.cuda.is_available()
    return GRPOConfig(
        output_dir=str(out.parent / "trl"),
        max_steps=job["updates"],
        per_device_train_batch_size=job["rows_at_once"],
        gradient_accumulation_steps=len(job["rows"]) // job["rows_at_once"],
        num_generations=job["n"],
        loss_type="dapo",
        beta=0.0,
        learning_rate=job["lr"],
        lr_scheduler_type="constant",
        adam_beta1=job["betas"][0],
        adam_beta2=job["betas"][1],
        max_grad_norm=job["clip"],
        bf16=cuda,
        use_cpu=not cuda,
        gradient_checkpointing=False,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )


def main() -> None:
    file, out = Path(sys.argv[1]), Path(sys.argv[2])
    job = json.loads(file.read_text())
    torch.set_num_threads(job["threads"])
    rows = batch(job["rows"])
    timed = Timed()
    trainer = Given(
        model=AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32),
        reward_funcs=lambda completions, **row: [0.0] * len(completions),
        args=settings(job, out),
        train_dataset=Dataset.from_list([{"prompt": WORD}] * len(job["rows"])),
        processing_class=words(),
        callbacks=[timed],
    )
    trainer.batch = rows
    trainer.train()
    norms = [line["grad_norm"] for line in trainer.state.log_history if "grad_norm" in line]
    out.write_text(json.dumps({"steps_s": timed.steps, "grad_norm": norms[0], "version": version("trl")}))


if __name__ == "__main__":
    main()
