"""Models from a folder or from the Hugging Face Hub: downloads, incomplete copies and errors of one line.

The Hub here is a fake server on loopback, so no test leaves this machine.
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
from ..checkpoints.hub import DEFAULT_MODEL, find_checkpoint, find_tokenizer
from .testing.checkpoints import write_checkpoint
from .testing.engines import OPTIONS, UNMEASURED
from .testing.fake_hub import COMMIT, NAME, TOKEN, FakeHub, fake_hub


def full(value: object) -> object:
    return pytest.param(value, marks=pytest.mark.full)


SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
ErrorOf = Callable[..., str]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint in two shards, with the other files that repositories have."""
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
        (folder / name).write_bytes(b"unused")
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
        use_hub(monkeypatch, server.url)
        yield server


def use_hub(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """Send requests to another hub. HF_ENDPOINT would be too late: huggingface_hub is already imported."""
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")


@pytest.fixture
def error_of() -> ErrorOf:
    """Return a function that returns the error for a model and a revision, which is a single line."""

    def error(model: str = NAME, revision: str | None = None) -> str:
        with pytest.raises(ValueError) as raised:
            find_checkpoint(model, revision)
        assert "\n" not in str(raised.value)
        return str(raised.value)

    return error


def go_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


# Downloads


def test_downloads_only_needed_files_and_the_weights_last(hub, checkpoint):
    folder = find_checkpoint(NAME)
    others = {"config.json", "tokenizer.model", "model.safetensors.index.json"}
    assert folder.name == COMMIT and {*hub.sent[:3]} == others and {*hub.sent[3:]} == {*SHARDS}
    assert {path.name for path in folder.iterdir()} == others | {*SHARDS}
    assert all((folder / name).read_bytes() == (checkpoint / name).read_bytes() for name in [*others, *SHARDS])


def test_downloads_once(hub):
    first = find_checkpoint(NAME)
    hub.requests.clear()
    assert find_checkpoint(NAME) == first and hub.sent == []


def test_revision_is_a_branch_a_tag_or_a_commit(hub, error_of):
    assert find_checkpoint(NAME, "v1") == find_checkpoint(NAME, COMMIT) == find_checkpoint(NAME, "main")
    assert error_of(NAME, "v2") == f"{NAME} on the Hub has no revision 'v2': use a branch, a tag or a full commit hash"


@pytest.mark.parametrize("load_format", ["auto", "safetensors"])
def test_llm_takes_a_name(hub, checkpoint, load_format):
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    by_name = LLM(NAME, load_format=load_format, offload_policy="load").generate("the fox", params)
    by_folder = LLM(checkpoint, offload_policy="load").generate("the fox", params)
    assert by_name[0].outputs[0].token_ids == by_folder[0].outputs[0].token_ids and hub.sent


def test_command_takes_a_name(hub, capsys):
    assert main(["generate", "the fox", "--model", NAME, "--max-tokens", "3", *UNMEASURED]) == 0
    assert "the fox" in capsys.readouterr().out and hub.sent


def test_token_and_cache_are_options(hub, tmp_path):
    hub.private = True
    folder = find_checkpoint(NAME, cache_dir=tmp_path / "elsewhere", token=TOKEN)
    assert folder.is_relative_to(tmp_path / "elsewhere") and (folder / SHARDS[0]).is_file()


def test_engine_config_has_the_token_and_the_cache(hub, tmp_path):
    hub.private = True
    config = EngineConfig(NAME, download_dir=str(tmp_path / "elsewhere"), hf_token=TOKEN, offload_policy="recompute")
    assert Path(LLMEngine(config).config.model).is_relative_to(tmp_path / "elsewhere")


def test_find_tokenizer_downloads_no_weights(hub, tmp_path):
    assert {path.name for path in find_tokenizer(NAME).iterdir()} == {*hub.sent}
    assert {*hub.sent} == {"config.json", "tokenizer.model", "model.safetensors.index.json"}
    assert find_tokenizer(tmp_path) == tmp_path


def test_uses_the_token_of_the_environment(hub, error_of, monkeypatch):
    hub.private = True
    assert error_of() == (
        f"the folder {Path(NAME).absolute()} does not exist, and the Hub has no model {NAME}; if it is private, set "
        "HF_TOKEN to your token"
    )
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert find_checkpoint(NAME).name == COMMIT and f"Bearer {TOKEN}" in hub.tokens


def test_unsupported_architecture_is_rejected_before_downloading_its_weights(hub, error_of):
    config = hub.folder / "config.json"
    config.write_text(config.read_text().replace("LlamaForCausalLM", "GemmaForCausalLM"))
    assert "unsupported model ['GemmaForCausalLM']" in error_of()
    assert not {*hub.sent} & {*SHARDS}


@pytest.mark.parametrize("shard", ["../outside.safetensors", "/tmp/outside.safetensors"])
def test_index_that_leads_out_of_the_folder_downloads_no_weights(hub, error_of, shard):
    (hub.folder / "model.safetensors.index.json").write_text(f'{{"weight_map": {{"a": "{shard}"}}}}')
    assert error_of().endswith(f"weight_map.a must be a file in the folder, got '{shard}'")
    assert not any(name.endswith(".safetensors") for name in hub.sent)


def test_hf_overrides_apply_before_the_architecture_is_checked(hub):
    config = hub.folder / "config.json"
    config.write_text(config.read_text().replace("LlamaForCausalLM", "GemmaForCausalLM"))
    overrides = {"architectures": ["LlamaForCausalLM"]}
    find_checkpoint(NAME, hf_overrides=overrides)
    assert {*SHARDS} <= {*hub.sent}
    assert LLM(NAME, hf_overrides=overrides, **OPTIONS).model_config.num_hidden_layers == 2


# Folders


def test_folder_wins_over_a_name_on_the_hub(hub, checkpoint):
    shutil.copytree(checkpoint, Path(NAME))
    assert find_checkpoint(NAME) == Path(NAME) and hub.requests == []


@pytest.mark.parametrize("model", ["nowhere", "./no/where", "/no/where", "no/where/else", "a b/c", "../x", "a\0/b"])
def test_invalid_name_never_touches_the_network(hub, error_of, model):
    folder = Path(model).absolute()
    assert (
        error_of(model)
        == f"the folder {folder} does not exist, and {model!r} is not a name on the Hub, which looks like ORG/NAME"
    )
    assert hub.requests == []


def test_default_model_is_not_a_name_on_the_hub(hub, error_of):
    assert EngineConfig.model == DEFAULT_MODEL
    missing = f"the folder {Path(DEFAULT_MODEL).absolute()} does not exist"
    assert (
        error_of(DEFAULT_MODEL)
        == f"{missing}: name a checkpoint with --model or LLM(model=...); smollm2 is a small one"
    )
    assert hub.requests == []


# Incomplete copies


def test_cached_copy_works_offline(hub, monkeypatch):
    folder = find_checkpoint(NAME)
    hub.requests.clear()
    go_offline(monkeypatch)
    assert find_checkpoint(NAME) == folder and hub.requests == []


def test_cached_copy_works_if_the_hub_is_unreachable(hub, error_of, monkeypatch):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # without listen(), so a connection is refused
        silent = f"http://127.0.0.1:{closed.getsockname()[1]}"
        use_hub(monkeypatch, silent)
        no_copy = f"{constants.HF_HUB_CACHE} has no complete copy of {NAME}"
        assert re.search(rf"{no_copy}, and {silent} cannot be reached \(\w+: .+\): try again$", error_of())
        use_hub(monkeypatch, hub.url)
        folder = find_checkpoint(NAME)
        use_hub(monkeypatch, silent)
        assert find_checkpoint(NAME) == folder


@pytest.mark.parametrize(
    "missing", [SHARDS[0], "tokenizer.model", *map(full, (SHARDS[1], "config.json", "model.safetensors.index.json"))]
)
def test_missing_file_is_an_error_offline_and_is_downloaded_online(hub, error_of, monkeypatch, missing):
    folder = find_checkpoint(NAME)
    (folder / missing).resolve().unlink()
    (folder / missing).unlink()
    go_offline(monkeypatch)
    assert re.search(rf"{constants.HF_HUB_CACHE} has no complete copy of {NAME}: unset HF_HUB_OFFLINE", error_of())
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    hub.requests.clear()
    assert (find_checkpoint(NAME) / missing).is_file() and hub.sent == [missing]


@pytest.mark.full
def test_download_continues_after_a_kill(hub, error_of, monkeypatch, tmp_path):
    hub.stalls_at = (SHARDS[0], 1000)
    package = Path(__file__).resolve().parents[1]
    code = f"from {package.name}.checkpoints.hub import find_checkpoint; find_checkpoint({NAME!r})"
    where = {"HF_ENDPOINT": hub.url, "HF_HUB_CACHE": str(tmp_path / "cache"), "PYTHONPATH": str(package.parent)}
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"} | where
    process = subprocess.Popen([sys.executable, "-c", code], env=environment, stderr=subprocess.PIPE)
    while SHARDS[0] not in hub.sent:
        assert process.poll() is None, process.stderr.read()
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    hub.goes_on.set()
    hub.stalls_at = None
    go_offline(monkeypatch)
    assert f"has no complete copy of {NAME}" in error_of()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    hub.requests.clear()
    assert {path.name for path in find_checkpoint(NAME).glob("*.safetensors")} == {*SHARDS}
    assert SHARDS[0] in hub.sent and {*hub.sent} <= {*SHARDS}, "files in the cache must not be downloaded again"


# Errors of the Hub


@pytest.mark.parametrize(
    ("files", "error"),
    [
        ([], f"{NAME} on the Hub is not a checkpoint folder: it is empty"),
        (["pytorch_model.bin"], f"and no safetensors: download it with `hf download {NAME} --local-dir FOLDER`"),
        (["tiny-q4.gguf"], f"{NAME} on the Hub has tiny-q4.gguf, llama.cpp's GGUF format: name the file"),
        (
            ["adapter_config.json", "adapter_model.safetensors"],
            "has adapter_config.json, an adapter and not a full model",
        ),
        (["model.safetensors.index.json"], f"{NAME} on the Hub has no {SHARDS[0]}, although its model.safetensors"),
    ],
)
def test_error_names_the_format_of_a_repository_without_safetensors(hub, error_of, files, error):
    for path in hub.folder.iterdir():
        if path.is_file() and path.name not in files:
            path.unlink()
    for name in files:
        (hub.folder / name).touch()
    shutil.rmtree(hub.folder / "original")
    assert error in error_of()


def test_error_says_where_to_accept_the_terms_of_a_gated_model(hub, error_of):
    hub.gated = True
    assert error_of() == f"{NAME} is gated: accept its terms at {hub.url}/{NAME} and set HF_TOKEN to your token"


@pytest.mark.parametrize("status", [401, 403, 500, 503])
def test_any_status_is_an_error_of_one_line(hub, error_of, status):
    hub.status = status
    assert ("HF_TOKEN" if status < 500 else f"cannot be reached (status {status}): try again") in error_of()


def test_error_for_an_unknown_name_covers_folders_and_the_hub(hub, error_of):
    assert error_of("some/thing") == (
        f"the folder {Path('some/thing').absolute()} does not exist, and the Hub has no model some/thing; "
        "if it is private, set HF_TOKEN to your token"
    )


def test_full_disk_is_an_error_of_one_line(hub, error_of, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", full)
    assert error_of().startswith(f"{NAME} cannot be downloaded from {hub.url} (OSError: [Errno 28] No space left on")
