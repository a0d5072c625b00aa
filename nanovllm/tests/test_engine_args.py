"""EngineArgs: what values of vLLM's options become in the engine's config, and what is told of wrong ones."""

import warnings
from argparse import ArgumentParser

import pytest
import torch

from .. import LLM, AsyncEngineArgs, AsyncLLM, EngineArgs, EngineConfig, LLMEngine
from ..engine.config import default_device

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
def test_a_dtype_in_all_its_forms(dtype, name, checkpoint):
    assert config(checkpoint, dtype=dtype).dtype == name


@pytest.mark.parametrize("dtype", ["int8", "fp16", torch.int8, 16])
def test_a_dtype_that_cannot_be(dtype, checkpoint):
    with pytest.raises(ValueError, match="dtype must be one of auto, float32, bfloat16, float16, not "):
        config(checkpoint, dtype=dtype)


@pytest.mark.parametrize(
    ("length", "number"), [(48, 48), ("48", 48), ("0.06k", 60), (-1, None), ("auto", None), (None, None), ("1K", 1024)]
)
def test_a_length_as_people_write_it(length, number, checkpoint):
    assert config(checkpoint, max_model_len=length).max_model_len == number


@pytest.mark.parametrize("length", ["1.5K", "k", "", "-5", "4 k", "1kk"])
def test_a_length_that_cannot_be(length, checkpoint):
    with pytest.raises(ValueError, match="is no whole number, such as 4096, 4k"):
        config(checkpoint, max_model_len=length)


def test_none_is_the_engines_own_default(checkpoint):
    unset = dict.fromkeys(("block_size", "max_num_seqs", "max_num_batched_tokens", "enable_prefix_caching", "seed"))
    assert config(checkpoint, **unset) == EngineConfig(model=str(checkpoint), device=config(checkpoint).device)


def test_the_same_names_reach_the_engine(checkpoint):
    given = {"max_num_seqs": 3, "max_num_batched_tokens": 20, "block_size": 4, "seed": 5, "watermark": 0.2}
    given |= {"enable_prefix_caching": False, "offload_policy": "load", "tile_size": 8, "kv_cache_tokens": 40}
    made = vars(config(checkpoint, **given))
    assert {name: made[name] for name in given} == given
    assert config(checkpoint, num_gpu_blocks_override=5, block_size=4).kv_cache_tokens == 20
    assert config(checkpoint, kv_cache_memory_bytes="1M").kv_cache_memory_bytes == 2**20


def test_a_share_of_a_gpu_that_is_not_here_is_taken_with_a_warning(checkpoint):
    with pytest.warns(UserWarning, match="gpu_memory_utilization is for cuda: on cpu kv_cache_memory_bytes"):
        assert config(checkpoint, gpu_memory_utilization=0.8, device="cpu").gpu_memory_utilization is None
    with pytest.raises(ValueError, match="gpu_memory_utilization must be above 0 and at most 1, not 8"):
        config(checkpoint, gpu_memory_utilization=8, device="cpu")


def test_another_size_wins_over_a_share_of_the_gpu_as_in_vllm(checkpoint):
    with warnings.catch_warnings(action="error"):
        made = config(checkpoint, gpu_memory_utilization=0.8, kv_cache_memory_bytes=2**20)
    assert (made.gpu_memory_utilization, made.kv_cache_memory_bytes) == (None, 2**20)


@pytest.mark.parametrize("other", ["kv_cache_memory_bytes", "num_gpu_blocks_override"])
def test_a_size_that_is_given_twice(other, checkpoint):
    with pytest.raises(ValueError, match=f"the pool's size was given 2 times: .*{other}"):
        config(checkpoint, **{"kv_cache_tokens": 4096, other: 4096})


def test_the_hosts_pool_in_gib(checkpoint):
    """2 layers, 2 KV heads of 8, a key and a value, 4 bytes each: 256 bytes a token."""
    assert config(checkpoint, kv_offloading_size=2**-10, dtype="float32").kv_offloading_tokens == 2**20 // 256
    assert config(checkpoint, kv_offloading_size=2**-10, dtype="half").kv_offloading_tokens == 2**20 // 128
    assert config(checkpoint, kv_offloading_size=0).kv_offloading_tokens == 0
    for size in (-1, float("nan"), "much", True):
        with pytest.raises(ValueError, match="kv_offloading_size must be a number of GiB, 0 or above, not "):
            config(checkpoint, kv_offloading_size=size)
    with pytest.raises(ValueError, match="the host's pool was given 2 times"):
        config(checkpoint, kv_offloading_size=1, kv_offloading_tokens=64)
    with pytest.raises(ValueError, match="vLLM has kv_offloading_backend 'lmcache', nanovllm has not"):
        config(checkpoint, kv_offloading_backend="lmcache")


