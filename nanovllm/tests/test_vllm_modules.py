"""Modules under vLLM's names: a script's imports work with `nanovllm` for `vllm`, and errors are one sentence."""

import socket
from importlib import import_module

import pytest
import torch

import nanovllm

from ..distributed import cleanup_dist_env_and_memory
from ..options import config
from ..options.config import default_device
from ..options.engine_args import EngineArgs
from ..vllm_names import FlexibleArgumentParser, current_platform, get_open_port, print_embeddings

NAMES = {  # of each module: names that vLLM's examples import from it
    "sampling_params": ["SamplingParams", "RequestOutputKind", "StructuredOutputsParams", "BeamSearchParams"],
    "outputs": ["RequestOutput", "CompletionOutput", "EmbeddingRequestOutput", "EmbeddingOutput"],
    "inputs": ["TextPrompt", "TokensPrompt", "PromptType"],
    "pooling_params": ["PoolingParams"],
    "engine.arg_utils": ["EngineArgs", "AsyncEngineArgs"],
    "engine.llm_engine": ["LLMEngine"],
    "engine.async_llm_engine": ["AsyncLLMEngine"],
    "v1.engine.async_llm": ["AsyncLLM"],
    "v1.metrics.reader": ["Counter", "Gauge", "Histogram", "Metric", "Vector"],
}
HELPERS = {
    "config": ["ProfilerConfig"],
    "distributed": ["cleanup_dist_env_and_memory"],
    "platforms": ["Platform", "current_platform"],
    "utils": ["FlexibleArgumentParser"],
    "utils.argparse_utils": ["FlexibleArgumentParser"],
    "utils.network_utils": ["get_open_port"],
    "utils.print_utils": ["print_embeddings"],
}
PACKAGES = ["v1", "v1.engine", "v1.metrics"]
FILES = ("distributed",)  # of the engine, with Python's own sentences
MADE = [name for name in [*NAMES, *HELPERS] if name not in FILES]


def module(name: str):
    return import_module(f"{nanovllm.__name__}.{name}")


@pytest.mark.parametrize("name", NAMES)
def test_module_has_the_classes_of_the_engine(name):
    for each in NAMES[name]:
        assert getattr(module(name), each) is getattr(nanovllm, each)


@pytest.mark.parametrize("name", MADE)
def test_module_exports_what_it_lists(name):
    assert {*(NAMES | HELPERS)[name]} <= {*module(name).__all__}
    assert all(hasattr(module(name), each) for each in module(name).__all__)


@pytest.mark.parametrize("name", [None, *NAMES, *HELPERS, *PACKAGES])
def test_missing_name_is_one_sentence(name):
    path = f"{nanovllm.__name__}.{name}" if name else nanovllm.__name__
    sentence = f"module '{path}' has no attribute 'LoRARequest'"
    rest = "" if name in FILES else ": nanovllm implements only a part of vLLM"
    with pytest.raises(AttributeError, match=f"^{sentence}{rest}$"):
        _ = import_module(path).LoRARequest
    with pytest.raises(ImportError, match=f"^cannot import name 'LoRARequest' from '{path}' "):
        exec(f"from {path} import LoRARequest")
    assert not hasattr(import_module(path), "LoRARequest")


def test_missing_module_is_one_sentence():
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'nanovllm\.lora'$"):
        import_module("nanovllm.lora.request")


def test_parser_takes_dashes_and_underscores():
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    parser.add_argument("--max-tokens", type=int)
    group = parser.add_argument_group("more")
    group.add_argument("--chat-template-path")
    words = ["--max_model_len", "1k", "--max-num_seqs=4", "--max_tokens", "8", "--chat_template_path", "a_b"]
    read = parser.parse_args([*words, "--hf_overrides", '{"rope_theta": 5.0}'])
    assert (read.max_tokens, read.chat_template_path) == (8, "a_b")
    args = EngineArgs.from_cli_args(read)
    assert (args.max_model_len, args.max_num_seqs, args.hf_overrides) == ("1k", 4, {"rope_theta": 5.0})


@pytest.mark.parametrize("text", ["[1]", "{", "rope_theta"])
def test_option_that_is_an_object_must_be_json(text, capsys):
    with pytest.raises(SystemExit):
        EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(["--hf-overrides", text])
    assert f"argument --hf-overrides: invalid json_object value: '{text}'" in capsys.readouterr().err


@pytest.mark.parametrize(("has_gpu", "hip"), [(False, None), (True, None), (True, "6.4")])
def test_platform_is_the_default_device(has_gpu, hip, monkeypatch):
    monkeypatch.setattr(config, "default_device", default_device)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert current_platform.device_type == ("cuda" if has_gpu else "cpu")
    kinds = [current_platform.is_cpu(), current_platform.is_cuda(), current_platform.is_rocm()]
    assert kinds == [not has_gpu, has_gpu and not hip, has_gpu and bool(hip)]
    assert current_platform.is_cuda_alike() == has_gpu


def test_cleanup_frees_what_only_a_cycle_holds():
    deleted = []

    class Engine:
        def __del__(self) -> None:
            deleted.append(self.name)

    engine = Engine()
    engine.name, engine.itself = "engine", engine
    del engine
    cleanup_dist_env_and_memory()
    assert deleted == ["engine"]


def test_open_port_is_one_that_could_be_bound(monkeypatch):
    bound = []

    class Recorded(socket.socket):
        def bind(self, address):
            super().bind(address)
            bound.append(self.getsockname()[1])

    monkeypatch.setattr(socket, "socket", Recorded)
    port = get_open_port()
    assert [port] == bound and port > 0


@pytest.mark.parametrize(
    ("numbers", "line"),
    [
        ([0.5, 1.0], "[0.5, 1.0] (size=2)\n"),
        ([0.5] * 5, "[0.5, 0.5, 0.5, 0.5, ...] (size=5)\n"),
    ],
)
def test_embeddings_are_printed_in_one_line(numbers, line, capsys):
    print_embeddings(numbers)
    assert capsys.readouterr().out == f"Embeddings: {line}"
