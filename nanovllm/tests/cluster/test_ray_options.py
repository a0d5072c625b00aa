"""The options of replicas on Ray Serve, without Ray: modules of the same names stand in for it."""

import asyncio
import importlib
import sys
from collections.abc import Iterator
from dataclasses import asdict
from types import ModuleType, SimpleNamespace

import pytest

from ...server.options import ServerOptions
from ..testing.inside import inside

RAY = {
    "ray": (),
    "ray.exceptions": ("RayError",),
    "ray.serve": (),
    "ray.serve.exceptions": ("RayServeException",),
    "ray.serve.request_router": ("PendingRequest", "ReplicaID", "RequestRouter", "RunningReplica"),
}
MODULE = "nanovllm.cluster.ray_serve"


@pytest.fixture
def ray_serve(monkeypatch) -> Iterator[ModuleType]:
    """Return a fresh import of the module. An application is what bind() gets."""
    for name, classes in RAY.items():
        module = ModuleType(name)
        vars(module).update({each: type(each, (Exception,), {}) for each in classes})
        monkeypatch.setitem(sys.modules, name, module)
    serve = sys.modules["ray"].serve = sys.modules["ray.serve"]
    serve.deployment = lambda *_, **__: SimpleNamespace(bind=lambda *arguments: arguments)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    yield importlib.import_module(MODULE)
    sys.modules.pop(MODULE)


@pytest.mark.parametrize("server, status", [({}, 200), ({"host": "127.0.0.1"}, 403)], ids=["default", "loopback"])
def test_replica_takes_the_host_name_that_the_proxy_passes_on(ray_serve, checkpoint, server, status):
    """Serve decides where it listens. A replica refuses foreign names only if its own options say so."""
    arguments = ray_serve.Arguments(model=str(checkpoint), server={"port": 0, **server})
    (_, options), _ = ray_serve.app(arguments)
    assert isinstance(options, ServerOptions)

    async def status_of_a_foreign_name() -> int:
        async with inside(checkpoint, **asdict(options)) as replica:
            return (await replica.client.get("/v1/models", headers={"Host": "gpu-box:8000"})).status_code

    assert asyncio.run(status_of_a_foreign_name()) == status
