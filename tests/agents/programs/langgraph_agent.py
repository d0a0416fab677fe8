"""A ReAct agent of langgraph, with a tool."""

import os
import sys

from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition


def add(a: int, b: int) -> int:
    """Adds."""
    return a + b


model = ChatOpenAI(model="policy", base_url=os.environ["OPENAI_BASE_URL"]).bind_tools([add])
graph = StateGraph(MessagesState)
graph.add_node("agent", lambda state: {"messages": [model.invoke(state["messages"])]})
graph.add_node("tools", ToolNode([add]))
graph.add_edge(START, "agent")
graph.add_conditional_edges("agent", tools_condition, {"tools": "tools", END: END})
graph.add_edge("tools", "agent")
result = graph.compile().invoke({"messages": [("user", sys.stdin.read())]})
print(result["messages"][-1].content)
