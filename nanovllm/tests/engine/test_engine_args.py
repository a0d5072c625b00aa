"""EngineArgs: vLLM's options in all their forms, the config that they become, and errors for invalid ones."""

from argparse import ArgumentParser
from pathlib import Path

import pytest
import torch

from ... import LLM, AsyncEngineArgs, EngineArgs, EngineConfig
from ...checkpoints import hub
from ...options.config import default_device

REAL_DEFAULT_DEVICE = default_device  # the tests' own is the CPU


def config(checkpoint, **options) -> EngineConfig:
    return EngineArgs(model=checkpoint, **options).engine_config()


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        *((name, name) for name in ("auto", "float16", "bfloat16", "float32")),
        *(("half", "float16"), ("float", "float32")),
        *((torch.float16, "float16"), (torch.half, "float16")),
        *((torch.bfloat16, "bfloat16"), (torch.float32, "float32")),
    ],
    ids=str,
)
def test_forms_of_a_dtype(dtype, name, checkpoint):
    assert config(checkpoint, dtype=dtype).dtype == name


@pytest.mark.parametrize("dtype", ["int8", "fp16", torch.int8, 16])
def test_unsupported_dtype(dtype, checkpoint):
    with pytest.raises(ValueError, match="dtype must be one of auto, float32, bfloat16, float16, got "):
        config(checkpoint, dtype=dtype)


@pytest.mark.parametrize(
    ("length", "number"), [(48, 48), ("48", 48), ("0.06k", 60), (-1, None), ("auto", None), (None, None), ("1K", 1024)]
)
def test_forms_of_max_model_len(length, number, checkpoint):
    assert config(checkpoint, max_model_len=length).max_model_len == number


@pytest.mark.parametrize("length", ["1.5K", "k", "", "-5", "4 k", "1kk"])
def test_invalid_max_model_len(length, checkpoint):
    with pytest.raises(ValueError, match="is not a size such as 4096, 4k"):
        config(checkpoint, max_model_len=length)


def test_none_means_the_engines_default(checkpoint):
    unset = dict.fromkeys(("block_size", "max_num_seqs", "max_num_batched_tokens", "enable_prefix_caching", "seed"))
    assert config(checkpoint, **unset) == EngineConfig(model=str(checkpoint), device=config(checkpoint).device)


def test_options_reach_the_engine(checkpoint):
    given = {"max_num_seqs": 3, "max_num_batched_tokens": 20, "block_size": 4, "seed": 5, "watermark": 0.2}
    given |= {"enable_prefix_caching": False, "offload_policy": "load", "tile_size": 8, "kv_cache_tokens": 40}
    made = vars(config(checkpoint, **given))
    assert {name: made[name] for name in given} == given
    assert config(checkpoint, num_gpu_blocks_override=5, block_size=4).kv_cache_tokens == 20
    assert config(checkpoint, kv_cache_memory_bytes="1M").kv_cache_memory_bytes == 2**20
    assert config(checkpoint, kv_cache_memory_bytes="2GiB").kv_cache_memory_bytes == 2**31
    sizes = {"max_num_batched_tokens": "1k", "kv_cache_tokens": "1K", "kv_offloading_tokens": "2M"}
    made = vars(config(checkpoint, **sizes))
    assert [made[name] for name in sizes] == [1000, 1024, 2**21]


def test_share_of_a_missing_gpu_is_a_warning(checkpoint, caplog):
    assert config(checkpoint, gpu_memory_utilization=0.8, device="cpu").gpu_memory_utilization is None
    assert "gpu_memory_utilization has no effect on cpu" in caplog.text
    with pytest.raises(ValueError, match="gpu_memory_utilization must be above 0 and at most 1, got 8"):
        config(checkpoint, gpu_memory_utilization=8, device="cpu")


def test_other_sizes_have_precedence_over_a_share_of_the_gpu(checkpoint, caplog):
    made = config(checkpoint, gpu_memory_utilization=0.8, kv_cache_memory_bytes=2**20)
    assert not caplog.records
    assert (made.gpu_memory_utilization, made.kv_cache_memory_bytes) == (None, 2**20)


@pytest.mark.parametrize("other", ["kv_cache_memory_bytes", "num_gpu_blocks_override"])
def test_size_given_twice(other, checkpoint):
    with pytest.raises(ValueError, match=f"set the size of the KV cache only once, got .*{other}"):
        config(checkpoint, **{"kv_cache_tokens": 4096, other: 4096})


def test_size_of_the_hosts_pool_in_gib(checkpoint):
    """2 layers, 2 KV heads of 8, a key and a value, 4 bytes each: 256 bytes per token."""
    assert config(checkpoint, kv_offloading_size=2**-10, dtype="float32").kv_offloading_tokens == 2**20 // 256
    assert config(checkpoint, kv_offloading_size=2**-10, dtype="half").kv_offloading_tokens == 2**20 // 128
    assert config(checkpoint, kv_offloading_size=0).kv_offloading_tokens == 0
    for size in (-1, float("nan"), "much", True):
        with pytest.raises(ValueError, match="kv_offloading_size must be "):
            config(checkpoint, kv_offloading_size=size)
    with pytest.raises(ValueError, match="set the size of the host's KV cache only once"):
        config(checkpoint, kv_offloading_size=1, kv_offloading_tokens=64)
    with pytest.raises(ValueError, match="kv_offloading_backend must be 'native', got 'lmcache'"):
        config(checkpoint, kv_offloading_backend="lmcache")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("tensor_paralel_size", ": did you mean 'tensor_parallel_size'?"),
        ("kv_cache_token", ": did you mean 'kv_cache_tokens'?"),
        ("max_num_seq", ": did you mean 'max_num_seqs'?"),
        ("xyzzy", ""),
    ],
)
def test_unknown_option_is_a_type_error_with_the_nearest_name(name, hint, checkpoint):
    for make in (EngineArgs, AsyncEngineArgs, LLM):
        with pytest.raises(TypeError) as caught:
            make(model=checkpoint, **{name: 1})
        assert str(caught.value) == f"unknown option {name!r}{hint}"


