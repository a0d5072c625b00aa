"""nanovllm serve: an OpenAI server."""

from typing import Any

import click

from .common import located, one_line_errors
from .flags import engine_flags, server_flags, split
from .interrupts import sigterm_ends_at_once


@click.command(params=server_flags() + engine_flags())
@click.argument("name", required=False, metavar="[MODEL]")
@click.option("--served-model-name", multiple=True, help="what clients call the model; may be given several times")
@click.option(
    "--api-key",
    "api_keys",
    multiple=True,
    envvar="NANOVLLM_API_KEY",
    help="a key that clients must show; may be given several times, or in NANOVLLM_API_KEY",
)
def serve(name: str | None, served_model_name: tuple[str, ...], **values: Any) -> int:
    """Serve a model to clients of OpenAI's API.

    MODEL is a checkpoint folder, or a name of the hub, as --model is. There are /v1/completions, /v1/chat/completions,
    /v1/models and more. Ctrl-C and SIGTERM let running requests end; a second Ctrl-C cuts them.

    Exit status 0: it was told to stop. 1: its engine has ended. 2: nothing was served.
    """
    engine, server = split(values)
    if name is not None:
        engine["model"] = name
    with one_line_errors(), sigterm_ends_at_once():
        try:
            from ..server.run import run_server
        except ImportError as error:
            raise ValueError(f"{error.name} is not installed: pip install nanovllm[serve]") from None
        from ..engine.config import EngineArgs
        from ..server.options import ServerOptions

        args = EngineArgs(**located(engine), served_model_name=list(served_model_name) or None)
        return run_server(engine["model"], args, ServerOptions(**server))
