"""A ToolEnv of verifiers' v0, with a reward for a single rollout and one for a group."""

import sys

import verifiers as vf
from datasets import Dataset

PRICES = {"apple": 2, "pear": 3}


def price(item: str) -> int:
    """Looks up what one piece of an item costs."""
    sys.stdout.write("a stray line, which must not reach the wire\n")
    return PRICES[item]


def text(message) -> str:
    return str((message["content"] if isinstance(message, dict) else message.content) or "")


async def correct(completion, answer) -> float:
    return float(text(completion[-1]).strip(" .").endswith(answer))


def shortest(completions, **kwargs) -> list[float]:
    """Compares the group's rollouts: 1 for those with the fewest messages."""
    fewest = min(map(len, completions))
    return [float(len(completion) == fewest) for completion in completions]


def load_environment(shortest_weight: float = 0.25, **kwargs):
    rows = [{"question": f"What do {count} apples cost?", "answer": str(2 * count)} for count in (3, 4)]
    held_out = [{"question": "What do 2 pears cost?", "answer": "6"}]
    return vf.ToolEnv(
        dataset=Dataset.from_list(rows),
        eval_dataset=Dataset.from_list(held_out),
        system_prompt="You sell fruit.",
        tools=[price],
        rubric=vf.Rubric(funcs=[correct, shortest], weights=[1.0, shortest_weight]),
        max_turns=4,
    )