def test_what_vllm_has_given_up_is_taken_with_one_warning(checkpoint):
    with pytest.warns(UserWarning) as caught:
        LLM(checkpoint, swap_space=4, offload_policy="load")
    assert [str(each.message) for each in caught] == ["swap_space is gone from vLLM, and means nothing here"]
    assert caught[0].filename == __file__


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("tensor_paralel_size", ": did you mean 'tensor_parallel_size'?"),
        ("kv_cache_token", ": did you mean 'kv_cache_tokens'?"),
        ("xyzzy", ""),
    ],
)
def test_an_unknown_name_gets_the_nearest(name, told, checkpoint):
    for error in (TypeError, ValueError):
        with pytest.raises(error) as caught:
            LLM(checkpoint, **{name: 1})
        assert str(caught.value) == f"there is no option {name!r}{told}"


def test_an_option_that_was_set_later_is_looked_at_too(checkpoint):
    args = EngineArgs(str(checkpoint))
    args.tensor_parallel_size = 2
    with pytest.raises(ValueError, match="vLLM has tensor_parallel_size, nanovllm has not: it runs on one device"):
        args.engine_config()


def test_what_nanovllm_has_in_its_place_is_named():
    with pytest.raises(ValueError, match=r"nanovllm has not: SamplingParams\.stream_interval says it of each request"):
        EngineArgs(stream_interval=4).check()


def test_flags_of_a_command(checkpoint):
    parser = AsyncEngineArgs.add_cli_args(ArgumentParser())
    flags = ["--model", str(checkpoint), "--max-model-len", "0.05k", "--max-num-seqs", "2"]
    flags += ["--no-enable-prefix-caching"]
    flags += ["--enforce-eager", "--kv-cache-memory-bytes", "1M", "--dtype", "half", "--watermark", "0.1"]
    flags += ["--tensor-parallel-size", "1", "--kv-offloading-size", "0", "--seed", "3", "--quantization", "awq"]
    parsed = parser.parse_args(flags)
    with pytest.raises(ValueError, match="vLLM has quantization, nanovllm has not"):
        AsyncEngineArgs.from_cli_args(parsed)
    parsed.quantization = None
    args = AsyncEngineArgs.from_cli_args(parsed)
    assert args.enforce_eager is True
    assert args.engine_config() == EngineConfig(
        model=str(checkpoint), max_model_len=50, max_num_seqs=2, enable_prefix_caching=False, dtype="float16",
        kv_cache_memory_bytes=2**20, watermark=0.1, kv_offloading_tokens=0, seed=3, enforce_eager=True,
        device=args.engine_config().device,
    )  # fmt: skip


def test_flags_left_out_are_the_defaults():
    assert EngineArgs.from_cli_args(EngineArgs.add_cli_args(ArgumentParser()).parse_args([])) == EngineArgs()


@pytest.mark.parametrize(("has_gpu", "device"), [(True, "cuda"), (False, "cpu")])
def test_the_device_is_the_gpu_where_there_is_one(has_gpu, device, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    assert REAL_DEFAULT_DEVICE() == device


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ({"tokenizer": 5}, "tokenizer must be a folder or a name of the hub, not 5"),
        ({"generation_config": None}, "generation_config must be auto, vllm or a folder, not None"),
        ({"override_generation_config": 5}, "override_generation_config must be a dictionary, not 5"),
        ({"served_model_name": []}, "served_model_name must be a text, or a list of texts, at least one, not []"),
        ({"num_gpu_blocks_override": "a"}, "num_gpu_blocks_override must be a whole number, at least 1, not 'a'"),
        ({"skip_tokenizer_init": 1}, "skip_tokenizer_init must be True or False, not 1"),
        ({"load_format": "pt"}, "load_format must be one of auto, safetensors, dummy, not 'pt'"),
        ({"load_format": None}, "load_format must be one of auto, safetensors, dummy, not None"),
        ({"revision": 5}, "revision must be a text, not 5"),
        ({"hf_token": 5}, "hf_token must be a text, True or False, not 5"),
        ({"max_num_seq": 5}, "there is no option 'max_num_seq': did you mean 'max_num_seqs'?"),
    ],
    ids=str,
)
def test_an_option_of_the_wrong_type(option, told, checkpoint):
    for make in (EngineArgs, AsyncEngineArgs, LLM):
        with pytest.raises(ValueError) as caught:
            make(model=checkpoint, **option)
        assert told in str(caught.value)


def test_a_device_as_torch_has_it(checkpoint):
    assert config(checkpoint, device=torch.device("cpu")).device == "cpu"


@pytest.mark.parametrize("make", [*(kind.from_engine_args for kind in (LLM, LLMEngine, AsyncLLM)), AsyncLLM])
def test_what_is_no_engine_args(make, checkpoint):
    with pytest.raises(ValueError, match="engine_args must be EngineArgs, not EngineConfig"):
        make(EngineConfig(str(checkpoint)))
