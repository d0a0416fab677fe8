"""A StatefulToolEnv of verifiers' v0: a tool gets an argument from the rollout's state."""

import verifiers as vf
from datasets import Dataset


def put(item: str, basket: list) -> str:
    """Puts an item into the basket."""
    basket.append(item)
    return f"in the basket: {', '.join(basket)}"


class BasketEnv(vf.StatefulToolEnv):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.add_tool(put, args_to_skip=["basket"])

    async def setup_state(self, state, **kwargs):
        state["basket"] = []

    def update_tool_args(self, tool_name, tool_args, messages, state, **kwargs):
        return {**tool_args, "basket": state["basket"]}


def filled(state) -> float:
    return float(len(state["basket"]))


def load_environment(**kwargs):
    rows = [{"question": "Put a pear and a fig into the basket.", "answer": ""}]
    return BasketEnv(dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[filled]), max_turns=5)
