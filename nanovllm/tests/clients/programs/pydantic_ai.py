"""Pydantic AI, with its provider for vLLM."""

import asyncio
import os

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, PromptedOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.providers.vllm import VLLMProvider

URL = os.environ["OPENAI_BASE_URL"]
model = OpenAIChatModel("assistant", provider=VLLMProvider(base_url=URL))


class Person(BaseModel):
    """A person."""

    name: str
    age: int


def get_weather(city: str) -> str:
    """Return the weather in a city."""
    return {"Paris": "18 degrees", "Oslo": "5 degrees", "Rome": "24 degrees"}[city]


def try_text():
    assert Agent(model).run_sync("Tell me about a fox.").output == "A fox lives in the wood."


def try_streamed_text():
    async def collect():
        async with Agent(model).run_stream("Tell me about a fox.") as result:
            return [text async for text in result.stream_text(delta=True, debounce_by=None)]

    pieces = asyncio.run(collect())
    assert len(pieces) > 1 and "".join(pieces) == "A fox lives in the wood."


def try_tools():
    agent = Agent(model, tools=[get_weather])
    assert agent.run_sync("What is the weather in Paris?").output == "It is 18 degrees in Paris."
    assert agent.run_sync("Which is warmer, Oslo or Rome?").output == "Rome is warmer."


def try_output():
    assert Agent(model, output_type=Person).run_sync("Anna is 31 years old.").output == Person(name="Anna", age=31)


def try_native_output():
    agent = Agent(model, output_type=NativeOutput(Person))
    assert agent.run_sync("Jason is 25 years old.").output == Person(name="Jason", age=25)


def try_prompted_output():
    agent = Agent(model, output_type=PromptedOutput(Person))
    assert agent.run_sync("Jason is 25 years old.").output == Person(name="Jason", age=25)


def try_tools_in_responses():
    responses = OpenAIResponsesModel("assistant", provider=OpenAIProvider(base_url=URL))
    agent = Agent(responses, tools=[get_weather])
    assert agent.run_sync("What is the weather in Paris?").output == "It is 18 degrees in Paris."
