"""A server whose model follows a script, in the form of each family; and OpenAI's client for it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import openai
from anyio.from_thread import start_blocking_portal

from .inside import inside
from .scripted_model import Script, follow, write_scripted_checkpoint

TEMPLATES = Path(__file__).resolve().parents[1] / "data" / "chat_templates"


@dataclass
class Assistant:
    """A running server and its client."""

    client: openai.OpenAI

    def chat(self, text: str, **fields: Any) -> Any:
        messages = [{"role": "user", "content": text}]
        fields = {"messages": messages, "temperature": 0, "max_tokens": 300} | fields
        return self.client.chat.completions.create(model="scripted", **fields)

    def answer(self, text: str, **fields: Any) -> Any:
        """Return the only choice of a chat."""
        [choice] = self.chat(text, **fields).choices
        return choice

    def response(self, text: Any, **fields: Any) -> Any:
        fields = {"input": text, "temperature": 0, "max_output_tokens": 300} | fields
        return self.client.responses.create(model="scripted", **fields)

    def prompt_of(self, messages: list[dict[str, Any]], **fields: Any) -> str:
        """Return the text that the chat template renders."""
        tokens = self.client.post("/../tokenize", cast_to=object, body={"messages": messages, **fields})["tokens"]
        return self.client.post("/../detokenize", cast_to=object, body={"tokens": tokens})["prompt"]


@contextmanager
def assistant(
    folder: Path, script: Script, form: str, template: str, *special_tokens: str, **options: Any
) -> Iterator[Assistant]:
    """Serve a scripted model inside a `with` block. `template` is a file of TEMPLATES or a template."""
    model = write_scripted_checkpoint(folder / "scripted", form, *special_tokens, positions=4096)
    text = template if "{" in template else (TEMPLATES / f"{template}.jinja").read_text()
    server = inside(model, partial(follow, script), text, **options)
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(server) as running:
        url = f"{str(running.client.base_url).rstrip('/')}/v1"
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
            yield Assistant(client)
