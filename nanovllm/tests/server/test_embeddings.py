"""/v1/embeddings: the embeddings of an LLM in OpenAI's form."""

import base64
import struct

import openai
import pytest
from openai.types import CreateEmbeddingResponse

from ... import PoolingParams
from ..testing.inside import error_of
from ..testing.served import answer, unset

PATH, INPUTS = "/v1/embeddings", ["Once upon a time", "The fox"]
SIZE = 256  # the storyteller's hidden_size


def vectors(served, **body) -> list[list[float]]:
    response = answer(served.post(PATH, **body))
    assert [each["index"] for each in response["data"]] == list(range(len(response["data"])))
    return [each["embedding"] for each in response["data"]]


def close(numbers: list[float]):
    return pytest.approx(numbers, abs=1e-5)


def test_embeddings_equal_the_engines(served, llm):
    body = answer(served.post(PATH, input=INPUTS, model="storyteller", user="me"))
    expected = llm.embed(INPUTS, use_tqdm=False)
    for index, (data, output) in enumerate(zip(body["data"], expected, strict=True)):
        assert data == {"object": "embedding", "index": index, "embedding": close(output.outputs.embedding)}
    num_tokens = sum(len(output.prompt_token_ids) for output in expected)
    assert (body["object"], body["model"]) == ("list", "storyteller") and body["id"].startswith("embd-")
    assert (body["usage"]["prompt_tokens"], body["usage"]["total_tokens"]) == (num_tokens, num_tokens)


def test_input_is_text_or_token_ids_or_a_list_of_them(served, llm):
    ids = llm.get_tokenizer().encode(INPUTS[0])
    [expected] = vectors(served, input=INPUTS[0])
    assert vectors(served, input=ids) == vectors(served, input=[ids]) == [close(expected)]
    assert vectors(served, input=[INPUTS[1], ids])[1] == close(expected)


def test_base64_is_little_endian_float32(served):
    [packed] = vectors(served, input=INPUTS[0], encoding_format="base64")
    [numbers] = vectors(served, input=INPUTS[0], encoding_format="float")
    assert list(struct.unpack(f"<{SIZE}f", base64.b64decode(packed))) == close(numbers)


def test_official_client_reads_base64_by_default(served):
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        response = client.embeddings.create(model="storyteller", input=INPUTS)
    CreateEmbeddingResponse.model_validate(response.to_dict(), strict=True)
    assert not unset(response)
    assert [each.embedding for each in response.data] == [close(each) for each in vectors(served, input=INPUTS)]


def test_use_activation_false_skips_normalization(served, llm):
    [raw] = vectors(served, input=INPUTS[0], use_activation=False, dimensions=SIZE)
    [expected] = llm.embed(INPUTS[:1], pooling_params=PoolingParams(use_activation=False), use_tqdm=False)
    assert raw == pytest.approx(expected.outputs.embedding, abs=1e-4) and sum(x * x for x in raw) > 2


def test_truncation_keeps_the_first_tokens_unless_told_otherwise(served):
    ids = list(range(20, 40))
    body = {"input": ids, "truncate_prompt_tokens": 4}
    assert vectors(served, **body) == [close(vectors(served, input=ids[:4])[0])]
    assert vectors(served, **body, truncation_side="left") == [close(vectors(served, input=ids[-4:])[0])]


def test_cache_salt_separates_the_prefix_cache(served):
    def num_cached(salt: str) -> int:
        body = answer(served.post(PATH, input=list(range(100, 140)), cache_salt=salt))
        return body["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert [num_cached(salt) for salt in ("one", "one", "two")] == [0, 32, 0]


def test_prompt_may_fill_the_context(served, llm):
    longest = [5] * llm.max_model_len
    [filled], [truncated] = (
        vectors(served, **body) for body in ({"input": longest}, {"input": [*longest, 6], "truncate_prompt_tokens": -1})
    )
    assert truncated == close(filled) and len(filled) == SIZE
    error = error_of(served.post(PATH, input=[*longest, 6]), 400)
    assert error["code"] == "context_length_exceeded" and f"{llm.max_model_len + 1} tokens." in error["message"]


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({}, "input", "Missing required parameter: 'input'"),
        ({"input": ""}, "input", "the prompt is empty"),
        ({"input": []}, "input", "the prompt is empty"),
        ({"input": ["a", ""]}, "input", "the prompt is empty"),
        ({"input": [[]]}, "input", "the prompt is empty"),
        ({"input": [1, 1 << 20]}, "input", "got 1048576"),
        ({"input": [-1]}, "input", "got -1"),
        ({"input": ["a"] * 2049}, "input", "at most 2048"),
        ({"input": [1.5]}, "input[0]", "Input should be"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", "'float' or 'base64'"),
        ({"input": "a", "dimensions": 64}, "dimensions", "dimensions must be 256, the model's hidden_size, got 64"),
        ({"input": "a", "truncate_prompt_tokens": 1 << 20}, "truncate_prompt_tokens", "got 1048576"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_invalid_body_is_refused(served, body, param, message):
    error = error_of(served.post(PATH, **body), 400)
    assert error["param"] == param and message in error["message"]


def test_unknown_model_is_refused(served):
    assert error_of(served.post(PATH, input="a", model="other"), 404)["code"] == "model_not_found"
