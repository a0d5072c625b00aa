"""The costs of two ranks on paper have the right dimensions, and count what the branch holds."""

import pytest
import torch

from nanovllm.checkpoints.sizes import SHAPES
from stages.bench.models import STORYTELLER
from stages.more_two_ranks.llama import LlamaForCausalLM, ModelConfig
from stages.more_two_ranks.ranks import part_of_model
from stages.tools.prose import two_ranks as paper


@pytest.mark.parametrize(("shape", "name"), [(paper.LLAMA_8B, "llama-3.1-8b"), (paper.LLAMA_70B, "llama-3.1-70b")])
def test_dimensions_are_the_published_ones(shape, name):
    assert {key: getattr(SHAPES[name], key) for key in shape._fields if key != "itemsize"} == {
        key: value for key, value in shape._asdict().items() if key != "itemsize"
    }


def test_weights_of_the_storyteller_are_counted_right():
    config, shape = ModelConfig.from_folder(STORYTELLER), paper.storyteller()
    with torch.device("meta"):
        whole = LlamaForCausalLM(config)
        parts = [part_of_model(whole, rank, 2, 16) for rank in range(2)]
    for model, num_ranks in ((whole, 1), *((part, 2) for part in parts)):
        assert sum(4 * weight.numel() for weight in model.parameters()) == shape.held(num_ranks)


def test_an_all_reduce_takes_its_latency_or_the_time_of_its_bytes():
    for link in (paper.NVLINK, paper.PCIE):
        assert link.all_reduce(0) == link.small
        assert link.all_reduce(10**9) == pytest.approx(10**9 / link.bandwidth, rel=0.02)
