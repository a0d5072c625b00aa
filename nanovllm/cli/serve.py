"""nanovllm serve: an OpenAI-compatible server."""

from dataclasses import fields
from typing import Any

import click

from ..options.engine_args import EngineArgs
from ..options.vllm_options import ServeCompatibilityOptions
from ..server.options import ServerOptions
from .click_options import PATH, engine_options, options, usage_errors, vllm_options, with_checkpoint
from .terminal import sigterm_exits

OPTIONS = options(ServerOptions, chat_template={"type": PATH}) + engine_options()
ACCEPT_UNDERSCORES = {"token_normalize_func": lambda name: name.replace("_", "-")}  # --max_model_len, as in vLLM


@click.command(params=OPTIONS + vllm_options(OPTIONS), context_settings=ACCEPT_UNDERSCORES)
@click.argument("name", required=False, metavar="[MODEL]")
@click.option("--served-model-name", multiple=True, help="name of the model for clients; may be given several times")
@click.option(
    "--api-key",
    "api_keys",
    multiple=True,
    envvar="NANOVLLM_API_KEY",
    help="key that clients must send; may be given several times, or in NANOVLLM_API_KEY",
)
def serve(name: str | None, served_model_name: tuple[str, ...], **values: Any) -> int:
    """Serve a model over an OpenAI-compatible API.

    MODEL is a checkpoint folder or a model on the hub, the same as --model. The server has /v1/completions,
    /v1/chat/completions, /v1/models and more. Ctrl-C and SIGTERM let running requests finish; a second Ctrl-C aborts
    them.

    Exit status 0: stopped by a signal. 1: the engine failed. 2: invalid options, and nothing was served.
    """
    server_options = {field.name: values.pop(field.name) for field in fields(ServerOptions)}
    compatibility_options = {field.name: values.pop(field.name) for field in fields(ServeCompatibilityOptions)}
    if name is not None:
        values["model"] = name
    with usage_errors(), sigterm_exits():
        from ..server.run import run_server

        ServeCompatibilityOptions(**compatibility_options)  # raises for an unsupported value
        args = EngineArgs(**with_checkpoint(values), served_model_name=list(served_model_name) or None)
        return run_server(values["model"], args, ServerOptions(**server_options))
