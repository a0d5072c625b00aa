"""Old names of the modules in testing/, for branches that have not moved yet. TODO: remove."""

import importlib
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED = {
    "helpers": "checkpoints engines processes trace watch",
    "engine.helpers": "checkpoints sequences reference",
    "engine.scripted": "engines",
    "engine.pool": "pools",
    "engine.tiers": "tiers",
    "engine.watch": "watch",
    "engine.reference": "reference",
    "plain_reference": "reference",
    "tiny_tokenizers": "tokenizers",
    "scripted_model": "scripted_model",
    "server.served": "served processes",
    "server.inside": "inside",
    "server.raw": "raw_http",
    "server.assistants": "assistants",
    "fake_hub": "fake_hub",
    "twin": "trace",
    "limited": "limited",
    "distributed.ranks": "ranks",
    "bench.fake_peer": "fake_peer",
    "cluster.processes": "processes",
}


class Moved(MetaPathFinder, Loader):
    """A finder of modules by their old names."""

    def find_spec(self, name: str, path: object, target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name.removeprefix(f"{__name__}.") in MOVED else None

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        for new in reversed(MOVED[module.__name__.removeprefix(f"{__name__}.")].split()):
            vars(module).update(
                {k: v for k, v in vars(importlib.import_module(f"{__name__}.testing.{new}")).items() if k[0] != "_"}
            )


sys.meta_path.append(Moved())
