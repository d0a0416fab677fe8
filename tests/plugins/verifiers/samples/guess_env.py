"""A MultiTurnEnv of verifiers' v0, which answers each guess until it is right."""

import os

import verifiers as vf
from datasets import Dataset


class GuessEnv(vf.MultiTurnEnv):
    def __init__(self, trouble: str = "", **kwargs):
        super().__init__(**kwargs)
        self.trouble = trouble

    async def env_response(self, messages, state, **kwargs):
        last = messages[-1]
        guess = str(last["content"] if isinstance(last, dict) else last.content)
        if self.trouble == "die":
            os._exit(3)
        if self.trouble == "raise":
            raise vf.InfraError("the database is down")
        if self.trouble == "bug":
            raise KeyError("a bug")
        if guess.strip() == state["answer"]:
            state["final_env_response"] = [{"role": "user", "content": "Right."}]
            return state["final_env_response"]
        hint = "higher" if int(guess) < int(state["answer"]) else "lower"
        return [{"role": "user", "content": f"It is {hint}."}]


def tries(state) -> float:
    return 1.0 / len(state["trajectory"])


def load_environment(trouble: str = "", **kwargs):
    rows = [{"question": "Guess my number, from 1 to 9.", "answer": "5"}]
    rubric = vf.Rubric(funcs=[tries])
    return GuessEnv(trouble=trouble, dataset=Dataset.from_list(rows), rubric=rubric, max_turns=6)
