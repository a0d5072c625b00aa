"""The engine with a tokenizer.json, and without any tokenizer: prompts, text, and where it stops."""

from pathlib import Path
from typing import Any

import pytest

from .. import LLM, SamplingParams
from ..checkpoints.tokenizer import load_tokenizer
from .testing.checkpoints import write_checkpoint
from .testing.engines import OPTIONS
from .testing.tokenizers import write_form


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


def repeat(llm: LLM, text: str, **params: Any) -> tuple[str, str]:
    """Return text and finish_reason of a model that can only repeat the token `text`."""
    tokenizer: Any = llm.llm_engine.tokenizer
    token_id = tokenizer.convert_tokens_to_ids(text)
    defaults: dict[str, Any] = {"temperature": 0, "max_tokens": 3, "allowed_token_ids": [token_id], "ignore_eos": True}
    (output,) = llm.generate("the fox", SamplingParams(**(defaults | params)))
    return output.outputs[0].text, output.outputs[0].finish_reason


def test_prompt_starts_with_bos_if_tokenizer_json_adds_it(llm):
    (output,) = llm.generate("the fox", SamplingParams(max_tokens=1))
    tokenizer = llm.llm_engine.tokenizer
    assert output.prompt_token_ids == tokenizer.encode("the fox")
    assert output.prompt_token_ids[0] == tokenizer.bos_token_id


def test_added_tokens_that_are_not_special_appear_in_text(llm):
    assert repeat(llm, "<tool_call>") == ("<tool_call>" * 3, "length")
    assert repeat(llm, "<tool_call>", stop="call><") == ("<tool_", "stop")


def test_special_tokens_appear_with_skip_special_tokens_off(llm):
    assert repeat(llm, "<|eot_id|>") == ("", "length")
    assert repeat(llm, "<|eot_id|>", skip_special_tokens=False) == ("<|eot_id|>" * 3, "length")
    assert repeat(llm, "<|eot_id|>", ignore_eos=False) == ("", "stop")


def test_text_prompts_need_a_tokenizer(folder, tmp_path):
    write_checkpoint(tmp_path, tokenizer_model=b"")
    llm = LLM(str(tmp_path), dtype="float32", device="cpu", **OPTIONS)
    (output,) = llm.generate([[5, 6]], SamplingParams(max_tokens=2, ignore_eos=True))
    assert output.outputs[0].text == "" and len(output.outputs[0].token_ids) == 2
    (output,) = llm.generate("the fox", SamplingParams(max_tokens=2))
    assert "tokenizer" in output.error and "token ids" in output.error
