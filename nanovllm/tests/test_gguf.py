"""GGUF files: the same tokens as transformers, exact weights, tokenizers, the folder in the cache, errors of one line.

All files are written here with the gguf package, the way llama.cpp's converter writes them.
"""

import json
import random
import re
import struct
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
import pytest
import torch
from sentencepiece import SentencePieceProcessor
from tokenizers import Tokenizer
from torch import Tensor

from .. import LLM, SamplingParams
from ..__main__ import main
from ..checkpoints import gguf as unpacking
from ..checkpoints import hub
from ..checkpoints.gguf import EXACT_TYPES, GgufTensors, read_header, unpack
from ..checkpoints.hub import find_checkpoint
from ..checkpoints.known import KNOWN
from ..checkpoints.model_config import default_sampling_params, read_model_config
from ..checkpoints.tokenizer import load_tokenizer
from ..checkpoints.weights import load_model
from ..llama.config import RopeScaling
from ..llama.model import rope_frequencies
from ..quantization import Format, MixedLinear, QuantizedLinear
from .gguf_types import BLOCK, PAGE, types_table
from .test_hub import use_hub
from .testing.checkpoints import CONFIG, random_tensors, train_tokenizer
from .testing.engines import OPTIONS
from .testing.fake_hub import COMMIT, NAME, fake_hub
from .testing.quantized import floats_of
from .testing.tokenizers import fuzzed_texts, sentencepiece_model, trained, write_sentencepiece

