"""smolagents, with both of its agents."""

import os

from smolagents import CodeAgent, OpenAIModel, ToolCallingAgent, tool

model = OpenAIModel("assistant", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])


@tool
def get_weather(city: str) -> str:
    """Return the weather in a city.

    Args:
        city: The city's name.
    """
    return {"Nice": "20 degrees"}[city]


def try_tool_calling_agent():
    agent = ToolCallingAgent(tools=[get_weather], model=model, max_steps=3, verbosity_level=0)
    assert agent.run("Is it warm in Nice?") == "It is 20 degrees in Nice."


def try_streamed_tool_calling_agent():
    agent = ToolCallingAgent(tools=[get_weather], model=model, max_steps=3, verbosity_level=0, stream_outputs=True)
    assert agent.run("Is it warm in Nice?") == "It is 20 degrees in Nice."


def try_code_agent():
    assert CodeAgent(tools=[], model=model, max_steps=2, verbosity_level=0).run("Multiply 6 by 7.") == 42
