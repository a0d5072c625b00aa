"""A model is a folder or a name of the hub: what is fetched, what is never taken for whole, what is told in one line.

The hub is one on loopback. Nothing here leaves this machine.
"""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

from .. import LLM, EngineConfig, LLMEngine, SamplingParams
from ..__main__ import main
from ..checkpoints import hub as checkpoints
from ..checkpoints.hub import find_checkpoint, find_tokenizer
from .fake_hub import COMMIT, NAME, TOKEN, FakeHub, fake_hub
from .helpers import UNMEASURED, write_checkpoint


def full(value: object) -> object:
    return pytest.param(value, marks=pytest.mark.full)


SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
Told = Callable[..., str]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in two shards, and what else a repository has."""
    folder = write_checkpoint(tmp_path_factory.mktemp("repository"))
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    halves = [{name: tensor for name, tensor in tensors.items() if ("mlp" in name) == half} for half in (False, True)]
    for shard, half in zip(SHARDS, halves, strict=True):
        save_file(half, folder / shard)
    names = {f'"{name}": "{shard}"' for shard, half in zip(SHARDS, halves, strict=True) for name in half}
    (folder / "model.safetensors.index.json").write_text(f'{{"weight_map": {{{", ".join(names)}}}}}')
    (folder / "original").mkdir()
    for name in ("pytorch_model.bin", "tiny-q4.gguf", "README.md", "original/config.json", "consolidated.safetensors"):
        (folder / name).write_bytes(b"not read")
    return folder


@pytest.fixture
def hub(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    shutil.copytree(checkpoint, tmp_path / "repository")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    with fake_hub(tmp_path / "repository") as server:
        ask(monkeypatch, server.url)
        yield server


def ask(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """This hub from now on: HF_ENDPOINT is read when huggingface_hub is imported."""
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")


@pytest.fixture
def told() -> Told:
    """told(model, revision): the one line of the error."""

    def line(model: str = NAME, revision: str | None = None) -> str:
        with pytest.raises(ValueError) as raised:
            find_checkpoint(model, revision)
        assert "\n" not in str(raised.value)
        return str(raised.value)

    return line


def go_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


# What is fetched


def test_only_what_is_read_is_fetched_and_the_weights_last(hub, checkpoint):
    folder = find_checkpoint(NAME)
    others = {"config.json", "tokenizer.model", "model.safetensors.index.json"}
    assert folder.name == COMMIT and {*hub.sent[:3]} == others and {*hub.sent[3:]} == {*SHARDS}
    assert {path.name for path in folder.iterdir()} == others | {*SHARDS}
    assert all((folder / name).read_bytes() == (checkpoint / name).read_bytes() for name in [*others, *SHARDS])


def test_it_is_fetched_once(hub):
    first = find_checkpoint(NAME)
    hub.requests.clear()
    assert find_checkpoint(NAME) == first and hub.sent == []


def test_a_revision_is_a_branch_a_tag_or_a_commit(hub, told):
    assert find_checkpoint(NAME, "v1") == find_checkpoint(NAME, COMMIT) == find_checkpoint(NAME, "main")
    assert told(NAME, "v2") == f"{NAME} on the hub has no revision 'v2': name a branch, a tag or a whole commit"


def test_an_engine_runs_by_name(hub, checkpoint):
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    by_name = LLM(NAME, offload_policy="load").generate("the fox", params)
    by_folder = LLM(checkpoint, offload_policy="load").generate("the fox", params)
    assert by_name[0].outputs[0].token_ids == by_folder[0].outputs[0].token_ids and hub.sent


def test_the_command_runs_by_name(hub, capsys):
    assert main(["generate", "the fox", "--model", NAME, "--max-tokens", "3", *UNMEASURED]) == 0
    assert "the fox" in capsys.readouterr().out and hub.sent


def test_a_token_and_a_cache_may_be_given(hub, tmp_path):
    hub.private = True
    folder = find_checkpoint(NAME, cache_dir=tmp_path / "elsewhere", token=TOKEN)
    assert folder.is_relative_to(tmp_path / "elsewhere") and (folder / SHARDS[0]).is_file()


def test_an_engine_of_a_config_takes_its_token_and_cache(hub, tmp_path):
    hub.private = True
    config = EngineConfig(NAME, download_dir=str(tmp_path / "elsewhere"), hf_token=TOKEN, offload_policy="recompute")
    assert Path(LLMEngine(config).config.model).is_relative_to(tmp_path / "elsewhere")


def test_of_a_tokenizer_no_weights_are_fetched(hub, tmp_path):
    assert {path.name for path in find_tokenizer(NAME).iterdir()} == {*hub.sent}
    assert {*hub.sent} == {"config.json", "tokenizer.model", "model.safetensors.index.json"}
    assert find_tokenizer(tmp_path) == tmp_path


def test_the_token_of_the_environment_is_shown_to_the_hub(hub, told, monkeypatch):
    hub.private = True
    assert told() == (
        f"there is no folder {Path(NAME).absolute()}, and the hub has no model {NAME}, or it is private: then set "
        "HF_TOKEN to your token"
    )
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert find_checkpoint(NAME).name == COMMIT and f"Bearer {TOKEN}" in hub.tokens


def test_another_architecture_is_refused_before_its_weights_are_fetched(hub, told):
    config = hub.folder / "config.json"
    config.write_text(config.read_text().replace("LlamaForCausalLM", "GemmaForCausalLM"))
    assert "the folder has ['GemmaForCausalLM']" in told()
    assert not {*hub.sent} & {*SHARDS}


# A folder


def test_a_folder_wins_over_a_name_of_the_hub(hub, checkpoint):
    shutil.copytree(checkpoint, Path(NAME))
    assert find_checkpoint(NAME) == Path(NAME) and hub.requests == []


@pytest.mark.parametrize("model", ["nowhere", "./no/where", "/no/where", "no/where/else", "a b/c", "../x", "a\0/b"])
def test_a_name_that_is_neither_touches_no_network(hub, told, model):
    folder = Path(model).absolute()
    assert told(model) == f"there is no folder {folder}, and {model!r} is no name of the hub, which is ORG/NAME"
    assert hub.requests == []


def test_the_default_is_no_name_of_the_hub(hub, told):
    assert EngineConfig.model == checkpoints.SHIPPED
    assert (
        told(EngineConfig.model)
        == f"there is no folder {Path(checkpoints.SHIPPED).absolute()}: name a checkpoint, LLM(model=...) or --model"
    )
    assert hub.requests == []


# Never taken for whole


def test_offline_what_is_cached_is_used(hub, monkeypatch):
    folder = find_checkpoint(NAME)
    hub.requests.clear()
    go_offline(monkeypatch)
    assert find_checkpoint(NAME) == folder and hub.requests == []


def test_where_no_hub_answers_what_is_cached_is_used(hub, told, monkeypatch):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # it does not listen: a connection is refused
        silent = f"http://127.0.0.1:{closed.getsockname()[1]}"
        ask(monkeypatch, silent)
        no_copy = f"{constants.HF_HUB_CACHE} has no whole copy of the hub's {NAME}"
        assert re.search(rf"{no_copy}, and {silent} cannot be reached \(\w+: .+\): try again$", told())
        ask(monkeypatch, hub.url)
        folder = find_checkpoint(NAME)
        ask(monkeypatch, silent)
        assert find_checkpoint(NAME) == folder


@pytest.mark.parametrize(
    "missing", [SHARDS[0], "tokenizer.model", *map(full, (SHARDS[1], "config.json", "model.safetensors.index.json"))]
)
def test_a_copy_without_one_file_is_not_whole_offline_and_is_completed_online(hub, told, monkeypatch, missing):
    folder = find_checkpoint(NAME)
    (folder / missing).resolve().unlink()
    (folder / missing).unlink()
    go_offline(monkeypatch)
    assert re.search(rf"{constants.HF_HUB_CACHE} has no whole copy of the hub's {NAME}: unset HF_HUB_OFFLINE", told())
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    hub.requests.clear()
    assert (find_checkpoint(NAME) / missing).is_file() and hub.sent == [missing]


@pytest.mark.parametrize("left", [-1, full(0), full(5), full(100)])
def test_a_cut_file_is_not_whole_offline_and_is_fetched_again_online(hub, told, monkeypatch, checkpoint, left):
    folder = find_checkpoint(NAME)
    content = (folder / SHARDS[1]).read_bytes()
    (folder / SHARDS[1]).write_bytes(content[:left])
    go_offline(monkeypatch)
    assert f"has no whole copy of the hub's {NAME}" in told()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    hub.requests.clear()
    assert (find_checkpoint(NAME) / SHARDS[1]).read_bytes() == content and hub.sent == [SHARDS[1]]


@pytest.mark.full
def test_killed_in_the_middle_it_is_not_whole_and_the_next_call_goes_on(hub, told, monkeypatch, tmp_path):
    hub.stalls_at = (SHARDS[0], 1000)
    package = Path(__file__).resolve().parents[1]
    code = f"from {package.name}.checkpoints.hub import find_checkpoint; find_checkpoint({NAME!r})"
    where = {"HF_ENDPOINT": hub.url, "HF_HUB_CACHE": str(tmp_path / "cache"), "PYTHONPATH": str(package.parent)}
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"} | where
    process = subprocess.Popen([sys.executable, "-c", code], env=environment, stderr=subprocess.PIPE)
    while SHARDS[0] not in hub.sent:
        assert process.poll() is None, process.stderr.read()
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=30)
    hub.goes_on.set()
    hub.stalls_at = None
    go_offline(monkeypatch)
    assert f"has no whole copy of the hub's {NAME}" in told()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    hub.requests.clear()
    assert {path.name for path in find_checkpoint(NAME).glob("*.safetensors")} == {*SHARDS}
    assert SHARDS[0] in hub.sent and {*hub.sent} <= {*SHARDS}, "what was there was fetched again"


# What the hub says


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ([], f"{NAME} on the hub is not a checkpoint folder: it is empty"),
        (["pytorch_model.bin"], f"and no safetensors: hf download {NAME} --local-dir FOLDER fetches that, and"),
        (["tiny-q4.gguf"], f"{NAME} on the hub has tiny-q4.gguf, GGUF, llama.cpp's format: take the same model's"),
        (
            ["adapter_config.json", "adapter_model.safetensors"],
            "has adapter_config.json, an adapter, not a whole model",
        ),
        (["model.safetensors.index.json"], f"{NAME} on the hub has no {SHARDS[0]}, which its model.safetensors.index"),
    ],
)
def test_a_repository_without_safetensors_is_told_by_what_it_has(hub, told, files, says):
    for path in hub.folder.iterdir():
        if path.is_file() and path.name not in files:
            path.unlink()
    for name in files:
        (hub.folder / name).touch()
    shutil.rmtree(hub.folder / "original")
    assert says in told()


def test_a_gated_model_is_told_where_to_accept_its_terms(hub, told):
    hub.gated = True
    assert told() == f"{NAME} is gated: accept its terms on {hub.url}/{NAME}, and set HF_TOKEN to your token"


@pytest.mark.parametrize("status", [401, 403, 500, 503])
def test_whatever_the_hub_answers_is_one_line(hub, told, status):
    hub.status = status
    assert ("HF_TOKEN" if status < 500 else f"cannot be reached (status {status}): try again") in told()


def test_a_repository_that_is_not_there_is_told_with_both_readings(hub, told):
    assert told("some/thing") == (
        f"there is no folder {Path('some/thing').absolute()}, and the hub has no model some/thing, or it is private: "
        "then set HF_TOKEN to your token"
    )


def test_a_disk_without_room_is_one_line(hub, told, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", full)
    assert told().startswith(f"{NAME} could not be fetched from {hub.url} (OSError: [Errno 28] No space left on")
