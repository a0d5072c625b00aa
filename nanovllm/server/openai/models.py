"""/v1/models: the one model, under each of its names."""

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response


async def list_models(request: Request) -> Response:
    state = request.app.state.server
    return JSONResponse({"object": "list", "data": [model_object(request, name) for name in state.model.names]})


async def retrieve_model(request: Request) -> Response:
    name = request.path_params["model"]
    request.app.state.server.model.check_name(name)
    return JSONResponse(model_object(request, name))


def model_object(request: Request, name: str) -> dict[str, Any]:
    state = request.app.state.server
    return {
        "id": name,
        "object": "model",
        "created": int(state.start_time),
        "owned_by": "nanovllm",
        "root": name,
        "parent": None,
        "max_model_len": state.model.max_model_len,
    }
