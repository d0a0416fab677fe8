"""An agent of DSPy, which writes each step as text into a new chat. Reads the question from its input."""

import sys

import dspy


def add(a: int, b: int) -> int:
    """Adds."""
    return a + b


dspy.configure(lm=dspy.LM("openai/policy", cache=False))
print(dspy.ReAct("question -> answer", tools=[add], max_iters=4)(question=sys.stdin.read()).answer)
