"""LangChain with langchain-openai, and its agents."""

from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel

llm = ChatOpenAI(model="assistant")


class Person(BaseModel):
    """A person."""

    name: str
    age: int


@tool
def get_weather(city: str) -> str:
    """Return the weather in a city."""
    return {"Paris": "18 degrees", "Oslo": "5 degrees", "Rome": "24 degrees"}[city]


def try_chat():
    assert llm.invoke("Tell me about a fox.").content == "A fox lives in the wood."


def try_streamed_chat():
    assert "".join(chunk.content for chunk in llm.stream("Tell me about a fox.")) == "A fox lives in the wood."


def try_tools():
    message = llm.bind_tools([get_weather]).invoke("What is the weather in Paris?")
    [call] = message.tool_calls
    assert call["name"] == "get_weather" and call["args"] == {"city": "Paris"}


def try_streamed_tools():
    whole = None
    for chunk in llm.bind_tools([get_weather]).stream("Which is warmer, Oslo or Rome?"):
        whole = chunk if whole is None else whole + chunk
    assert [call["args"] for call in whole.tool_calls] == [{"city": "Oslo"}, {"city": "Rome"}]


def try_forced_tool():
    message = llm.bind_tools([get_weather], tool_choice="get_weather").invoke("Just the arguments, for Bern.")
    assert [call["args"] for call in message.tool_calls] == [{"city": "Bern"}]
    message = llm.bind_tools([get_weather], tool_choice="any").invoke("Call it for Lima.")
    assert [call["args"] for call in message.tool_calls] == [{"city": "Lima"}]


def try_forced_tool_cut_by_max_tokens():
    for tokens in (4, 8):
        caller = ChatOpenAI(model="assistant", max_tokens=tokens).bind_tools([get_weather], tool_choice="get_weather")
        message = caller.invoke("Just the arguments, for Bern.")
        [call] = message.invalid_tool_calls
        assert call["name"] == "get_weather" and '{"city": "Bern"}'.startswith(call["args"]) and not message.content
        assert message.response_metadata["finish_reason"] == "length"
        whole = None
        for chunk in caller.stream("Just the arguments, for Bern."):
            whole = chunk if whole is None else whole + chunk
        assert [each["args"] for each in whole.tool_call_chunks] == [call["args"]] and not whole.content


def try_agent():
    agent = create_agent(llm, [get_weather])
    messages = agent.invoke({"messages": [{"role": "user", "content": "Which is warmer, Oslo or Rome?"}]})["messages"]
    assert messages[-1].content == "Rome is warmer."
    assert [message.content for message in messages if message.type == "tool"] == ["5 degrees", "24 degrees"]


def try_structured_output_by_JSON_schema():
    assert llm.with_structured_output(Person).invoke("Jason is 25 years old.") == Person(name="Jason", age=25)


def try_structured_output_by_function_calling():
    caller = llm.with_structured_output(Person, method="function_calling")
    assert caller.invoke("Jason is 25 years old.") == Person(name="Jason", age=25)


def try_structured_output_cut_by_max_tokens():
    short = ChatOpenAI(model="assistant", max_tokens=8)
    caller = short.with_structured_output(Person, method="function_calling", include_raw=True)
    answer = caller.invoke("Jason is 25 years old.")
    [call] = answer["raw"].invalid_tool_calls
    assert call["name"] == "Person" and '{"name": "Jason", "age": 25}'.startswith(call["args"])
    assert answer["parsed"] is None


def try_structured_output_by_JSON_mode():
    caller = llm.with_structured_output(Person, method="json_mode")
    assert caller.invoke("Answer in JSON: Jason is 25 years old.") == Person(name="Jason", age=25)


def try_embeddings():
    # By default, the class counts tokens with a tokenizer of OpenAI's models and sends their ids.
    embeddings = OpenAIEmbeddings(model="assistant", check_embedding_ctx_length=False)
    vectors = embeddings.embed_documents(["A fox lives in the wood.", "Once upon a time"])
    assert vectors[0] == embeddings.embed_query("A fox lives in the wood.") != vectors[1]
