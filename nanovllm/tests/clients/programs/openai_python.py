"""OpenAI's client for Python."""

import json

from openai import OpenAI, pydantic_function_tool
from pydantic import BaseModel

client = OpenAI()
MODEL = "assistant"
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
GET_WEATHER = {
    "name": "get_weather",
    "description": "Return the weather in a city.",
    "parameters": CITY | {"additionalProperties": False},
}
TOOLS = [{"type": "function", "function": GET_WEATHER}]


class Person(BaseModel):
    name: str
    age: int


class GetWeather(BaseModel):
    """Return the weather in a city."""

    city: str


def ask(question, **options):
    return client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": question}], **options)


def try_chat():
    choice = ask("Tell me about a fox.").choices[0]
    assert choice.message.content == "A fox lives in the wood." and choice.finish_reason == "stop"
    assert choice.message.tool_calls is None


def try_streamed_chat():
    chunks = list(ask("Tell me about a fox.", stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == "A fox lives in the wood." and chunks[-1].usage.completion_tokens > 1


def try_tools():
    messages = [{"role": "user", "content": "What is the weather in Paris?"}]
    choice = client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS).choices[0]
    [call] = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls" and call.type == "function" and call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Paris"} and not choice.message.content
    messages += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": "18 degrees"}]
    answer = client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS).choices[0]
    assert answer.message.content == "It is 18 degrees in Paris." and answer.finish_reason == "stop"


def try_streamed_tools():
    messages = [{"role": "user", "content": "What is the weather in Paris?"}]
    with client.chat.completions.stream(model=MODEL, messages=messages, tools=TOOLS) as stream:
        deltas = [event.arguments_delta for event in stream if event.type == "tool_calls.function.arguments.delta"]
        choice = stream.get_final_completion().choices[0]
    [call] = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls" and call.function.name == "get_weather" and call.id
    assert json.loads("".join(deltas)) == json.loads(call.function.arguments) == {"city": "Paris"} and len(deltas) > 1


def try_parallel_tools():
    calls = ask("Which is warmer, Oslo or Rome?", tools=TOOLS).choices[0].message.tool_calls
    assert [json.loads(call.function.arguments) for call in calls] == [{"city": "Oslo"}, {"city": "Rome"}]
    assert len({call.id for call in calls}) == 2
    alone = ask("Which is warmer, Oslo or Rome?", tools=TOOLS, parallel_tool_calls=False)
    assert len(alone.choices[0].message.tool_calls) == 1


def try_named_tool():
    named = {"type": "function", "function": {"name": "get_weather"}}
    [call] = ask("Just the arguments, for Bern.", tools=TOOLS, tool_choice=named).choices[0].message.tool_calls
    assert call.function.name == "get_weather" and json.loads(call.function.arguments) == {"city": "Bern"}


def try_required_tool():
    [call] = ask("Call it for Lima.", tools=TOOLS, tool_choice="required").choices[0].message.tool_calls
    assert call.function.name == "get_weather" and json.loads(call.function.arguments) == {"city": "Lima"}


def try_streamed_required_tool():
    deltas = [
        chunk.choices[0].delta for chunk in ask("Call it for Lima.", tools=TOOLS, tool_choice="required", stream=True)
    ]
    first, *others = [delta.tool_calls[0].function for delta in deltas if delta.tool_calls]
    assert first.name == "get_weather" and not any(delta.content for delta in deltas)
    assert json.loads("".join(each.arguments or "" for each in [first, *others])) == {"city": "Lima"}


def try_strict_tool():
    messages = [{"role": "user", "content": "What is the weather in Paris?"}]
    tools = [pydantic_function_tool(GetWeather, name="get_weather")]
    [call] = client.chat.completions.parse(model=MODEL, messages=messages, tools=tools).choices[0].message.tool_calls
    assert call.function.parsed_arguments == GetWeather(city="Paris")


def try_no_tool():
    message = ask("Tell me about a fox.", tools=TOOLS, tool_choice="none").choices[0].message
    assert message.tool_calls is None and message.content == "A fox lives in the wood."


def try_structured_output():
    messages = [{"role": "user", "content": "Jason is 25 years old."}]
    answer = client.chat.completions.parse(model=MODEL, messages=messages, response_format=Person)
    assert answer.choices[0].message.parsed == Person(name="Jason", age=25)


def try_reasoning():
    message = ask("How many legs has a fox?").choices[0].message
    assert message.content == "Four." and message.reasoning_content == "A fox is an animal with four legs."
    deltas = [chunk.choices[0].delta for chunk in ask("How many legs has a fox?", stream=True)]
    assert "".join(delta.content or "" for delta in deltas) == "Four."
    thought = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
    assert thought == message.reasoning_content
    without = ask("Count without a thought.", extra_body={"chat_template_kwargs": {"enable_thinking": False}})
    assert without.choices[0].message.content == "One, two."


def try_reasoning_before_a_call():
    for choice in ("auto", "required"):
        message = ask(f"Think, then call ({choice}).", tools=TOOLS, tool_choice=choice).choices[0].message
        [call] = message.tool_calls
        assert json.loads(call.function.arguments) == {"city": "Oslo"} and not message.content
        assert message.reasoning_content == "Oslo is a city."


def try_reasoning_before_structured_output():
    messages = [{"role": "user", "content": "Think about it: Tom is 9 years old."}]
    message = client.chat.completions.parse(model=MODEL, messages=messages, response_format=Person).choices[0].message
    assert message.parsed == Person(name="Tom", age=9) and message.reasoning_content == "A name and an age."


def try_responses():
    response = client.responses.create(model=MODEL, input="Tell me about a fox.")
    assert response.output_text == "A fox lives in the wood." and response.status == "completed"
    with client.responses.stream(model=MODEL, input="Tell me about a fox.") as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    assert text == response.output_text


def try_tools_in_responses():
    tools = [{"type": "function", "strict": True, **GET_WEATHER}]
    conversation = [{"role": "user", "content": "What is the weather in Paris?"}]
    response = client.responses.create(model=MODEL, input=conversation, tools=tools)
    [call] = [item for item in response.output if item.type == "function_call"]
    assert call.name == "get_weather" and json.loads(call.arguments) == {"city": "Paris"}
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "18 degrees"}
    conversation += [*response.output, result]
    answer = client.responses.create(model=MODEL, input=conversation, tools=tools)
    assert answer.output_text == "It is 18 degrees in Paris."


def try_streamed_tools_in_responses():
    tools = [{"type": "function", "strict": True, **GET_WEATHER}]
    with client.responses.stream(model=MODEL, input="What is the weather in Paris?", tools=tools) as stream:
        events = list(stream)
        [call] = [item for item in stream.get_final_response().output if item.type == "function_call"]
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert json.loads("".join(deltas)) == json.loads(call.arguments) == {"city": "Paris"}


def try_embeddings():
    texts = ["A fox lives in the wood.", "Once upon a time"]
    answer = client.embeddings.create(model=MODEL, input=texts)  # base64 on the wire, the client's default
    first, second = (each.embedding for each in answer.data)
    assert abs(sum(x * x for x in first) - 1) < 1e-3 and first != second and answer.usage.prompt_tokens > 4
    again = client.embeddings.create(model=MODEL, input=texts[0], encoding_format="float").data[0].embedding
    assert max(abs(a - b) for a, b in zip(first, again, strict=True)) < 1e-5
