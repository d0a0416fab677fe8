"""An agent of openai-agents whose tools come from the rollout's MCP server."""

import asyncio
import os
import sys

from agents import Agent, Runner, set_default_openai_api, set_tracing_disabled
from agents.mcp import MCPServerStreamableHttp


async def main() -> None:
    set_tracing_disabled(True)
    set_default_openai_api("chat_completions")
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    async with MCPServerStreamableHttp({"url": os.environ["MTRL_MCP_URL"], "headers": headers}) as tools:
        agent = Agent(name="calculator", instructions="Use the tool.", model="policy", mcp_servers=[tools])
        result = await Runner.run(agent, sys.stdin.read())
    print(result.final_output)


asyncio.run(main())
