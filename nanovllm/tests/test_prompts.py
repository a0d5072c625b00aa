"""Prompts in all forms. Anything else is an error that says where it is, never an empty output."""

import numpy as np
import pytest
import torch

from .. import LLM, BeamSearchParams, SamplingParams
from ..requests.prompts import as_conversations, as_prompts
from .testing.engines import OPTIONS

IDS = [3, 17, 4]


@pytest.mark.parametrize(
    "form",
    [
        IDS,
        tuple(IDS),
        np.array(IDS),
        np.array(IDS, dtype=np.uint16),
        torch.tensor(IDS),
        [np.int64(i) for i in IDS],
        list(torch.tensor(IDS)),
        {"prompt_token_ids": IDS},
        {"prompt_token_ids": np.array(IDS)},
        {"prompt_token_ids": tuple(IDS), "multi_modal_data": None},
        [IDS],
        (IDS,),
        [tuple(IDS)],
        [torch.tensor(IDS)],
        np.array([IDS]),
        torch.tensor([IDS]),
        [{"prompt_token_ids": IDS}],
    ],
    ids=repr,
)
def test_all_forms_of_token_ids(form):
    assert as_prompts(form) == [IDS] and all(type(i) is int for i in as_prompts(form)[0])


@pytest.mark.parametrize("form", ["a", {"prompt": "a"}, ["a"], ("a",), [{"prompt": "a"}], np.array(["a"])], ids=repr)
def test_all_forms_of_text(form):
    assert as_prompts(form) == ["a"]


def test_lists_may_mix_all_forms():
    both = {"prompt": "the text", "prompt_token_ids": [1, 2]}
    mixed = ["a", {"prompt": "b"}, IDS, {"prompt_token_ids": IDS}, np.array(IDS), both, ""]
    assert as_prompts(mixed) == ["a", "b", IDS, IDS, IDS, both, ""]
    salted = [{"prompt": "a", "cache_salt": "s"}, {"prompt_token_ids": IDS, "cache_salt": "s"}]
    assert as_prompts(salted) == salted and as_prompts({"prompt": "a", "cache_salt": None}) == ["a"]
    assert as_prompts([]) == [] and as_prompts([[]]) == [[]]
    assert as_prompts(torch.tensor([[1, 2], [3, 4]])) == [[1, 2], [3, 4]]


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (None, "prompts must be text, token ids or a list of prompts, got NoneType"),
        (5, "got int"),
        (b"a", "got bytes"),
        ({"a"}, "got set"),
        (np.array(5), "got int"),
        ([1, 2.5], "the prompt: a token id must be an integer, got 2.5"),
        ([1, None], "the prompt: a token id must be an integer, got None"),
        (np.array([1.0]), "the prompt: a token id must be an integer, got 1.0"),
        (["a", None], "prompt 1 must be text, token ids or a dictionary, got NoneType"),
        (["a", 5], "prompt 1 must be text, token ids or a dictionary, got int"),
        ([1, "a"], "the prompt: a token id must be an integer, got 'a'"),
        ([1.0, 2.0], "the prompt: a token id must be an integer, got 1.0"),
        (np.array([[1.0]]), "prompt 0: a token id must be an integer, got 1.0"),
        ([["a", "b"]], "prompt 0: a token id must be an integer, got 'a'"),
        ([[1, True]], "prompt 0: a token id must be an integer, got True"),
        ({"promt": "a"}, "the prompt: field 'promt' is unsupported: did you mean 'prompt'?"),
        ({"text": "a"}, "the prompt: field 'text' is unsupported"),
        ([{}], 'prompt 0 needs text in "prompt" or token ids in "prompt_token_ids", got []'),
        ({"prompt": None}, 'needs text in "prompt"'),
        ({"prompt": [1]}, 'needs text in "prompt"'),
        ({"prompt_token_ids": "ab"}, "prompt_token_ids must be a list of token ids, got str"),
        ({"prompt": "a", "multi_modal_data": {"image": 1}}, "field 'multi_modal_data' is unsupported"),
        ({"prompt_embeds": torch.zeros(2, 3)}, "field 'prompt_embeds' is unsupported"),
        ({"encoder_prompt": "a", "decoder_prompt": None}, "field 'encoder_prompt' is unsupported"),
        ({"prompt": "a", "cache_salt": ""}, "the prompt: cache_salt must be a non-empty string, got ''"),
        ([{"prompt_token_ids": [1], "cache_salt": 5}], "prompt 0: cache_salt must be a non-empty string, got 5"),
    ],
    ids=repr,
)
def test_invalid_prompt_is_named(form, message):
    with pytest.raises(ValueError) as caught:
        as_prompts(form)
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("blocks", [64, 6], ids=["on the device", "on the host"])
def test_cache_salt_separates_prompts_of_every_kind(checkpoint, blocks):
    """With 6 blocks, each prompt evicts the one before."""
    llm = LLM(checkpoint, block_size=4, kv_cache_tokens=4 * blocks, watermark=0.0, **OPTIONS)
    params, text = SamplingParams(max_tokens=1), "the old fox sat in the wood"
    ids, options = llm.get_tokenizer().encode(text), {"add_special_tokens": True}

    def cached(salt: str | None, **kwargs) -> list[int]:
        prompts = [{"prompt": text, "cache_salt": salt}, {"prompt_token_ids": ids, "cache_salt": salt}]
        return [output.num_cached_tokens for output in llm.generate(prompts, params, **kwargs)]

    full = (len(ids) - 1) // 4 * 4
    assert 8 <= full <= 20 and 0 in cached("a")
    llm.generate([*range(40, 60)], params)
    assert cached("a") == cached("a", tokenization_kwargs=options) == [full, full]
    assert cached("b")[0] == 0 and cached(None)[0] == 0
    llm.beam_search([{"prompt": text, "cache_salt": "c"}], BeamSearchParams(beam_width=2, max_tokens=2))
    assert cached("c") == [full, full] and cached("d", tokenization_kwargs=options)[0] == 0


