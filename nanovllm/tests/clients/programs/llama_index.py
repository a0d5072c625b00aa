"""LlamaIndex with its OpenAILike classes."""

import asyncio
import os

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

SERVER = {"api_base": os.environ["OPENAI_BASE_URL"], "api_key": os.environ["OPENAI_API_KEY"]}
llm = OpenAILike(
    model="assistant", is_chat_model=True, is_function_calling_model=True, context_window=8192, max_tokens=256, **SERVER
)


class Person(BaseModel):
    """A person."""

    name: str
    age: int


def get_weather(city: str) -> str:
    """Return the weather in a city."""
    return {"Paris": "18 degrees", "Oslo": "5 degrees", "Rome": "24 degrees"}[city]


def try_chat():
    answer = llm.chat([ChatMessage(role="user", content="Tell me about a fox.")])
    assert answer.message.content == "A fox lives in the wood."


def try_streamed_chat():
    deltas = [each.delta for each in llm.stream_chat([ChatMessage(role="user", content="Tell me about a fox.")])]
    assert "".join(deltas) == "A fox lives in the wood." and len(deltas) > 1


def try_agent():
    agent = FunctionAgent(tools=[get_weather], llm=llm)

    async def ask(question):
        return str(await agent.run(question))

    assert asyncio.run(ask("What is the weather in Paris?")) == "It is 18 degrees in Paris."


def try_structured_output():
    person = llm.structured_predict(Person, PromptTemplate("Mary is {age} years old."), age=47)
    assert person == Person(name="Mary", age=47)


def try_embeddings():
    embedding = OpenAILikeEmbedding(model_name="assistant", **SERVER)
    first, second = embedding.get_text_embedding_batch(["A fox lives in the wood.", "Once upon a time"])
    assert abs(sum(x * x for x in first) - 1) < 1e-3 and first != second
