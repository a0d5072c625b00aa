"""instructor, in its modes for OpenAI's two APIs."""

import instructor
from openai import OpenAI
from pydantic import BaseModel

MESSAGES = [{"role": "user", "content": "Jason is 25 years old."}]


class Person(BaseModel):
    """A person."""

    name: str
    age: int


def extract(mode):
    client = instructor.from_openai(OpenAI(), mode=mode)
    person = client.create(model="assistant", messages=MESSAGES, response_model=Person, max_retries=1)
    return person.model_dump()


def try_TOOLS():
    assert extract(instructor.Mode.TOOLS) == {"name": "Jason", "age": 25}


def try_TOOLS_in_a_stream():
    client = instructor.from_openai(OpenAI(), mode=instructor.Mode.TOOLS)
    people = list(client.create_partial(model="assistant", messages=MESSAGES, response_model=Person))
    assert len(people) > 1 and (people[-1].name, people[-1].age) == ("Jason", 25)


def try_JSON_SCHEMA():
    assert extract(instructor.Mode.JSON_SCHEMA) == {"name": "Jason", "age": 25}


def try_RESPONSES_TOOLS():
    assert extract(instructor.Mode.RESPONSES_TOOLS) == {"name": "Jason", "age": 25}
