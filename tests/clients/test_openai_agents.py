"""openai-agents, unmodified, against `rillflow serve`: its default model (responses), chats, streams."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

agents, openai = pytest.importorskip("agents"), pytest.importorskip("openai")


@agents.function_tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def agent(served: Any, kind: str) -> Any:
    """Return an agent; of kind default, its model is a name, as in the framework's first example."""
    agents.set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=served.url, api_key=served.token)
    agents.set_default_openai_client(client, use_for_tracing=False)
    model = served.model
    if kind == "chats":
        model = agents.OpenAIChatCompletionsModel(model=served.model, openai_client=client)
    settings = agents.ModelSettings(temperature=0)
    return agents.Agent(
        name="adder", instructions="Use the tool.", tools=[add], model=model, model_settings=settings
    )


@pytest.mark.parametrize("kind", ["default", "chats"])
@pytest.mark.parametrize(("prompt", "last"), [("3+4", "It is 7."), ("both sums", "They are 42 and 7.")])
def test_an_agent_uses_its_tool(served: Any, kind: str, prompt: str, last: str) -> None:
    result = agents.Runner.run_sync(agent(served, kind), prompt)
    assert result.final_output == last
    assert sum(isinstance(item, agents.ToolCallOutputItem) for item in result.new_items) == 1 + (
        "both" in prompt
    )


@pytest.mark.parametrize("kind", ["default", "chats"])
def test_a_streamed_agent_uses_its_tool(served: Any, kind: str) -> None:
    async def streamed() -> tuple[str, set[str]]:
        result = agents.Runner.run_streamed(agent(served, kind), "3+4")
        kinds = {
            event.data.type async for event in result.stream_events() if event.type == "raw_response_event"
        }
        return str(result.final_output), kinds

    last, kinds = asyncio.run(streamed())
    assert last == "It is 7." and "response.output_text.delta" in kinds
