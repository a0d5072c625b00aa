"""ModelRunner: the tokens of a step as flat tensors. The model is a fake one that returns its inputs, or a real one."""

import pytest
import torch
from torch import Tensor

from ..attention import AttentionMetadata, ContiguousAttention
from ..kv_cache import KVCache
from ..llama import Attend, LlamaForCausalLM, ModelConfig
from ..model_runner import ModelRunner
from ..sequence import Sequence
from .helpers import make_sequence, next_logits


class Echo:
    """A model whose hidden state of a token is its id and its position, and so are its logits."""

    def __call__(self, input_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        self.input_ids, self.positions = input_ids.tolist(), positions.tolist()
        return torch.stack((input_ids, positions), dim=1)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return hidden


class Recorder:
    """An attention backend that keeps the metadata of the last step."""

    def plan(self, step: AttentionMetadata) -> None:
        self.step = step


def sequence(token_ids: list[int], slots: range, num_computed_tokens: int = 0) -> Sequence:
    seq = make_sequence(f"from slot {slots.start}", len(token_ids), max_tokens=8)
    seq.token_ids, seq.slots, seq.num_computed_tokens = list(token_ids), slots, num_computed_tokens
    return seq


@pytest.fixture
def batch() -> list[tuple[Sequence, int]]:
    """Return a prompt of 3 tokens, and a sequence that decodes its sixth, with earlier slots."""
    prompt = sequence([50, 60, 70], range(10, 16))
    decoding = sequence([1, 2, 3, 4, 5, 6], range(2, 10), num_computed_tokens=5)
    return [(prompt, 3), (decoding, 1)]


@pytest.fixture
def model_and_attention() -> tuple[Echo, Recorder]:
    return Echo(), Recorder()


@pytest.fixture
def runner(model_and_attention) -> ModelRunner:
    return ModelRunner(*model_and_attention, torch.device("cpu"))


WHO = "a prompt of 3 tokens, then the token at position 5 of another sequence"


def test_tokens_of_a_step_lie_flat(runner, model_and_attention, batch):
    runner.compute_logits(batch)
    model, _ = model_and_attention
    assert model.input_ids == [50, 60, 70, 6], f"the ids of {WHO}"
    assert model.positions == [0, 1, 2, 5], f"the positions of {WHO}"


def test_token_goes_to_the_slot_of_its_position(runner, model_and_attention, batch):
    runner.compute_logits(batch)
    slots = model_and_attention[1].step.slot_mapping
    assert slots.tolist() == [10, 11, 12, 7], "the slots of 3 tokens from slot 10 on, and of position 5 from slot 2 on"
    assert slots.dtype == torch.int64, "slots index a tensor"


def test_metadata_says_where_each_sequence_is(runner, model_and_attention, batch):
    runner.compute_logits(batch)
    step = model_and_attention[1].step
    assert list(step.query_start_loc) == [0, 3, 4], (
        "where the tokens of each sequence begin, and where the last ones end"
    )
    assert list(step.context_lens) == [3, 6], "the tokens that each sequence attends to, with those of this step"
    assert list(step.first_slots) == [10, 2]


def test_logits_are_of_the_last_token_of_each_sequence(runner, batch):
    logits = runner.compute_logits(batch)
    assert logits.tolist() == [[70, 2], [6, 5]], "the id and the position of the token that each row of logits is of"
    assert runner.compute_logits(batch[::-1]).tolist() == [[6, 5], [70, 2]], "the same batch in the other order"


def test_step_is_counted_and_changes_no_sequence(runner, batch):
    for _ in range(2):
        runner.compute_logits(batch)
    assert (runner.num_steps, runner.num_tokens) == (2, 8), "two steps of 4 tokens each"
    assert [(seq.num_tokens, seq.num_computed_tokens) for seq, _ in batch] == [(3, 0), (6, 5)]


def test_logits_are_the_same_as_without_a_cache(model: LlamaForCausalLM, checkpoint):
    """Two prompts in one step, then a token of each. A slot that is read before it is written is NaN."""
    cache = KVCache(ModelConfig.from_folder(checkpoint), 32, torch.float32, torch.device("cpu"))
    cache.k.fill_(float("nan"))
    cache.v.fill_(float("nan"))
    runner = ModelRunner(model, ContiguousAttention(cache), torch.device("cpu"))
    seqs = [sequence([1, 5, 9], range(20, 28)), sequence([1, 300, 301, 302, 303], range(4, 12))]
    for token_id in (44, 45):
        logits = runner.compute_logits([(seq, seq.num_uncomputed_tokens) for seq in seqs])
        for seq, row in zip(seqs, logits, strict=True):
            expected = next_logits(model, seq.token_ids)
            assert row.allclose(expected, atol=1e-3), f"the logits after {seq.token_ids}"
            seq.num_computed_tokens = seq.num_tokens
            seq.token_ids.append(token_id)
