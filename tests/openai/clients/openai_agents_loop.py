# SPDX-License-Identifier: Apache-2.0
"""A loop of OpenAI's Agents SDK."""

import asyncio

from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from noting import API, MAX_TURNS, MODEL, TASK, URL, note, report
from openai import AsyncOpenAI


async def main() -> None:
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
    kind = OpenAIResponsesModel if API.startswith("responses") else OpenAIChatCompletionsModel
    agent = Agent("noting", instructions="Take notes.", tools=[function_tool(note)], model=kind(MODEL, client))
    if API.endswith("stream"):
        run = Runner.run_streamed(agent, TASK, max_turns=MAX_TURNS)
        async for _ in run.stream_events():
            pass
    else:
        run = await Runner.run(agent, TASK, max_turns=MAX_TURNS)
    report(run.final_output)


asyncio.run(main())
