"""An agent of OpenHands' SDK, with its terminal; its last message is printed."""

import logging
import os
import sys

from openhands.sdk import LLM, Agent, Conversation, Tool
from openhands.sdk.event import MessageEvent
from openhands.tools.terminal import TerminalTool

logging.disable(logging.CRITICAL)
llm = LLM(model="openai/policy", base_url=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
agent = Agent(llm=llm, tools=[Tool(name=TerminalTool.name)])
conversation = Conversation(agent=agent, workspace=os.getcwd(), visualizer=None)
conversation.send_message(sys.stdin.read())
conversation.run()
last = [event for event in conversation.state.events if isinstance(event, MessageEvent) and event.source == "agent"][-1]
print("".join(part.text for part in last.llm_message.content))
