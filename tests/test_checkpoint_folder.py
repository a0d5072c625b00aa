"""models/storyteller is an ordinary Llama checkpoint: transformers loads it and gives the same ids and logits."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

from models.training.checkpoint import write_checkpoint
from models.training.trainer import CausalAttend
from stages.s1_contiguous_cache.llama import ModelConfig, Tokenizer, load_model
from tests.helpers import MAX_LOGIT_ERROR, STORYTELLER, Oracle
from tests.prompts import CANDIDATES

TEXTS = [text for text in CANDIDATES if isinstance(text, str)] + [
    "",
    "Hello",
    "a  b   c",
    "a\tb\r\nc",
    "\n",
    "\n\n\n",
    "\n indented",
    "ends in a space ",
    "don't, won't; can't",
    "12 3 456 7890 ١٢٣ ²",
    "e\u0301 is not é",
    "\u00a0no break, \u200bno width, \ufeffmark, \u3000wide",
    "\x00 and \x7f",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 🏴󠁧󠁢󠁳󠁣󠁴󠁿 👩‍👩‍👧",
    "<s>",
    "</s>",
    "<unk>",
    "<s>Once",
    "<s> Once",
    "end</s>",
    "end</s> <s> Once",
    "a<unk>b",
    "<s><s></s></s>",
    "a<s>\nb",
    "</s>  two spaces",
    "<s", "< s>", "<S>", "<pad>", "<0x0A>", "[INST]",
]  # fmt: skip
SPECIALS = ["<s>", "</s>", "<unk>"]

oracle = Oracle(STORYTELLER)
tokenizer = Tokenizer(STORYTELLER)


def texts(*pieces: str) -> st.SearchStrategy[str]:
    """Generate texts of random characters and `pieces`. None starts with a space, which "\u2581" also means."""
    characters = st.characters(exclude_categories=["Cs"], exclude_characters="\u2581")
    piece = st.sampled_from([*pieces, " ", "  ", "\n", "the", ".", '"', "1"])
    return (
        st.lists(st.one_of(st.text(characters, max_size=6), piece), max_size=8)
        .map("".join)
        .filter(lambda text: not text.startswith(" "))
    )


# The tokenizer


@pytest.mark.parametrize("text", TEXTS)
def test_ids_are_the_same_as_in_transformers(text):
    assert tokenizer.encode(text) == oracle.tokenizer(text).input_ids


@settings(max_examples=300, deadline=None, derandomize=True)
@given(texts(*SPECIALS, "<s", "s>", "<0x0A>", "<pad>"))
def test_ids_and_text_of_random_texts_are_the_same_as_in_transformers(text):
    ids = tokenizer.encode(text)
    assert ids == oracle.tokenizer(text).input_ids
    assert tokenizer.decode(ids) == oracle.tokenizer.decode(ids, skip_special_tokens=True)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(texts().filter(lambda text: not any(special in text for special in SPECIALS)))
def test_plain_text_survives_the_round_trip(text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_tokenizer_and_config_have_the_same_special_ids():
    config = ModelConfig.from_folder(STORYTELLER)
    assert config.vocab_size == len(oracle.tokenizer) == 4096
    assert (tokenizer.bos_token_id, (tokenizer.eos_token_id,)) == (config.bos_token_id, config.eos_token_ids)
    assert tokenizer.specials == {"<unk>": 0, "<s>": 1, "</s>": 2}


# The model


def test_defaults_of_config_json_are_the_same_as_in_transformers(tmp_path):
    sizes = {"vocab_size": 320, "hidden_size": 128, "intermediate_size": 48, "num_hidden_layers": 2}
    entries = {"model_type": "llama", **sizes, "num_attention_heads": 32}
    (tmp_path / "config.json").write_text(json.dumps(entries))
    ours, theirs = ModelConfig.from_folder(tmp_path), AutoConfig.from_pretrained(tmp_path)
    head_dim = getattr(theirs, "head_dim", theirs.hidden_size // theirs.num_attention_heads)
    assert (ours.num_key_value_heads, ours.head_dim) == (theirs.num_key_value_heads, head_dim)
    for name in ("max_position_embeddings", "rms_norm_eps", "tie_word_embeddings"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    assert ours.sliding_window == getattr(theirs, "sliding_window", None)


def test_transformers_loads_every_tensor():
    model, info = AutoModelForCausalLM.from_pretrained(STORYTELLER, output_loading_info=True)
    assert type(model) is LlamaForCausalLM
    assert not any(info.values()), info


def test_size():
    num_parameters = oracle.model.num_parameters()  # counts a tied head once
    assert 6_500_000 <= num_parameters <= 7_500_000
    assert (STORYTELLER / "model.safetensors").stat().st_size <= 16_000_000


def test_logits_are_the_same_as_in_transformers():
    """Compare every position of a full context, with stage 1's model and without a cache."""
    config = ModelConfig.from_folder(STORYTELLER)
    model = load_model(STORYTELLER, config, torch.float32, torch.device("cpu"))
    length = config.max_position_embeddings
    ids = (tokenizer.encode(" ".join(text for text in TEXTS if text)) * 4)[:length]
    with torch.inference_mode():
        hidden = model(torch.tensor(ids), torch.arange(length), CausalAttend(length))
        got = model.compute_logits(hidden)
        expected = oracle.model(torch.tensor([ids])).logits[0]
    assert got.shape == expected.shape == (length, config.vocab_size)
    assert (got - expected).abs().max() <= MAX_LOGIT_ERROR * expected.abs().max()


# Writing it


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_writing_it_again_changes_nothing(tmp_path, dtype):
    model = load_model(STORYTELLER, ModelConfig.from_folder(STORYTELLER), dtype, torch.device("cpu"))
    write_checkpoint(model, tmp_path)
    written, shipped = tensors_of(tmp_path), tensors_of(STORYTELLER)
    assert list(written) == list(shipped)
    for name, tensor in shipped.items():
        assert written[name].dtype == tensor.dtype == torch.bfloat16
        assert torch.equal(written[name].view(torch.int16), tensor.view(torch.int16)), name
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        assert json.loads((tmp_path / name).read_text()) == json.loads((STORYTELLER / name).read_text()), name
