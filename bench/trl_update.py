"""Times TRL's update on given rollouts, in TRL's environment; run by `gpu_trl.py`.

The given tokens, masks and advantages replace what TRL would generate and score.
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
from operation_counter import OperationCounter
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

WORD = "given"


class GivenBatchTrainer(GRPOTrainer):
    """Trains on `batch` instead of generating."""

    batch: Mapping[str, torch.Tensor]

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, torch.Tensor]:
        return {name: value.to(self.accelerator.device) for name, value in self.batch.items()}


class StepTimer(TrainerCallback):
    """Seconds of each step, by the clock and of all cores, the optimizer included."""

    def __init__(self, counts_operations: bool) -> None:
        self.counts_operations, self.counter = counts_operations, OperationCounter()
        self.steps: list[float] = []
        self.core: list[float] = []
        self._began = 0.0, 0.0

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self._began = _now(), time.process_time()
        if self.counts_operations and self.steps:
            self.counter.__enter__()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        if self.counts_operations and self.steps:
            self.counter.__exit__(None, None, None)
        self.steps.append(_now() - self._began[0])
        self.core.append(time.process_time() - self._began[1])


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def build_batch(rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """TRL's batch: prompts are padded on the left, completions on the right."""
    starts = [row["mask"].index(True) for row in rows]
    prompt_width = max(starts)
    completion_width = max(len(row["ids"]) - start for row, start in zip(rows, starts, strict=True))

    def pad_left(values: Sequence[int]) -> list[int]:
        return [0] * (prompt_width - len(values)) + [*values]

    def pad_right(values: Sequence[float]) -> list[float]:
        return [*values] + [0] * (completion_width - len(values))

    pairs = list(zip(rows, starts, strict=True))
    masks = [pad_right([int(is_trained) for is_trained in row["mask"][start:]]) for row, start in pairs]
    return {
        "prompt_ids": torch.tensor([pad_left(row["ids"][:start]) for row, start in pairs]),
        "prompt_mask": torch.tensor([pad_left([1] * start) for _, start in pairs]),
        "completion_ids": torch.tensor([pad_right(row["ids"][start:]) for row, start in pairs], dtype=torch.long),
        "completion_mask": torch.tensor([pad_right([1] * (len(row["ids"]) - start)) for row, start in pairs]),
        "tool_mask": torch.tensor(masks),
        "advantages": torch.tensor([row["advantage"] for row in rows]),
        "num_items_in_batch": torch.tensor(sum(map(sum, masks))),
    }


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer, which TRL needs, although it has nothing to tokenize."""
    tokenizer = Tokenizer(WordLevel({WORD: 0}, unk_token=WORD))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=WORD, eos_token=WORD, unk_token=WORD)


def make_config(job: Mapping[str, Any], out: Path) -> GRPOConfig:
    """The precision, loss and optimizer of our trainer, without recomputation."""
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
    timer = StepTimer(job["counts_operations"])
    trainer = GivenBatchTrainer(
        model=AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32),
        reward_funcs=lambda completions, **row: [0.0] * len(completions),
        args=make_config(job, out),
        train_dataset=Dataset.from_list([{"prompt": WORD}] * len(job["rows"])),
        processing_class=make_tokenizer(),
        callbacks=[timer],
    )
    trainer.batch = build_batch(job["rows"])
    trainer.train()
    norms = [line["grad_norm"] for line in trainer.state.log_history if "grad_norm" in line]
    result = {"steps_s": timer.steps, "steps_core_s": timer.core, "grad_norm": norms[0], "version": version("trl")}
    result["operations"] = timer.counter.counts
    out.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
