"""LiteLLM, which calls this server as it calls vLLM's."""

import json
import os

import litellm

SERVER = {"api_base": os.environ["OPENAI_BASE_URL"], "api_key": os.environ["OPENAI_API_KEY"]}
MODEL = "hosted_vllm/assistant"
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": CITY}}]


def ask(*messages, **options):
    return litellm.completion(model=MODEL, messages=[*messages], **SERVER, **options)


def user(text):
    return {"role": "user", "content": text}


def try_chat():
    assert ask(user("Tell me about a fox.")).choices[0].message.content == "A fox lives in the wood."


def try_streamed_chat():
    chunks = ask(user("Tell me about a fox."), stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "A fox lives in the wood."


def try_tools():
    question = user("What is the weather in Paris?")
    choice = ask(question, tools=TOOLS, tool_choice="auto").choices[0]
    [call] = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls" and call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    result = {"role": "tool", "tool_call_id": call.id, "content": "18 degrees"}
    answer = ask(question, choice.message, result, tools=TOOLS).choices[0].message
    assert answer.content == "It is 18 degrees in Paris."


def try_streamed_tools():
    chunks = list(ask(user("Which is warmer, Oslo or Rome?"), tools=TOOLS, stream=True))
    calls = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls
    assert [json.loads(call.function.arguments) for call in calls] == [{"city": "Oslo"}, {"city": "Rome"}]


def try_structured_output():
    schema = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}}
    schema |= {"required": ["name", "age"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema, "strict": True}}
    answer = ask(user("Jason is 25 years old."), response_format=form)
    assert json.loads(answer.choices[0].message.content) == {"name": "Jason", "age": 25}


def try_reasoning():
    message = ask(user("How many legs has a fox?")).choices[0].message
    assert message.content == "Four." and message.reasoning_content == "A fox is an animal with four legs."


def try_embeddings():
    answer = litellm.embedding(model=MODEL, input=["A fox lives in the wood."], **SERVER)
    assert abs(sum(x * x for x in answer.data[0]["embedding"]) - 1) < 1e-3
