"""Published models, made small: each gives the same tokens as in transformers, or is rejected with a clear error.

The package loads them with config.json as published. tests/test_contract.py covers unusual shapes in all stages.
"""

import json

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from nanovllm import LLM, SamplingParams
from nanovllm.checkpoints.hub import find_config
from nanovllm.checkpoints.model_config import read_model_config
from nanovllm.checkpoints.sizes import SHAPES
from tests.helpers import MARGIN, Oracle, compare_greedy, full
from tests.published_configs import POSITIONS, RUN, UNSUPPORTED, VOCAB, WINDOW, small, write_config
from tests.tiny_models import random_prompts, spread

QUICK = {"llama-3.2-1b", "mistral-7b-v0.1", "qwen2.5-0.5b", "qwen3-0.6b"}
OPTIONS = {"dtype": "float32", "device": "cpu", "offload_policy": "load"}


def write_model(folder, config, shard_size="1GB"):
    """Write a random model with this config.json and with weights in the published dtype."""
    write_config(folder, config)
    torch.manual_seed(sum(json.dumps(config).encode()))
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32).eval()
    spread(model)
    model.to(getattr(torch, config.get("torch_dtype", "float32"))).save_pretrained(folder, max_shard_size=shard_size)
    (folder / "generation_config.json").unlink()
    return Oracle(write_config(folder, config))


@pytest.mark.parametrize("name", [name if name in QUICK else full(name) for name in RUN])
def test_supported_model_gives_transformers_tokens(tmp_path, name):
    oracle = write_model(tmp_path, small(RUN[name]))
    longest = WINDOW if name == "mistral-7b-v0.1" else 128
    prompts = random_prompts(VOCAB, num=32, longest=longest // 2)  # many, because a tied model soon repeats itself
    llm = LLM(tmp_path, **OPTIONS, max_model_len=longest, kv_cache_tokens=32 * 128)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    outputs = llm.generate(prompts, params)
    compared = [compare_greedy(oracle, p, o.outputs[0].token_ids) for p, o in zip(prompts, outputs, strict=True)]
    assert sum(each.num_excused for each in compared) * 1000 <= sum(each.num_tokens for each in compared)
    assert len({token for output in outputs for token in output.outputs[0].token_ids}) > 20, "the model repeats itself"


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_model_is_rejected_by_name(tmp_path, name):
    config, error = UNSUPPORTED[name]
    write_config(tmp_path, config)
    save_file({"invalid": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError) as raised:
        LLM(tmp_path, **OPTIONS)
    assert str(raised.value).startswith(f"{tmp_path / 'config.json'}: ") and error in str(raised.value)


@pytest.mark.parametrize("name", sorted(RUN.keys() & SHAPES.keys()))
def test_sizes_has_the_published_numbers(tmp_path, name):
    config = read_model_config(find_config(write_config(tmp_path, RUN[name])).parent)
    assert {entry: getattr(config, entry) for entry in vars(SHAPES[name])} | {"dtype": "bfloat16"} == vars(SHAPES[name])


# A folder as transformers 5 saves it: only tokenizer.json, shards, bfloat16 and several EOS tokens


def train_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    specials = ["<|begin_of_text|>", "<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(
        ["the fox said that the wood is old", "once upon a time the rabbit ran"] * 20, trainer
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=specials[0], eos_token=specials[3])


@pytest.mark.parametrize("name", ["llama-3.1-8b", full("qwen2.5-7b"), full("qwen3-32b"), full("mistral-nemo-12b")])
def test_text_is_the_same_as_in_transformers(tmp_path, name):
    tokenizer = train_tokenizer()
    config = small(RUN[name]) | {"vocab_size": len(tokenizer), "bos_token_id": 0, "eos_token_id": [1, 3]}
    oracle = write_model(tmp_path, config, shard_size="30KB")
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 3], "bos_token_id": 0}))
    assert not (tmp_path / "tokenizer.model").exists() and len([*tmp_path.glob("*.safetensors")]) > 2
    llm = LLM(tmp_path, **OPTIONS, max_model_len=POSITIONS, kv_cache_tokens=1024)
    prompts = ["the fox", "Once upon a time, 12 rabbits ran", "é 🏴 \n\n  x", "<|eot_id|>the wood"]
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    for prompt, output in zip(prompts, llm.generate(prompts, params), strict=True):
        ids = tokenizer(prompt).input_ids
        expected = oracle.greedy(ids, 24)
        assert output.prompt_token_ids == ids
        if min(expected.margins) > MARGIN:
            assert output.outputs[0].token_ids == expected.token_ids
            text = tokenizer.decode(expected.token_ids, skip_special_tokens=True)
            assert output.outputs[0].text == text
