"""The Dockerfile: its files, extras, command and options exist, and its health check works."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def instructions() -> list[tuple[str, str]]:
    """Return the name and the rest of each instruction."""
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line.partition(" ") for line in text.splitlines() if line and not line.startswith("#")]
    return [(name, rest) for name, _, rest in lines]


def all_of(name: str) -> list[str]:
    return [rest.strip() for each, rest in instructions() if each == name]


def test_copied_files_exist_and_are_not_ignored():
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    sources = [source for rest in all_of("COPY") for source in rest.split()[:-1]]
    assert len(sources) >= 5
    for source in sources:
        assert (ROOT / source).exists() and f"!{source}" in ignored, source


def test_extras_and_command_are_the_projects():
    [extras] = re.findall(r'"\.\[(.*)\]"', " ".join(all_of("RUN")))
    assert "serve" in extras.split(",") and {*extras.split(",")} <= {*project()["optional-dependencies"]}
    [entry] = map(json.loads, all_of("ENTRYPOINT"))
    assert entry[:2] == ["nanovllm", "serve"] and entry[0] in project()["scripts"]


def test_torch_is_the_pinned_cpu_build():
    torch, package = (command for command in all_of("RUN") if command.startswith("pip install"))
    assert all("-c constraints.txt" in command for command in (torch, package))
    assert torch.endswith(" torch") and '--index-url "$TORCH_INDEX"' in torch
    assert f"TORCH_INDEX={setting('.ci/setup_env.py', 'CPU_INDEX')}" in all_of("ARG")
    assert "torch==" in (ROOT / "constraints.txt").read_text()


def setting(path: str, name: str) -> str:
    return re.findall(rf'^{name} = "(.*)"$', (ROOT / path).read_text(), re.MULTILINE)[0]


def test_options_are_known_and_the_model_is_copied():
    from ...cli.serve import serve

    [entry], [arguments] = map(json.loads, all_of("ENTRYPOINT")), map(json.loads, all_of("CMD"))
    assert any(arguments[0] in rest.split() for rest in all_of("COPY"))
    known = serve.make_context("serve", [*entry[2:], *arguments], resilient_parsing=True).params
    assert (known["name"], known["host"], known["port"]) == (arguments[0], "0.0.0.0", int(all_of("EXPOSE")[0]))
    assert known["chat_template"] == "plain" and known["shutdown_timeout"] < 10, "docker stop kills after 10 seconds"


def test_image_is_slim_and_its_user_is_not_root():
    [base], [user] = all_of("FROM"), all_of("USER")
    assert base.endswith("-slim") and f" {user}" in " ".join(all_of("RUN")) and user != "root"
    names = [name for name, _ in instructions()]
    assert names.index("USER") < names.index("ENTRYPOINT")
    assert names.index("USER") > max(i for i, name in enumerate(names) if name in ("RUN", "COPY"))


def test_health_check_queries_the_server(served):
    [check] = all_of("HEALTHCHECK")
    python, *command = json.loads(check.partition("CMD ")[2])
    port = all_of("EXPOSE")[0]
    assert python == "python" and command[1].count(port) == 1

    def status_at(other_port: str) -> int:
        changed = [each.replace(port, other_port) for each in command]
        return subprocess.run([sys.executable, *changed], capture_output=True).returncode

    assert status_at(served.url.rpartition(":")[2]) == 0 and status_at("1") == 1