gguf = pytest.importorskip("gguf")
Type = gguf.GGMLQuantizationType
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
SHAPE = CONFIG | {"intermediate_size": 256}  # a row of down_proj is a block of the largest size
SHORT = {  # a tensor's name in files, without its layer
    **{"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"},
    **{f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"},
    **{"self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"},
    **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
    **{"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"},
}
BYTE_LEVEL = {"llama3": "llama-bpe", "qwen2": "qwen2", "qwen3": "qwen2", "tekken": "tekken", "gpt2": "smollm"}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep unpacked files in a folder of the test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def short_name(name: str) -> str:
    *layer, part, kind = re.fullmatch(r"(?:model\.layers\.(\d+)\.)?(.+)\.(\w+)", name).groups()
    return f"{f'blk.{layer[0]}.' if layer[0] else ''}{SHORT[part]}.{kind}"


def permuted(tensor: Tensor, heads: int) -> Tensor:
    """Return the rows of a head in llama.cpp's order: 0 and n/2, 1 and n/2 + 1, ..."""
    return tensor.view(heads, 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


def tensors_of(architecture: str) -> dict[str, Tensor]:
    """Return random tensors of a family, by their names in safetensors."""
    tensors, generator = random_tensors(SHAPE), torch.Generator().manual_seed(1)
    for i in range(SHAPE["num_hidden_layers"]):
        attention = f"model.layers.{i}.self_attn"
        if architecture == "qwen2":
            sizes = {part: len(tensors[f"{attention}.{part}_proj.weight"]) for part in "qkv"}
            tensors |= {f"{attention}.{p}_proj.bias": torch.randn(n, generator=generator) for p, n in sizes.items()}
        if architecture == "qwen3":
            tensors |= {f"{attention}.{p}_norm.weight": 1 + torch.rand(8, generator=generator) for p in "qk"}
    return tensors


def stored(name: str, tensor: Tensor, architecture: str) -> np.ndarray:
    heads = {"attn_q": SHAPE["num_attention_heads"], "attn_k": SHAPE["num_key_value_heads"]}
    part = short_name(name).split(".")[-2]
    return (permuted(tensor, heads[part]) if architecture == "llama" and part in heads else tensor).numpy()


def write_gguf(
    path: Path,
    architecture: str = "llama",
    tensors: dict[str, Tensor] | None = None,
    types: dict[str, Any] | None = None,
    raw: dict[str, tuple[np.ndarray, Any]] | None = None,
    add: Callable[[Any], object] = lambda writer: None,
) -> Path:
    """Write a model as GGUF. `types` and `raw`, by names in files, are types and stored bytes. `add` adds metadata."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(SHAPE["max_position_embeddings"])
    writer.add_embedding_length(SHAPE["hidden_size"])
    writer.add_feed_forward_length(SHAPE["intermediate_size"])
    writer.add_block_count(SHAPE["num_hidden_layers"])
    writer.add_head_count(SHAPE["num_attention_heads"])
    writer.add_head_count_kv(SHAPE["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_key_length(8)
    writer.add_vocab_size(SHAPE["vocab_size"])
    if architecture == "llama":
        writer.add_rope_dimension_count(8)
    writer.add_eos_token_id(2)
    add(writer)
    for name, tensor in (tensors or tensors_of(architecture)).items():
        if short_name(name) not in (raw or {}):
            type = (types or {}).get(short_name(name), Type.F32)
            writer.add_tensor(short_name(name), gguf.quantize(stored(name, tensor, architecture), type), raw_dtype=type)
    for name, (data, type) in (raw or {}).items():
        writer.add_tensor(name, data, raw_dtype=type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def error_of(path: Path | str) -> str:
    """Return the error for a model, which is a single line."""
    with pytest.raises(ValueError) as raised:
        LLM(path, **OPTIONS)
    assert "\n" not in str(raised.value)
    return str(raised.value)


# Tokens and weights


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_gives_the_same_tokens_as_transformers(tmp_path, architecture):
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    quantized = {f"blk.{i}.ffn_down.weight": Type.Q8_0 for i in range(SHAPE["num_hidden_layers"])}
    path = write_gguf(tmp_path / "tiny.gguf", architecture, types=quantized)
    entries = load_gguf_checkpoint(path)["config"] | {"head_dim": 8}
    oracle = AutoModelForCausalLM.from_config(AutoConfig.for_model(**entries)).eval().float()
    oracle.load_state_dict(load_gguf_checkpoint(path, return_tensors=True, model_to_load=oracle)["tensors"])
    prompts = [[1, 300, 17], [5, 6, 7, 8, 9, 250]]
    outputs = LLM(path, dtype="float32", **OPTIONS).generate(prompts, GREEDY)
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = prompt + output.outputs[0].token_ids
        with torch.no_grad():
            logits = oracle(torch.tensor([ids[:-1]])).logits[0, len(prompt) - 1 :]
        assert logits.argmax(-1).tolist() == output.outputs[0].token_ids
        best = logits.topk(2).values
        assert (best[:, 0] - best[:, 1]).min() > 1e-3 * logits.std(), "the two best tokens must be apart"


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_weights_are_those_of_the_safetensors(tmp_path, architecture):
    tensors = tensors_of(architecture)
    read = GgufTensors(unpack(write_gguf(tmp_path / "tiny.gguf", architecture, tensors)))
    assert {*read.keys()} == {*tensors}
    assert all(torch.equal(read.get_tensor(name), tensor) for name, tensor in tensors.items())
    query = tensors["model.layers.0.self_attn.q_proj.weight"]
    assert not torch.equal(permuted(query, 4), query), "the order of rows must matter"


PLACES_OF_SCALES: dict[Any, tuple[int, ...]] = {
    **dict.fromkeys((Type.Q4_K, Type.Q5_K), (0, 2)),
    **{Type.Q2_K: (80, 82), Type.Q3_K: (108,), Type.Q6_K: (208,)},
    **{Type.IQ4_NL: (0,), Type.IQ4_XS: (0,), Type.MXFP4: ()},
}


def random_blocks(type: Any, rows: int) -> np.ndarray:
    """Return rows of 256 numbers with random bytes, and scales that are ordinary numbers."""
    random, (numbers, num_bytes) = np.random.default_rng(0), gguf.GGML_QUANT_SIZES[type]
    blocks = random.integers(0, 256, (rows * 256 // numbers, num_bytes), np.uint8)
    for start in PLACES_OF_SCALES[type]:
        scales = random.uniform(0.005, 0.02, len(blocks)).astype(np.float16)
        blocks[:, start : start + 2] = scales[:, None].view(np.uint8)
    if type == Type.MXFP4:
        blocks[:, 0] = random.integers(118, 124, len(blocks))  # powers of two
    return blocks.reshape(rows, -1)


@pytest.mark.parametrize("name", ["F32", "F16", "BF16", *EXACT_TYPES])
def test_dequantized_weights_are_those_of_the_gguf_package(tmp_path, name):
    type, down = Type[name], "blk.1.ffn_down.weight"
    if type in PLACES_OF_SCALES:
        data = random_blocks(type, SHAPE["hidden_size"])
    else:
        data = gguf.quantize(tensors_of("llama")["model.layers.1.mlp.down_proj.weight"].numpy(), type)
    folder = unpack(write_gguf(tmp_path / "tiny.gguf", raw={down: (data, type)}))
    model = load_model(folder, read_model_config(folder), torch.float32, torch.device("cpu"))
    expected = torch.from_numpy(gguf.dequantize(data, type))
    down_proj = model.model.layers[1].mlp.down_proj
    assert isinstance(down_proj, QuantizedLinear) == (name in EXACT_TYPES), "integers stay integers"
    weight = down_proj.dequantize() if isinstance(down_proj, QuantizedLinear) else down_proj.weight
    assert torch.equal(weight, expected) and expected.isfinite().all()
    assert expected.std() > 0


def load(path: Path, **options: Any) -> Any:
    folder = unpack(path)
    return load_model(folder, read_model_config(folder), torch.float32, torch.device("cpu"), **options)


def test_recommended_sampling_belongs_to_the_name_and_not_to_the_file(tmp_path, monkeypatch):
    path = write_gguf(tmp_path / "tiny.gguf")
    monkeypatch.setitem(KNOWN, "tiny", KNOWN["smollm2"]._replace(sampling={"temperature": 0.25, "top_p": 0.5}))
    monkeypatch.setattr(hub, "find_known", lambda name, known: path)
    by_name, by_path = find_checkpoint("tiny"), find_checkpoint(path)
    assert default_sampling_params(by_name) == {"temperature": 0.25, "top_p": 0.5}
    assert default_sampling_params(by_path) == {} and find_checkpoint("tiny") == by_name != by_path
    assert read_model_config(by_name) == read_model_config(by_path)


def test_parts_of_a_layer_share_a_format_or_have_one_each(tmp_path, caplog):
    def gate_up(gate: str, up: str) -> Any:
        caplog.clear()
        types = {"blk.0.ffn_gate.weight": Type[gate], "blk.0.ffn_up.weight": Type[up]}
        path = write_gguf(tmp_path / f"{gate}{up}.gguf", types=types)
        layer, read = load(path).model.layers[0].mlp.gate_up_proj, GgufTensors(unpack(path))
        parts = layer.parts if isinstance(layer, MixedLinear) else [layer]
        names = [f"model.layers.0.mlp.{part}_proj.weight" for part in ("gate", "up")]
        weight = torch.cat([part.dequantize() for part in parts])
        assert torch.equal(weight, torch.cat([read.get_tensor(name) for name in names]))
        x = torch.randn(3, weight.shape[1])
        assert torch.equal(layer(x), torch.cat([part(x) for part in parts], 1)) and not caplog.records
        return [part.format for part in parts]

    assert gate_up("Q4_0", "Q4_0") == [Format.INT4]
    assert gate_up("Q5_0", "Q8_0") == [Format.INT8_GROUPS]
    assert gate_up("Q4_0", "Q8_0") == [Format.INT4, Format.INT8_GROUPS]


def test_queries_keys_and_values_may_have_three_formats(tmp_path, monkeypatch):
    monkeypatch.setitem(SHAPE, "num_key_value_heads", SHAPE["num_attention_heads"])  # so that each has 32 rows
    types = {
        f"blk.1.attn_{part}.weight": type for part, type in zip("qkv", (Type.Q4_0, Type.Q5_1, Type.Q8_0), strict=True)
    }
    path = write_gguf(tmp_path / "tiny.gguf", types=types)
    layer, read = load(path).model.layers[1].self_attn.qkv_proj, GgufTensors(unpack(path))
    assert [part.format for part in layer.parts] == [Format.INT4, Format.INT5, Format.INT8_GROUPS]
    for name, part in zip("qkv", layer.parts, strict=True):
        assert torch.equal(part.dequantize(), read.get_tensor(f"model.layers.1.self_attn.{name}_proj.weight"))


def test_the_docs_have_the_bits_of_each_type():
    assert BLOCK.findall(PAGE.read_text("utf-8")) == [types_table()], "python -m nanovllm.tests.gguf_types"


def test_types_without_a_format_are_widened_with_the_other_parts_of_their_layer(tmp_path, caplog, monkeypatch):
    monkeypatch.delitem(EXACT_TYPES, "Q5_1")
    types = {"blk.0.ffn_gate.weight": Type.Q4_0, "blk.0.ffn_up.weight": Type.Q5_1}
    layer = load(write_gguf(tmp_path / "tiny.gguf", types=types)).model.layers[0].mlp.gate_up_proj
    assert isinstance(layer, torch.nn.Linear)
    name = "model.layers.0.mlp.gate_proj.weight"
    wanted = f"integers that cannot be kept are widened to float32: {name} (2 tensors in total)"
    assert [record.getMessage() for record in caplog.records] == [wanted]


def test_integers_of_a_file_can_be_quantized_again(tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf", types={"blk.0.ffn_down.weight": Type.Q8_0})
    layer = load(path, quantization="int4").model.layers[0].mlp.down_proj
    assert layer.format == Format.INT4
    expected = GgufTensors(unpack(path)).get_tensor("model.layers.0.mlp.down_proj.weight")
    assert (layer.dequantize() - expected).abs().max() < 0.1 * expected.abs().max()


def test_tied_head_in_integers_serves_as_embedding(tmp_path):
    tensors = tensors_of("llama")
    del tensors["lm_head.weight"]
    path = write_gguf(tmp_path / "tiny.gguf", tensors=tensors, types={"token_embd.weight": Type.Q4_0})
    model, weight = load(path), GgufTensors(unpack(path)).get_tensor("model.embed_tokens.weight")
    assert torch.equal(model.model.embed_tokens(torch.tensor([3, 0, 319])), weight[[3, 0, 319]])
    plain = LLM(path, dtype="float32", attention_backend="torch", **OPTIONS).generate([[1, 300]], GREEDY)
    assert LLM(path, dtype="float32", **OPTIONS).generate([[1, 300]], GREEDY)[0].error is plain[0].error is None


def test_large_tensor_is_dequantized_in_parts(tmp_path, monkeypatch):
    path = write_gguf(tmp_path / "tiny.gguf", types={"output.weight": Type.Q4_0})
    whole = GgufTensors(unpack(path)).get_tensor("lm_head.weight")
    [integers] = GgufTensors(unpack(path)).integers("lm_head.weight")
    monkeypatch.setattr(unpacking, "ROWS_AT_A_TIME", 7)
    monkeypatch.setattr("nanovllm.quantization.NUMBERS_AT_A_TIME", 32 * whole.shape[1])
    parts = [*GgufTensors(unpack(path)).integers("lm_head.weight")]
    assert len(parts) == 10 and torch.equal(torch.cat([*map(floats_of, parts)]), floats_of(integers))
    assert torch.equal(GgufTensors(unpack(path)).get_tensor("lm_head.weight"), whole) and whole.std() > 0


def test_dtype_is_the_files_unless_its_tensors_are_quantized(tmp_path):
    for name, dtype in [("F32", "float32"), ("F16", "float16"), ("BF16", "bfloat16"), ("Q8_0", "bfloat16")]:
        types = {short_name(each): Type[name] for each, tensor in tensors_of("llama").items() if tensor.ndim == 2}
        assert read_model_config(unpack(write_gguf(tmp_path / f"{name}.gguf", types=types))).dtype == dtype


def test_file_without_a_head_has_tied_embeddings(tmp_path):
    tensors = tensors_of("llama")
    del tensors["lm_head.weight"]
    path = write_gguf(tmp_path / "tiny.gguf", tensors=tensors)
    assert read_model_config(unpack(path)).tie_word_embeddings
    assert LLM(path, **OPTIONS).generate([[1, 300]], GREEDY)[0].error is None


def test_rope_scaling_comes_from_the_metadata_or_the_factors(tmp_path):
    def linear(writer: Any) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(4.0)

    assert read_model_config(unpack(write_gguf(tmp_path / "a.gguf", add=linear))).rope_scaling == RopeScaling(4.0)
    scaling = RopeScaling(32.0, original_max_position_embeddings=8192)
    factors = (rope_frequencies(8, 10000.0, None) / rope_frequencies(8, 10000.0, scaling)).numpy()
    path = write_gguf(tmp_path / "b.gguf", raw={"rope_freqs.weight": (factors, Type.F32)})
    if factors.max() == 32.0:
        assert read_model_config(unpack(path)).rope_scaling == scaling
    path = write_gguf(tmp_path / "c.gguf", raw={"rope_freqs.weight": (factors[::-1].copy(), Type.F32)})
    assert error_of(path) == f"{path}: tensor rope_freqs.weight must be Llama 3's scaling of frequencies"


# Tokenizers


def add_byte_level(state: dict[str, Any], pre: str, bos: str | None) -> Callable[[Any], None]:
    """Return a function that adds the tokenizer of a tokenizer.json to a file."""
    added = {token["id"]: token for token in state["added_tokens"]}
    texts = sorted(state["model"]["vocab"], key=state["model"]["vocab"].__getitem__)
    texts += [token["content"] for i, token in sorted(added.items()) if i >= len(texts)]
    types = [1 if i not in added else 3 if added[i]["special"] else 4 for i in range(len(texts))]

    def add(writer: Any) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(texts)
        writer.add_token_types(types)
        writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in state["model"]["merges"]])
        writer.add_add_bos_token(bos is not None)
        if bos:
            writer.add_bos_token_id(texts.index(bos))
        writer.add_pad_token_id(texts.index("<|endoftext|>") if "<|endoftext|>" in texts else 0)

    return add


@pytest.mark.parametrize("form", BYTE_LEVEL)
def test_byte_level_tokenizers_match_tokenizer_json(tmp_path, form):
    text, _, _ = trained(form)
    state = json.loads(text)
    for token in state["added_tokens"]:  # a GGUF file has no flags of added tokens
        token |= dict.fromkeys(("lstrip", "rstrip", "single_word", "normalized"), False)
    state["model"]["ignore_merges"] = form in ("llama3", "tekken")  # as published
    bos = {"llama3": "<|begin_of_text|>", "tekken": "<s>"}.get(form)
    architecture = form if form.startswith("qwen") else "llama"
    path = write_gguf(tmp_path / "tiny.gguf", architecture, add=add_byte_level(state, BYTE_LEVEL[form], bos))
    tokenizer, expected = load_tokenizer(unpack(path)), Tokenizer.from_str(json.dumps(state))
    for text in fuzzed_texts(150):
        ids = expected.encode(text).ids
        assert tokenizer.encode(text) == ids, text
        assert tokenizer.decode(ids, skip_special_tokens=False) == expected.decode(ids, skip_special_tokens=False)


def add_sentencepiece(model: bytes) -> Callable[[Any], None]:
    sp = SentencePieceProcessor(model_proto=model)
    ids = range(len(sp))
    user = {"<user>"}

    def add(writer: Any) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list([sp.id_to_piece(i) for i in ids])
        writer.add_token_scores([sp.get_score(i) for i in ids])
        types = [
            2 if sp.is_unknown(i) else 3 if sp.is_control(i) else 6 if sp.is_byte(i) else 1 + 3 * (piece in user)
            for i, piece in ((i, sp.id_to_piece(i)) for i in ids)
        ]
        writer.add_token_types(types)
        writer.add_bos_token_id(sp.bos_id())
        writer.add_unk_token_id(sp.unk_id())
        writer.add_chat_template("{% for message in messages %}{{ message.content }}{% endfor %}")

    return add


def test_sentencepiece_tokenizer_matches_tokenizer_model(tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf", add=add_sentencepiece(sentencepiece_model()))
    folder = write_sentencepiece(tmp_path / "folder", "llama")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["added_tokens_decoder"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer, expected = load_tokenizer(unpack(path)), load_tokenizer(folder)
    for text in fuzzed_texts(150):
        ids = expected.encode(text)
        assert tokenizer.encode(text) == ids, text
        assert tokenizer.decode(ids) == expected.decode(ids)
    assert tokenizer.bos_token == "<s>" and tokenizer.eos_token == "</s>" and tokenizer.chat_template


def test_bos_and_eos_are_added_where_the_file_says_so(tmp_path):
    def add(writer: Any) -> None:
        add_sentencepiece(sentencepiece_model())(writer)
        writer.add_add_bos_token(False)
        writer.add_add_eos_token(True)

    ids = load_tokenizer(unpack(write_gguf(tmp_path / "tiny.gguf", add=add))).encode("the fox")
    assert ids[0] != 1 and ids[-1] == 2


def with_pre(pre: str) -> Callable[[Any], None]:
    return add_byte_level(json.loads(trained("llama3")[0]), pre, None)


def with_model(model: str) -> Callable[[Any], None]:
    return lambda writer: writer.add_tokenizer_model(model)


@pytest.mark.parametrize(
    ("add", "error"),
    [
        (with_pre("viking"), "unknown pre-tokenizer 'viking'; supported: llama-bpe, "),
        (with_model("t5"), "tokenizer.ggml.model must be llama or gpt2, got 't5'"),
        (with_model("llama"), "its tokenizer is damaged: KeyError('tokenizer.ggml.tokens')"),
    ],
)
def test_unsupported_tokenizer_is_named(tmp_path, add, error):
    path = write_gguf(tmp_path / "tiny.gguf", add=add)
    assert error_of(path).startswith(f"{path}: {error}")


# Errors


def test_errors_of_files_that_are_not_gguf(tmp_path):
    path = tmp_path / "a.gguf"
    assert error_of(path) == f"the file {path} does not exist"
    assert error_of("models/none.gguf") == f"the file {Path('models/none.gguf').absolute()} does not exist"
    for content in (b"", b"GGU", b"PK\x03\x04 and more", b"GGUF" + struct.pack("<IQQ", 99, 0, 0)):
        path.write_bytes(content)
        assert error_of(path).startswith(f"{path} is not a complete GGUF file: ")


def test_file_that_is_cut_anywhere_is_an_error(tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf", add=add_sentencepiece(train_tokenizer()))
    content = path.read_bytes()
    for length in [*range(0, len(content) - 8, len(content) // 60), len(content) - 1]:
        path.write_bytes(content[:length])
        with pytest.raises(ValueError, match="is not a complete GGUF file: "):
            read_header(path)


@pytest.mark.parametrize(
    "values",
    [
        ("QQ", 2**62, 0),  # tensors
        ("QQ", 0, 2**62),  # values
        ("QQQ", 0, 1, 2**62),  # characters of a name
        ("QQQcIIQ", 0, 1, 1, b"a", 9, 0, 2**62),  # items of an array of bytes
        ("QQQcIIQ", 0, 1, 1, b"a", 9, 8, 2**62),  # of texts
        ("QQQcIIQ", 0, 1, 1, b"a", 9, 9, 2**62),  # of arrays
        ("QQQcI", 0, 1, 1, b"a", 77),  # no type
        ("QQQcI", 1, 0, 1, b"a", 2**31),  # dimensions
    ],
)
def test_absurd_count_is_an_error_at_once(tmp_path, values):
    path = tmp_path / "a.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<I", 3) + struct.pack("<" + values[0], *values[1:]))
    assert error_of(path).startswith(f"{path} is not a complete GGUF file: ")


def test_tensor_without_dimensions_is_named(tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf")
    name, content = b"output_norm.weight", bytearray(path.read_bytes())
    at = content.index(name) + len(name)
    content[at : at + 12] = struct.pack("<I", 0)  # and no size
    path.write_bytes(content)
    assert error_of(path) == f"{path}: tensor output_norm.weight of type F32 has the impossible shape []"


def header_fields(path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Return the offset and the size of each field of a header."""
    fields: list[tuple[int, int]] = []

    class Recorder(unpacking.HeaderReader):
        def take(self, size: int) -> bytes:
            fields.append((self.offset, size))
            return super().take(size)

    with monkeypatch.context() as patch:
        patch.setattr(unpacking, "HeaderReader", Recorder)
        read_header(path)
    return fields


EXTREMES = [0, 1, 2, 3, 8, 9, 13, 31, 33, 255, 2**16 - 1, 2**24, 2**31, 2**32 - 1, 2**53, 2**62, 2**63, 2**64 - 1]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numbers that are no longer numbers
@pytest.mark.parametrize("seed", range(2))
def test_damaged_header_loads_or_is_an_error_of_one_line(tmp_path, monkeypatch, seed):
    generator, loaded = random.Random(seed), 0
    add = add_sentencepiece(train_tokenizer()) if seed else lambda writer: None
    path = write_gguf(tmp_path / "tiny.gguf", types={"blk.0.ffn_down.weight": Type.Q8_0}, add=add)
    content, fields = path.read_bytes(), header_fields(path, monkeypatch)
    for start, size in generator.sample(fields, min(len(fields), 120)):
        if size <= 8:
            field = (generator.choice(EXTREMES) % 2 ** (8 * size)).to_bytes(size, "little")
        else:
            field = generator.choice([b"", bytes(size), generator.randbytes(size), content[start : start + size // 2]])
        path.write_bytes(content[:start] + field + content[start + size :])
        try:
            load(path)
            loaded += 1
        except ValueError as error:
            assert "\n" not in str(error) and str(tmp_path) in str(error)
    assert 0 < loaded < 120


def test_names_that_are_no_names_of_layers_are_unexpected_tensors(tmp_path):
    for i, name in enumerate(("", "weight", "blk.attn_q.weight", ".attn_q.")):
        path = write_gguf(tmp_path / f"{i}.gguf", raw={name: (np.zeros(4, "f4"), Type.F32)})
        assert f"unexpected tensor {name} (1 in total)" in error_of(path)


def test_arrays_inside_arrays_do_not_end_the_process(tmp_path):
    path = tmp_path / "a.gguf"
    nested = struct.pack("<IQ", 9, 1) * 100_000
    path.write_bytes(b"GGUF" + struct.pack("<IQQQcI", 3, 0, 1, 1, b"a", 9) + nested)
    assert error_of(path).startswith(f"{path} is not a complete GGUF file: ")


def test_unsupported_tensor_type_is_named_with_its_tensor(tmp_path):
    data = np.zeros((32, 256), np.float64)
    path = write_gguf(tmp_path / "tiny.gguf", raw={"blk.0.ffn_down.weight": (data, Type.F64)})
    assert error_of(path) == f"{path}: tensor blk.0.ffn_down.weight has the unsupported type F64"
    path = write_gguf(tmp_path / "later.gguf")
    name = b"output_norm.weight"
    content = bytearray(path.read_bytes())
    at = content.index(name) + len(name) + 4 + 8  # after the number of dimensions and the only one
    content[at : at + 4] = struct.pack("<I", 9999)
    path.write_bytes(content)
    assert error_of(path) == f"{path}: tensor {name.decode()} has the unsupported type 9999"


def test_unsupported_metadata_is_named(tmp_path):
    cases = {
        "several parts": lambda writer: writer.add_uint16("split.count", 3),
        "num_local_experts must be 0, got 8": lambda writer: writer.add_expert_count(8),
        "rope type must be default, linear or llama3, got 'yarn'": lambda writer: writer.add_rope_scaling_type(
            gguf.RopeScalingType.YARN
        ),
    }
    for i, (error, add) in enumerate(cases.items()):
        assert error in error_of(write_gguf(tmp_path / f"{i}.gguf", add=add))
    path = tmp_path / "gemma.gguf"
    write_gguf(path, "gemma3")
    assert error_of(path) == f"{path}: general.architecture must be one of llama, qwen2, qwen3, got 'gemma3'"
    path = write_gguf(tmp_path / "rope.gguf", "qwen3", add=lambda writer: writer.add_rope_dimension_count(4))
    assert "partial_rotary_factor must be 1, got 0.5" in error_of(path)


def test_missing_or_unknown_tensor_is_named(tmp_path):
    tensors = tensors_of("llama")
    embedding = tensors.pop("model.embed_tokens.weight")
    path = write_gguf(tmp_path / "a.gguf", tensors=tensors)
    assert error_of(path) == f"{path}: tensor token_embd.weight is missing"
    tensors["model.embed_tokens.weight"] = embedding
    path = write_gguf(tmp_path / "b.gguf", tensors=tensors, raw={"blk.0.extra.weight": (np.zeros(4, "f4"), Type.F32)})
    assert "unexpected tensor blk.0.extra.weight (1 in total)" in error_of(path)


def test_missing_package_is_named(tmp_path, monkeypatch):
    path = write_gguf(tmp_path / "tiny.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert error_of(path) == f"{path} is a GGUF file, which needs the gguf package: pip install 'gguf>=0.17'"


# The folder in the cache


def snapshot(folder: Path) -> dict[str, int]:
    return {path.name: path.lstat().st_mtime_ns for path in folder.iterdir()}


def test_second_use_writes_nothing(tmp_path, monkeypatch, cache):
    path = write_gguf(tmp_path / "tiny.gguf", add=add_sentencepiece(train_tokenizer()))
    folder = unpack(path)
    before = snapshot(folder)
    monkeypatch.setattr(unpacking, "read_header", None)
    assert unpack(path) == folder and snapshot(folder) == before
    assert [*(cache / "nanovllm/gguf").iterdir()] == [folder], "nothing temporary may stay"


def test_changed_file_is_unpacked_anew(tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf")
    assert load_tokenizer(unpack(path)) is None
    write_gguf(path, add=add_sentencepiece(train_tokenizer()))
    assert load_tokenizer(unpack(path)) is not None


def test_failed_unpacking_leaves_nothing(tmp_path, cache):
    error_of(write_gguf(tmp_path / "tiny.gguf", add=with_model("t5")))
    assert not cache.exists()


def test_two_at_once_share_a_folder(tmp_path, monkeypatch, cache):
    path, both = write_gguf(tmp_path / "tiny.gguf"), Barrier(2)

    def wait_for_the_other(path: Path) -> dict[str, str]:
        both.wait(60)  # both have seen that there is no folder
        return original(path)

    original = unpacking.files_to_write
    monkeypatch.setattr(unpacking, "files_to_write", wait_for_the_other)
    with ThreadPoolExecutor() as pool:
        first, second = pool.map(unpack, [path, path])
    assert first == second and [*first.parent.iterdir()] == [first]


def test_cache_that_cannot_be_written_is_an_error_of_one_line(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    error = error_of(write_gguf(tmp_path / "tiny.gguf"))
    assert error.endswith(
        "/file/nanovllm/gguf cannot be written (Not a directory): set XDG_CACHE_HOME to another folder"
    )


def test_file_that_becomes_shorter_is_an_error(tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf")
    read = GgufTensors(unpack(path))
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(ValueError, match=r"tensor model.norm.weight has 0 of its 128 bytes"):
        read.get_tensor("model.norm.weight")


# The Hub and the command


def test_file_on_the_hub_is_downloaded_alone(tmp_path, monkeypatch):
    from huggingface_hub import constants

    repository = tmp_path / "repository"
    (repository / "q8").mkdir(parents=True)
    for name in ("a.gguf", "q8/b.gguf"):
        write_gguf(repository / name)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with fake_hub(repository) as hub:
        use_hub(monkeypatch, hub.url)
        folder = find_checkpoint(f"{NAME}:q8/b.gguf")
        assert hub.sent == ["q8/b.gguf"] and read_model_config(folder).hidden_size == SHAPE["hidden_size"]
        assert find_checkpoint(f"{NAME}:q8/b.gguf", COMMIT) == folder
        with pytest.raises(ValueError, match=re.escape(f"{NAME} on the Hub has no c.gguf")):
            find_checkpoint(f"{NAME}:c.gguf")
        with pytest.raises(ValueError, match=f"^{NAME} on the Hub has a.gguf, llama.cpp's GGUF format: name the file"):
            find_checkpoint(NAME)


def test_generate_takes_a_file(tmp_path, run):
    path = write_gguf(tmp_path / "tiny.gguf", add=add_sentencepiece(train_tokenizer()))
    status, out, err = run("generate", "Once upon a time", "--max-tokens", "4", model=path)
    assert status == 0 and out.startswith("Once upon a time"), err


def test_inspect_counts_the_types_of_tensors(tmp_path, capsys):
    path = write_gguf(tmp_path / "tiny.gguf", types={"output.weight": Type.Q8_0})
    assert main(["inspect", str(path)]) == 0
    assert "  GGUF tensors: 20 F32, 1 Q8_0\n" in capsys.readouterr().out
    assert main(["inspect", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tensor_types"] == {"F32": 20, "Q8_0": 1}
    assert main(["inspect", "none.gguf"]) == 2
    assert capsys.readouterr().err == f"error: the file {Path('none.gguf').absolute()} does not exist\n"
