"""The engine with a tokenizer.json: what it says, where it stops, and what it does without a tokenizer."""

from pathlib import Path
from typing import Any

import pytest

from .. import LLM, SamplingParams
from ..checkpoints.tokenizer import load_tokenizer
from .helpers import OPTIONS, write_checkpoint
from .made_tokenizers import write_form


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("engine")
    write_form(folder, "llama3")
    config = {"vocab_size": len(load_tokenizer(folder)), "eos_token_id": load_tokenizer(folder).eos_token_id}
    write_checkpoint(folder, **config)
    (folder / "tokenizer.model").unlink()
    return folder


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(str(folder), dtype="float32", device="cpu", **OPTIONS)


def say(llm: LLM, text: str, **params: Any) -> tuple[str, str]:
    """Let the model say `text`, over and over, by allowing no other token: one that the tokenizer has as a whole."""
    tokenizer: Any = llm.llm_engine.tokenizer
    token_id = tokenizer.convert_tokens_to_ids(text)
    defaults: dict[str, Any] = {"temperature": 0, "max_tokens": 3, "allowed_token_ids": [token_id], "ignore_eos": True}
    (output,) = llm.generate("the fox", SamplingParams(**(defaults | params)))
    return output.outputs[0].text, output.outputs[0].finish_reason


def test_a_prompt_begins_with_bos_as_tokenizer_json_says(llm):
    (output,) = llm.generate("the fox", SamplingParams(max_tokens=1))
    tokenizer = llm.llm_engine.tokenizer
    assert (
        output.prompt_token_ids == tokenizer.encode("the fox") and output.prompt_token_ids[0] == tokenizer.bos_token_id
    )


def test_added_tokens_that_are_not_special_are_shown_and_stop(llm):
    assert say(llm, "<tool_call>") == ("<tool_call>" * 3, "length")
    assert say(llm, "<tool_call>", stop="call><") == ("<tool_", "stop")


def test_special_tokens_are_shown_if_they_are_asked_for(llm):
    assert say(llm, "<|eot_id|>") == ("", "length")
    assert say(llm, "<|eot_id|>", skip_special_tokens=False) == ("<|eot_id|>" * 3, "length")
    assert say(llm, "<|eot_id|>", ignore_eos=False) == ("", "stop")


def test_text_prompts_need_a_tokenizer(folder, tmp_path):
    write_checkpoint(tmp_path)
    (tmp_path / "tokenizer.model").unlink()
    llm = LLM(str(tmp_path), dtype="float32", device="cpu", **OPTIONS)
    (output,) = llm.generate([[5, 6]], SamplingParams(max_tokens=2, ignore_eos=True))
    assert output.outputs[0].text == "" and len(output.outputs[0].token_ids) == 2
    outcome = llm.generate("the fox", SamplingParams(max_tokens=2))
    assert outcome[0].error == "there is no tokenizer: a prompt must be a list of token ids"
