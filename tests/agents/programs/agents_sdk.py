"""An agent of openai-agents, with a tool, over Responses or Chat Completions."""

import asyncio
import sys

from agents import Agent, Runner, function_tool, set_default_openai_api, set_tracing_disabled


@function_tool
def add(a: int, b: int) -> int:
    """Adds."""
    return a + b


async def main() -> None:
    set_tracing_disabled(True)
    if "chat" in sys.argv:
        set_default_openai_api("chat_completions")
    agent = Agent(name="calculator", instructions="Use the tool.", model="policy", tools=[add])
    if "stream" in sys.argv:
        result = Runner.run_streamed(agent, sys.stdin.read())
        async for _ in result.stream_events():
            pass
    else:
        result = await Runner.run(agent, sys.stdin.read())
    print(result.final_output)


asyncio.run(main())