def test_options_set_later_are_checked_too(checkpoint):
    args = EngineArgs(str(checkpoint))
    args.tensor_parallel_size = 0
    with pytest.raises(ValueError, match="tensor_parallel_size must be at least 1, got 0"):
        args.engine_config()


def test_options_of_a_script(checkpoint):
    parser = AsyncEngineArgs.add_cli_args(ArgumentParser())
    flags = ["--model", str(checkpoint), "--max-model-len", "0.05k", "--max-num-seqs", "2"]
    flags += ["--no-enable-prefix-caching"]
    flags += ["--enforce-eager", "--kv-cache-memory-bytes", "1M", "--dtype", "half", "--watermark", "0.1"]
    flags += [
        "--tensor-parallel-size",
        "1",
        "--swap-space",
        "4",
        "--kv-offloading-size",
        "0",
        "--seed",
        "3",
        "--quantization",
        "awq",
    ]
    parsed = parser.parse_args(flags)
    with pytest.raises(ValueError, match="quantization must be one of int8, int4, got 'awq'"):
        AsyncEngineArgs.from_cli_args(parsed)
    parsed.quantization = None
    args = AsyncEngineArgs.from_cli_args(parsed)
    assert args.enforce_eager is True
    assert args.engine_config() == EngineConfig(
        model=str(checkpoint), max_model_len=50, max_num_seqs=2, enable_prefix_caching=False, dtype="float16",
        kv_cache_memory_bytes=2**20, watermark=0.1, kv_offloading_tokens=0, seed=3, enforce_eager=True,
        device=args.engine_config().device,
    )  # fmt: skip


def test_defaults_of_a_script():
    assert EngineArgs.from_cli_args(EngineArgs.add_cli_args(ArgumentParser()).parse_args([])) == EngineArgs()


@pytest.mark.parametrize(
    ("device", "defaults"), [("cpu", (32, 512)), ("cuda", (256, 8192)), ("cuda:1", (256, 8192)), ("mps", (32, 512))]
)
def test_a_step_is_larger_on_cuda_by_default(checkpoint, device, defaults):
    made = EngineArgs(model=str(checkpoint), device=device).engine_config()
    assert (made.max_num_seqs, made.max_num_batched_tokens) == defaults
    made = EngineArgs(model=str(checkpoint), device=device, max_num_seqs=3, max_num_batched_tokens=7).engine_config()
    assert (made.max_num_seqs, made.max_num_batched_tokens) == (3, 7)


@pytest.mark.parametrize(("has_gpu", "device"), [(True, "cuda"), (False, "cpu")])
def test_default_device_is_the_gpu_if_there_is_one(has_gpu, device, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    assert REAL_DEFAULT_DEVICE() == device


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"tokenizer": 5}, "tokenizer must be a string, got 5"),
        ({"generation_config": 5}, "generation_config must be a string, got 5"),
        ({"override_generation_config": 5}, "override_generation_config must be "),
        ({"served_model_name": 5}, "served_model_name must be a string, got 5"),
        ({"num_gpu_blocks_override": "a"}, "num_gpu_blocks_override must be an integer, got 'a'"),
        ({"num_gpu_blocks_override": 0}, "num_gpu_blocks_override must be at least 1, got 0"),
        ({"skip_tokenizer_init": 1}, "skip_tokenizer_init must be True or False, got 1"),
        ({"load_format": "pt"}, "load_format must be one of auto, safetensors, dummy, got 'pt'"),
        ({"revision": 5}, "revision must be a string, got 5"),
        ({"hf_token": 5}, "hf_token must be "),
        ({"attention_backend": "numba", "enforce_eager": True}, "enforce_eager"),
    ],
    ids=str,
)
def test_invalid_value_is_named(options, error, checkpoint):
    for make in (EngineArgs, AsyncEngineArgs, LLM):
        with pytest.raises(ValueError) as caught:
            make(model=checkpoint, **options)
        assert error in str(caught.value)


def test_only_dummy_weights_need_no_files(tmp_path):
    assert EngineArgs(model=tmp_path, load_format="dummy").engine_config().model == str(tmp_path)
    for load_format in ("auto", "safetensors"):
        with pytest.raises(ValueError, match="not a checkpoint folder: it is empty"):
            EngineArgs(model=tmp_path, load_format=load_format).engine_config()


@pytest.mark.parametrize("folder", ["/cache/fox", "zoo/fox"])
def test_metrics_show_the_name_of_a_model_on_the_hub(folder, monkeypatch):
    monkeypatch.setattr(hub, "find_checkpoint", lambda *args, **options: Path(folder))
    for name, shown in ((None, "org/fox"), ("rabbit", "rabbit"), (["rabbit", "hare"], "rabbit"), ([], "org/fox")):
        made = config("org/fox", served_model_name=name)
        assert (made.model, made.served_model_name) == (folder, shown)


def test_torch_device(checkpoint):
    assert config(checkpoint, device=torch.device("cpu")).device == "cpu"
