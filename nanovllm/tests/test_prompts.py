"""What is a prompt, and what is none: the latter is one error that names its place, never an empty output."""

import numpy as np
import pytest
import torch

from ..engine.prompts import as_conversations, as_prompts

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
def test_token_ids_in_all_their_forms(form):
    assert as_prompts(form) == [IDS] and all(type(i) is int for i in as_prompts(form)[0])


@pytest.mark.parametrize("form", ["a", {"prompt": "a"}, ["a"], ("a",), [{"prompt": "a"}], np.array(["a"])], ids=repr)
def test_a_text_in_all_its_forms(form):
    assert as_prompts(form) == ["a"]


def test_lists_of_all_of_them_mixed():
    both = {"prompt": "the text", "prompt_token_ids": [1, 2]}
    mixed = ["a", {"prompt": "b"}, IDS, {"prompt_token_ids": IDS}, np.array(IDS), both, ""]
    assert as_prompts(mixed) == ["a", "b", IDS, IDS, IDS, both, ""]
    assert as_prompts([]) == [] and as_prompts([[]]) == [[]]
    assert as_prompts(torch.tensor([[1, 2], [3, 4]])) == [[1, 2], [3, 4]]


@pytest.mark.parametrize(
    ("form", "told"),
    [
        (None, "prompts must be a text, token ids or a list of such prompts, not NoneType"),
        (5, "not int"),
        (b"a", "not bytes"),
        ({"a"}, "not set"),
        (np.array(5), "not int"),
        ([1, 2.5], "the prompt: a token id must be a whole number, not 2.5"),
        ([1, None], "the prompt: a token id must be a whole number, not None"),
        (np.array([1.0]), "the prompt: a token id must be a whole number, not 1.0"),
        (["a", None], "prompt 1 must be a text, token ids or a dictionary, not NoneType"),
        (["a", 5], "prompt 1 must be a text, token ids or a dictionary, not int"),
        ([1, "a"], "the prompt: a token id must be a whole number, not 'a'"),
        ([1.0, 2.0], "the prompt: a token id must be a whole number, not 1.0"),
        (np.array([[1.0]]), "prompt 0: a token id must be a whole number, not 1.0"),
        ([["a", "b"]], "prompt 0: a token id must be a whole number, not 'a'"),
        ([[1, True]], "prompt 0: a token id must be a whole number, not True"),
        ({"promt": "a"}, "the prompt has a field 'promt': did you mean 'prompt'?"),
        ({"text": "a"}, "the prompt has a field 'text'"),
        ([{}], 'prompt 0 needs a text as "prompt" or token ids as "prompt_token_ids", and has []'),
        ({"prompt": None}, 'needs a text as "prompt"'),
        ({"prompt": [1]}, 'needs a text as "prompt"'),
        ({"prompt_token_ids": "ab"}, "prompt_token_ids must be token ids, not str"),
        ({"prompt": "a", "multi_modal_data": {"image": 1}}, "vLLM has multi_modal_data, nanovllm has not: it reads"),
        ({"prompt_embeds": torch.zeros(2, 3)}, "vLLM has prompt_embeds, nanovllm has not"),
        ({"encoder_prompt": "a", "decoder_prompt": None}, "vLLM has encoder_prompt, nanovllm has not"),
        ({"prompt": "a", "cache_salt": "s"}, "vLLM has cache_salt, nanovllm has not: all requests share one"),
    ],
    ids=repr,
)
def test_what_is_no_prompt_is_an_error_that_names_it(form, told):
    with pytest.raises(ValueError) as caught:
        as_prompts(form)
    assert told in str(caught.value) and "\n" not in str(caught.value)


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
    assert given == user("a"), "the caller's messages stay as they are"


@pytest.mark.parametrize(
    ("messages", "told"),
    [
        ("hello", "messages must be a list of messages or of conversations, not str"),
        ([[]], "conversation 0 must be a list of messages, at least one, not []"),
        ([[user("a")], "b"], "conversation 1 must be a list of messages, at least one, not 'b'"),
        ([{"content": "a"}], 'conversation 0: a message must be a dictionary with a text as its "role"'),
        ([{"role": None, "content": "a"}], 'a message must be a dictionary with a text as its "role"'),
        ([user("a"), user(b"a")], "conversation 0, message 1: content must be a text or a list of parts, not bytes"),
        ([[user("a")], [user([5])]], "conversation 1, message 0: content parts of type 'int' are not supported"),
        ([user([{"type": "image_url", "image_url": {}}])], "content parts of type 'image_url' are not supported"),
    ],
    ids=repr,
)
def test_what_is_no_conversation(messages, told):
    with pytest.raises(ValueError) as caught:
        as_conversations(messages)
    assert told in str(caught.value)
