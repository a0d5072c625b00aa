"""A model that answers with given texts, for tests of tool calls, reasoning and clients.

A script maps markers to replies. The marker that occurs last in a prompt chooses the reply; each sample of a request
gets one of a list of replies. A prompt without a marker gets the model's own words. The script only prefers its tokens:
a grammar still bans what it doesn't allow.

In a process of its own, the script is a JSON file, and the other arguments are those of the command:

    python -m nanovllm.tests.testing.scripted_model script.json serve FOLDER --chat-template template.jinja
"""

import json
import os
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from ...__main__ import main
from ...checkpoints.tokenizer import load_tokenizer
from ...engine.sequence import Sequence
from ...llm_engine import LLMEngine
from ...options.engine_args import EngineArgs
from ...server import run as server
from .checkpoints import CONFIG, random_tensors
from .tokenizers import write_form

Script = Mapping[str, str | list[str]]
VARIABLE = "NANOVLLM_TEST_SCRIPT"  # the file, for the engine's process
PREFERENCE = 1e6  # added to the logit of the script's token


class Reply:
    """A logits processor that prefers the tokens of a reply, for as long as the output follows it."""

    def __init__(self, token_ids: list[int]) -> None:
        self._token_ids = token_ids

    def apply(self, logits: Tensor, output_token_ids: list[int]) -> None:
        position = len(output_token_ids)
        if position < len(self._token_ids) and output_token_ids == self._token_ids[:position]:
            logits[self._token_ids[position]] += PREFERENCE


def follow(script: Script, engine: LLMEngine) -> LLMEngine:
    """Make the engine follow a script, and return it."""
    tokenizer, process = engine.get_tokenizer(), engine.input_processor.process

    def process_and_script(*arguments: Any) -> list[Sequence]:
        samples = process(*arguments)
        prompt = tokenizer.decode(samples[0].prompt_token_ids, skip_special_tokens=False)
        place, marker = max((prompt.rfind(marker), marker) for marker in script)
        replies = script[marker] if place >= 0 else []
        replies = [replies] if isinstance(replies, str) else replies
        for seq in samples if replies else []:
            text = replies[seq.sample_index % len(replies)]
            token_ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
            seq.logits_processors = [*seq.logits_processors, Reply(token_ids)]
        return samples

    engine.input_processor.process = process_and_script  # type: ignore[method-assign]
    return engine


def write_scripted_checkpoint(folder: Path, form: str, *special_tokens: str, positions: int = 16384) -> Path:
    """Write a tiny random Llama with a tokenizer of tokenizers.FORMS and more special tokens."""
    write_form(folder, form)
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    known = {each["content"] for each in tokenizer["added_tokens"]}
    first = max(len(tokenizer["model"]["vocab"]), *(each["id"] + 1 for each in tokenizer["added_tokens"]))
    for id, text in enumerate([text for text in special_tokens if text not in known], first):
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        tokenizer["added_tokens"].append({"id": id, "content": text, "special": True, **flags})
    file.write_text(json.dumps(tokenizer))
    own = json.loads((folder / "config.json").read_text())
    loaded = load_tokenizer(folder)
    changes = {"vocab_size": len(loaded), "eos_token_id": loaded.eos_token_id, "max_position_embeddings": positions}
    config = CONFIG | own | changes | {"model_type": "llama"}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(random_tensors(config), folder / "model.safetensors")
    return folder


def scripted_engine(args: EngineArgs) -> LLMEngine:
    """Build an engine that follows the script named by the environment."""
    return follow(json.loads(Path(os.environ[VARIABLE]).read_text()), LLMEngine.from_engine_args(args))


if __name__ == "__main__":
    from nanovllm.tests.testing import scripted_model

    os.environ[VARIABLE] = sys.argv[1]
    server.run_server = partial(server.run_server, build=scripted_model.scripted_engine)  # type: ignore[assignment]
    sys.exit(main(sys.argv[2:]))
