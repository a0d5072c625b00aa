"""LLM.chat with tools, from the conversation to the call, and from the tool's result to the answer."""

import json
from pathlib import Path

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.chat.assistant import read_message
from nanovllm.chat.formats import formats_for

from ..testing.scripted_model import follow, write_scripted_checkpoint

TEMPLATES = Path(__file__).parents[1] / "data" / "chat_templates"
ADD = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}
CALLS = {
    "qwen3": '<think>\nHm.\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
    "llama3": '<|python_tag|>{"name": "add", "parameters": {"a": 1}}',
    "mistral": '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]',
}


@pytest.mark.parametrize(("family", "form"), [("qwen3", "qwen2"), ("llama3", "llama3"), ("mistral", "tekken")])
def test_model_calls_a_tool_and_reads_its_result(family, form, tmp_path):
    folder = write_scripted_checkpoint(tmp_path / "model", form, "[TOOL_CALLS]", "<|python_tag|>")
    template = (TEMPLATES / f"{family}.jinja").read_text()
    llm = LLM(folder, chat_template=template, max_model_len=1024, kv_cache_tokens=2048, dtype="float32")
    follow({"Add to 1": CALLS[family], "it is 23": "So it is 23."}, llm.llm_engine)
    params = SamplingParams(temperature=0, max_tokens=128, skip_special_tokens=False)
    formats = formats_for(template, special_tokens=["[TOOL_CALLS]", "<|python_tag|>"])

    messages = [{"role": "user", "content": "Add to 1"}]
    (output,) = llm.chat(messages, params, tools=[ADD], use_tqdm=False)
    message = read_message(output.outputs[0].text, formats.for_prompt(output.prompt, tool_names=["add"]))
    (call,) = message.tool_calls
    assert (message.content, call.name, json.loads(call.arguments)) == ("", "add", {"a": 1})

    function = {"name": call.name, "arguments": call.arguments}
    messages.append({"role": "assistant", "tool_calls": [{"type": "function", "id": call.id, "function": function}]})
    messages.append({"role": "tool", "tool_call_id": call.id, "content": "it is 23"})
    (output,) = llm.chat(messages, params, tools=[ADD], use_tqdm=False)
    assert '{"a": 1}' in output.prompt
    message = read_message(output.outputs[0].text, formats.for_prompt(output.prompt, tool_names=["add"]))
    assert message.content == "So it is 23."
