"""Runs TRL's GRPOTrainer with a line for each step, in TRL's environment; run by `trainer.py` and `real_step.py`.

Each rollout has facts of its own, so it is an environment with tools, TRL's concept for that; its tools are functions
in the same process, since TRL opens no MCP servers. The job is the one that mtrl gets.
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

_EXPRESSION = re.compile(r"\s*(\d{1,12})\s*([-+*])\s*(\d{1,12})\s*")
_ANSWER = re.compile(r"#### ([0-9]+)")
TUNED_PASSES = 4
"""Micro-batches per step; faster than one or two here, since less is padded."""


class FactsEnvironment:
    """The tools of one rollout; TRL offers the public methods to the policy."""

    def reset(self, facts: str, **row: Any) -> None:
        self._facts: Mapping[str, str] = json.loads(facts)

    def calculate(self, expression: str) -> str:
        """Calculates a sum, a difference or a product of two whole numbers.

        Args:
            expression: As `20 + 22`.
        """
        match = _EXPRESSION.fullmatch(expression)
        if match is None:
            raise ValueError("write two whole numbers with +, - or * between them")
        left, right = int(match[1]), int(match[3])
        return str({"+": left + right, "-": left - right, "*": left * right}[match[2]])

    def look_up(self, name: str) -> str:
        """What is known of a person or a city: where one lives, or how many people live there.

        Args:
            name: The person or the city.
        """
        return self._facts.get(name, "unknown")


def score_answers(completions: Sequence[Sequence[Mapping[str, Any]]], truth: Sequence[str], **row: Any) -> list[float]:
    """1 for a right answer in the last message, if that is the policy's."""
    scores = []
    for messages, expected in zip(completions, truth, strict=True):
        last = messages[-1]
        answers = _ANSWER.findall(last.get("content") or "") if last["role"] == "assistant" else []
        scores.append(float(answers[-1:] == [expected]))
    return scores


class TimedTrainer(GRPOTrainer):
    """Records the rollouts of a step and how long they took."""

    def _generate(self, prompts: list[Any]) -> Any:
        began = time.perf_counter()
        result = super()._generate(prompts)
        prompt_ids, completion_ids, tool_mask, completions = result[:4]
        roles = [message["role"] for messages in completions for message in messages]
        self.step_work = {
            "rolling_out_s": time.perf_counter() - began,
            "rollouts": len(completion_ids),
            "written": sum(map(sum, tool_mask)),
            "tokens": sum(map(len, [*prompt_ids, *completion_ids])),
            "turns": roles.count("assistant"),
            "calls": roles.count("tool"),
        }
        return result


class StepWriter(TrainerCallback):
    """Writes a line of JSON for each step."""

    def __init__(self, out: Path, trainer: TimedTrainer) -> None:
        self._out, self._trainer = out, trainer

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        line = self._trainer.step_work | {"reward": self._trainer._metrics["train"]["reward"][-1]}
        with self._out.open("a") as file:
            file.write(json.dumps(line) + "\n")


def load_tokenizer(job: Mapping[str, Any]) -> Any:
    """The model's tokenizer with TRL's parser for its tool calls, and tools in the order of the warm start."""
    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    own = tokenizer.chat_template.replace("in tools or ()", "in (tools or ()) | reverse")
    tokenizer.chat_template = job.get("chat_template", own)
    tokenizer.response_template = qwen3_template
    return tokenizer


def make_config(job: Mapping[str, Any], out: Path) -> GRPOConfig:
    """One update per step. Defaults: bfloat16, micro-batches of 8 rollouts, gradient checkpointing.

    Tuned: full precision as in our trainer, no checkpointing, the fastest micro-batches. TRL's continuous batching
    would be slower in either case: without a GPU, a step with it takes half a minute.
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
        cache_implementation=job.get("cache"),
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
    torch.set_num_threads(job["threads"])
    factory: Callable[[], FactsEnvironment] = FactsEnvironment
    trainer = TimedTrainer(
        model=AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32),
        reward_funcs=score_answers,
        args=make_config(job, out),
        train_dataset=Dataset.from_list(job["rows"]),
        processing_class=load_tokenizer(job),
        environment_factory=factory,
    )
    trainer.add_callback(StepWriter(out, trainer))
    trainer.train()


if __name__ == "__main__":
    main()
