"""What the Dockerfile names is there: files, extras, the command and its flags, the address that it asks for health."""

import ast
import json
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def instructions() -> list[tuple[str, str]]:
    """(name, the rest) of each; a line that ends in a backslash goes on."""
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line.partition(" ") for line in text.splitlines() if line and not line.startswith("#")]
    return [(name, rest) for name, _, rest in lines]


def all_of(name: str) -> list[str]:
    return [rest.strip() for found, rest in instructions() if found == name]


def test_files_are_there_and_not_ignored():
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    sources = [source for rest in all_of("COPY") for source in rest.split()[:-1]]
    assert len(sources) >= 5
    for source in sources:
        assert (ROOT / source).exists() and f"!{source}" in ignored, source


def test_extras_and_the_command_are_the_projects():
    [extras] = re.findall(r'"\.\[(.*)\]"', " ".join(all_of("RUN")))
    assert "serve" in extras.split(",") and {*extras.split(",")} <= {*PROJECT["optional-dependencies"]}
    [entry] = map(json.loads, all_of("ENTRYPOINT"))
    assert entry == ["nanovllm", "serve"] and entry[0] in PROJECT["scripts"]


def test_flags_are_known_and_the_model_is_copied():
    from ...cli.serve import serve

    [(model, *flags)] = map(json.loads, all_of("CMD"))
    assert any(model in rest.split() for rest in all_of("COPY"))
    known = serve.make_context("serve", [model, *flags], resilient_parsing=True).params
    assert (known["name"], known["host"], known["port"]) == (model, "0.0.0.0", int(all_of("EXPOSE")[0]))


def test_it_is_slim_and_nobody_is_root():
    [base], [user] = all_of("FROM"), all_of("USER")
    assert base.endswith("-slim") and f" {user}" in " ".join(all_of("RUN")) and user != "root"
    names = [name for name, _ in instructions()]
    assert names.index("USER") < names.index("ENTRYPOINT")
    assert names.index("USER") > max(i for i, name in enumerate(names) if name in ("RUN", "COPY"))


def test_health_is_asked_at_an_address_of_the_server():
    from ...server.app import api_routes

    [check] = all_of("HEALTHCHECK")
    command = json.loads(check.partition("CMD ")[2])
    assert command[:2] == ["python", "-c"] and ast.parse(command[2])
    port, path = re.search(r"127\.0\.0\.1:(\d+)(/\w+)", command[2]).groups()
    assert port == all_of("EXPOSE")[0] and path in {route.path for route in api_routes()}
