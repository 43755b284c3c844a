# SPDX-License-Identifier: Apache-2.0
"""A loop of LangGraph, with LangChain's client of OpenAI."""

import asyncio

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from noting import API, MAX_TURNS, MODEL, TASK, URL, note, report

tools = [tool(note)]
client = ChatOpenAI(
    model=MODEL,
    base_url=f"{URL}/v1",
    api_key="none",
    max_retries=0,
    use_responses_api=API.startswith("responses"),
    streaming=API.endswith("stream"),
).bind_tools(tools)


async def answer(state: MessagesState) -> dict[str, object]:
    return {"messages": [await client.ainvoke(state["messages"])]}


graph = StateGraph(MessagesState)
graph.add_node("model", answer)
graph.add_node("tools", ToolNode(tools))
graph.add_edge(START, "model")
graph.add_conditional_edges("model", tools_condition)
graph.add_edge("tools", "model")
asked = {"messages": [("user", TASK)]}
done = asyncio.run(graph.compile().ainvoke(asked, {"recursion_limit": 3 * MAX_TURNS}))
report(done["messages"][-1].text)
