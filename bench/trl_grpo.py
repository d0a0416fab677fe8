"""TRL's GRPOTrainer on the demo's tasks, in an environment of its own: a line for each step.

A rollout has facts of its own, so it is an environment with tools, as TRL has it for that; its tools are plain
functions in the same process, since TRL opens no MCP server. The job it gets is the one that mtrl gets.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import qwen3_template

SUM = re.compile(r"\s*(\d{1,12})\s*([+-])\s*(\d{1,12})\s*")
ANSWER = re.compile(r"#### ([0-9]+)")
TUNED_PASSES = 4
"""That a step's gradient is gathered in: quicker than one or two here, as little is padded."""


class Lookups:
    """The tools of one rollout; TRL shows public methods to the policy, by their names."""

    def reset(self, facts: str, **row: Any) -> None:
        self._facts: Mapping[str, str] = json.loads(facts)

    def calculate(self, expression: str) -> str:
        """Calculates a sum or a difference of two whole numbers.

        Args:
            expression: As `20 + 22`.
        """
        found = SUM.fullmatch(expression)
        if found is None:
            raise ValueError("write two whole numbers with + or - between them")
        left, right = int(found[1]), int(found[3])
        return str(left + right if found[2] == "+" else left - right)

    def look_up(self, name: str) -> str:
        """What is known of a person or a city: where one lives, or how many people live there.

        Args:
            name: The person or the city.
        """
        return self._facts.get(name, "unknown")


def right(completions: Sequence[Sequence[Mapping[str, Any]]], truth: Sequence[str], **row: Any) -> list[float]:
    """1 for the right answer in the last turn, where that is the policy's."""
    scores = []
    for said, expected in zip(completions, truth, strict=True):
        last = said[-1]
        found = ANSWER.findall(last["content"]) if last["role"] == "assistant" else []
        scores.append(float(found[-1:] == [expected]))
    return scores


class Timed(GRPOTrainer):
    """Notes what a step did: how long it rolled out, and what came of it."""

    def _generate(self, prompts: list[Any]) -> Any:
        began = time.perf_counter()
        made = super()._generate(prompts)
        prompt_ids, completion_ids, tool_mask, completions = made[:4]
        roles = [message["role"] for said in completions for message in said]
        self.did = {
            "rolling_out_s": time.perf_counter() - began,
            "rollouts": len(completion_ids),
            "written": sum(map(sum, tool_mask)),
            "tokens": sum(map(len, [*prompt_ids, *completion_ids])),
            "turns": roles.count("assistant"),
            "calls": roles.count("tool"),
        }
        return made


class Lines(TrainerCallback):
    def __init__(self, out: Path, trainer: Timed) -> None:
        self._out, self._trainer = out, trainer

    def on_step_end(self, *args: Any, **more: Any) -> None:
        did = self._trainer.did | {"reward": self._trainer._metrics["train"]["reward"][-1]}
        with self._out.open("a") as lines:
            lines.write(json.dumps(did) + "\n")


def tokenizer(folder: str) -> Any:
    """With TRL's own parser for this way to write calls, and its tools in the order that the model was warmed with."""
    made = AutoTokenizer.from_pretrained(folder)
    made.chat_template = made.chat_template.replace("in tools or ()", "in (tools or ()) | reverse")
    made.response_template = qwen3_template
    return made


def settings(job: Mapping[str, Any], out: Path) -> GRPOConfig:
    """One update a step. As it comes: bfloat16, passes of 8 rollouts, and layers computed twice rather than kept.

    Tuned: in full precision as the other trainer, nothing computed twice, in passes that are as quick as any. Its
    continuous batching would be slower in either case: without a GPU, a step of it takes half a minute.
    """
    rollouts = job["prompts"] * job["n"]
    passes = TUNED_PASSES if job["tuned"] else max(1, rollouts // 8)
    tuned = {"bf16": False, "gradient_checkpointing": False} if job["tuned"] else {}
    return GRPOConfig(
        output_dir=str(out.parent / "trl"),
        max_steps=job["steps"],
        per_device_train_batch_size=rollouts // passes,
        gradient_accumulation_steps=passes,
        num_generations=job["n"],
        max_completion_length=job["completion_tokens"],
        max_tool_calling_iterations=job["turns"] - 1,
        generation_kwargs={"max_new_tokens": job["turn_tokens"]},
        learning_rate=job["lr"],
        lr_scheduler_type="constant",
        adam_beta1=job["betas"][0],
        adam_beta2=job["betas"][1],
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        shuffle_dataset=False,
        seed=job["seed"],
        **tuned,
    )


def main() -> None:
    file, out = Path(sys.argv[1]), Path(sys.argv[2])
    job = json.loads(file.read_text())
    torch.set_num_threads(1)
    factory: Callable[[], Lookups] = Lookups
    trainer = Timed(
        model=AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32),
        reward_funcs=right,
        args=settings(job, out),
        train_dataset=Dataset.from_list(job["rows"]),
        processing_class=tokenizer(job["model"]),
        environment_factory=factory,
    )
    trainer.add_callback(Lines(out, trainer))
    trainer.train()


if __name__ == "__main__":
    main()