def user(content) -> dict:
    return {"role": "user", "content": content}


def test_conversations():
    assert as_conversations([user("a")]) == [[user("a")]] == as_conversations([[user("a")]])
    assert len(as_conversations([[user("a")], [user("b"), user("c")]])) == 2 and as_conversations([]) == []
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert as_conversations([user(parts)]) == [[user(parts)]]
    assert as_conversations([user(parts)], "string") == [[user("a\nb")]]
    assert as_conversations([user("a")], "openai") == [[user([{"type": "text", "text": "a"}])]]
    given = user("a")
    as_conversations([given], "openai")[0][0]["role"] = "other"
    assert given == user("a"), "the caller's messages do not change"


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("hello", "messages must be a list of messages or of conversations, got str"),
        ([[]], "conversation 0 must be a non-empty list of messages, got []"),
        ([[user("a")], "b"], "conversation 1 must be a non-empty list of messages, got 'b'"),
        ([{"content": "a"}], 'conversation 0: a message must be a dictionary with a string "role"'),
        ([{"role": None, "content": "a"}], 'a message must be a dictionary with a string "role"'),
        ([user("a"), user(b"a")], "conversation 0, message 1: content must be a string or a list of parts, got bytes"),
        ([[user("a")], [user([5])]], "conversation 1, message 0: content parts of type 'int' are not supported"),
        ([user([{"type": "image_url", "image_url": {}}])], "content parts of type 'image_url' are not supported"),
    ],
    ids=repr,
)
def test_invalid_conversation_is_named(messages, message):
    with pytest.raises(ValueError) as caught:
        as_conversations(messages)
    assert message in str(caught.value)


@pytest.mark.parametrize("content_format", ["text", "", None])
def test_invalid_content_format_is_named(content_format):
    with pytest.raises(ValueError, match=f"must be auto, string or openai, got {content_format!r}"):
        as_conversations([user("a")], content_format)
