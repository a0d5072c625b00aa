"""Keys and values in int8: kernels against plain operations with the same integers, engines, and quality."""

import random

import pytest
import torch

pytest.importorskip("numba")

from ... import LLM, SamplingParams
from ...backends.torch.attention import PagedAttention
from ...backends.torch.backend import TorchBackend
from ...checkpoints.weights import load_model
from ...engine.kv_cache import KVCache
from ...llama import LlamaForCausalLM, ModelConfig
from ..testing.checkpoints import write_checkpoint
from ..testing.engines import OPTIONS
from .test_quantized import HELD_OUT, STORYTELLER, quality
from .test_runner import CPU, LONGEST, Driver, random_steps, sequence
from .test_step import is_idle, tokens

FULL = pytest.mark.full
# Of the largest logit. A key that is computed in another order may round to the next integer, 1/254 of its largest one.
TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 5e-2}
# Of the logits' standard deviation: keys and values in 8 bits against float32
LOGIT_ERROR, FP8_LOGIT_ERROR = 0.005, 0.02


def random_model(rng: random.Random, head_dim: int, group: int, dtype: torch.dtype) -> LlamaForCausalLM:
    kv_heads = rng.choice((1, 2))
    config = ModelConfig(
        vocab_size=50, hidden_size=64, intermediate_size=32, num_hidden_layers=2, num_attention_heads=kv_heads * group,
        num_key_value_heads=kv_heads, head_dim=head_dim, max_position_embeddings=LONGEST, qk_norm=rng.random() < 0.5,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval().requires_grad_(False).to(dtype)


@pytest.mark.parametrize(  # the kernels take half a minute to compile for a dtype
    ("workers", "dtype"),
    [
        pytest.param(1, torch.float32, marks=pytest.mark.nightly),
        pytest.param(2, torch.float32, marks=FULL),
        pytest.param(2, torch.bfloat16, marks=pytest.mark.nightly),
    ],
)
def test_any_mix_of_tokens_gives_the_plain_logits(workers, dtype, compiled, monkeypatch):
    compiled(dtype, is_kv_int8=True)
    rng = random.Random(workers)
    torch.manual_seed(workers)
    monkeypatch.setattr(torch, "get_num_threads", lambda: workers)
    sizes = zip((16, 48, 64, 128), rng.sample((1, 2, 3, 4, 7), 4), (4, 16, 12, 16), strict=True)
    for head_dim, group, block_size in sizes:
        model, num_seqs = random_model(rng, head_dim, group, dtype), rng.choice((1, 3))
        steps = random_steps(rng, num_seqs, 5)
        steps[:0] = [[min(700, LONGEST - sum(step[i] for step in steps)) for i in range(num_seqs)]]
        plain, fast = (Driver(model, block_size, dtype, num_seqs, is_int8=True) for _ in range(2))
        expected = plain.plain(model, steps)
        error = (fast.fast(model, steps) - expected).abs().max()
        assert error < TOLERANCE[dtype] * expected.abs().max(), (head_dim, group, block_size)
        written, theirs = fast.written(), plain.written()
        assert (written - theirs).abs().max() < 2 / 127 * theirs.abs().max()


@pytest.fixture
def int8_kernels(compiled, kernels_folder, monkeypatch):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(kernels_folder))
    compiled(torch.float32, is_kv_int8=True)


@pytest.mark.parametrize("backend", [pytest.param("numba", marks=FULL), "torch"])
def test_preempted_loaded_and_forked_sequences_generate_the_same_tokens(backend, tmp_path, request):
    if backend == "numba":
        request.getfixturevalue("int8_kernels")
    write_checkpoint(tmp_path, hidden_size=64)
    options = {"kv_cache_dtype": "int8", "block_size": 4, **OPTIONS}
    large = LLM(tmp_path, kv_cache_tokens=2048, attention_backend="torch", **options)
    pool = {"kv_cache_tokens": 96, "kv_offloading_tokens": 160, "max_num_batched_tokens": 16}
    small = LLM(tmp_path, attention_backend=backend, **pool, **options)
    engine, rng = small.llm_engine, random.Random(3)
    engine.kv_cache.blocks.fill_(255)  # NaN: unwritten slots must not be read
    shared = [rng.randrange(3, 320) for _ in range(21)]
    for _ in range(4):
        prompts = [shared[: rng.randint(0, 21)] + [rng.randrange(3, 320)] * rng.randint(1, 9) for _ in range(6)]
        params = [SamplingParams(max_tokens=12, n=n, seed=n, ignore_eos=True) for n in (1, 1, 2, 3, 1, 2)]
        result, expected = (tokens(llm.generate(prompts, params, use_tqdm=False)) for llm in (small, large))
        assert result == expected
        assert is_idle(small)
    copied, loaded = engine.kv_cache.num_blocks_copied, engine.host_tier.num_blocks_loaded
    assert engine.scheduler.num_preemptions > 0 and copied > 0 and loaded > 0
    assert engine.kernels.uses_kernels == (backend == "numba")


# Quality


@pytest.mark.parametrize(("stored", "limit"), [("int8", LOGIT_ERROR), ("fp8", FP8_LOGIT_ERROR)])
def test_logits_are_near_those_of_float32(stored, limit):
    model = load_model(STORYTELLER, ModelConfig.from_folder(STORYTELLER), torch.float32, CPU)
    ids = LLM(STORYTELLER, kv_cache_tokens=64, **OPTIONS).get_tokenizer().encode(HELD_OUT.read_text("utf-8"))[:384]
    logits = []
    for kv_cache_dtype in ("auto", stored):
        cache = KVCache(model.config, 24, 16, torch.float32, CPU, kv_cache_dtype)
        backend = TorchBackend(model, PagedAttention(cache, 64), 16, CPU)
        seq = sequence(len(ids), len(ids))
        seq.token_ids, seq.block_table = ids, list(range(24))
        with torch.inference_mode():
            logits.append(backend.compute_logits(backend.compute([(seq, len(ids))]).hidden))
    error = (logits[1] - logits[0]).square().mean().sqrt() / logits[0].std()
    print(f"the logits' error is {error:.2%} of their standard deviation")
    assert 0 < error < limit


@pytest.mark.nightly
def test_int8_predicts_held_out_text_nearly_as_well(with_kernels, int8_kernels):
    (loss, greedy), (its_loss, its_greedy) = quality(), quality(kv_cache_dtype="int8")
    share = sum(a != b for a, b in zip(greedy, its_greedy, strict=True)) / len(greedy)
    print(f"{its_loss - loss:+.4f} nats per token, {share:.2%} of greedy tokens changed")
    assert abs(its_loss - loss) <= 0.0005 and share <= 0.008
