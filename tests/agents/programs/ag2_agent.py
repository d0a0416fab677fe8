"""An agent of AG2 with a tool. Reads the question from its input."""

import asyncio
import sys

from ag2 import Agent
from ag2.config import OpenAIConfig


def add(a: int, b: int) -> int:
    """Adds."""
    return a + b


agent = Agent("helper", config=OpenAIConfig(model="policy", streaming="stream" in sys.argv), tools=[add])
print(asyncio.run(agent.ask(sys.stdin.read())).body)
