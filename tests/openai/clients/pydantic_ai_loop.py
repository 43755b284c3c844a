# SPDX-License-Identifier: Apache-2.0
"""A loop of pydantic-ai."""

from noting import API, MAX_TURNS, MODEL, TASK, URL, note, report
from pydantic_ai import Agent, UsageLimits
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

openai = OpenAIProvider(base_url=f"{URL}/v1", api_key="none")
model = {
    "chat": lambda: OpenAIChatModel(MODEL, provider=openai),
    "responses": lambda: OpenAIResponsesModel(MODEL, provider=openai),
    "messages": lambda: AnthropicModel(MODEL, provider=AnthropicProvider(base_url=URL, api_key="none")),
}[API]()
agent = Agent(model, tools=[note], instructions="Take notes.")
report(agent.run_sync(TASK, usage_limits=UsageLimits(request_limit=MAX_TURNS)).output)
