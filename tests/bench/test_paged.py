"""python -m stages.bench paged: all variants read the same memory, and a variant that fails is reported."""

import json
import re

import pytest
import torch

from nanovllm.backends.gpu.ops import PLAIN
from nanovllm.bench import floor
from nanovllm.checkpoints.sizes import Shape
from stages.bench import paged
from stages.bench.__main__ import main
from stages.bench.paged import Attention, Case

TINY = Shape(
    num_hidden_layers=3,
    hidden_size=16,
    intermediate_size=32,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=4,
    vocab_size=64,
    max_position_embeddings=64,
)
SMALL = ("--batch-sizes", "1,2", "--contexts", "8,16", "--block-sizes", "4", "--layers", "2", "--rounds", "1")


@pytest.fixture(autouse=True)
def little_memory(monkeypatch):
    monkeypatch.setattr(floor, "NUM_BYTES", 1 << 16)
    monkeypatch.setattr(paged, "LEAST_BYTES", 1 << 12)


def case(batch_size: int = 2, context: int = 8, num_layers: int = 2) -> Case:
    return Case(TINY, num_layers, batch_size, context, torch.float32, torch.device("cpu"))


def test_report_has_every_variant(tmp_path, capsys):
    file = tmp_path / "report.json"
    assert main(["paged", "--device", "cpu", "--shape", "smollm2-135m", *SMALL, "--json", str(file)]) == 0
    (out, err), report = capsys.readouterr(), json.loads(file.read_text())
    assert err == "" and [*report["measured"]] == ["blocks of 4", "contiguous", "sdpa"]
    for name, numbers in report["measured"].items():
        names = {key.split(":")[0] for key in numbers}
        assert names == {"1 x 8", "2 x 8", "1 x 16", "2 x 16"} and numbers["1 x 8: us per layer"] > 0
        assert ("1 x 8: time over contiguous" in numbers) == (name != "contiguous")
    assert report["machine"]["dtype"] == "float32" and re.search(
        r"\n *1 x 8: us per layer +[\d.,]+ +[\d.,]+ +[\d.,]+\n", out
    )
    assert len(report["says"]) == 3 and "by plain operations" in out


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--contexts", "8,10"], "--contexts must be multiples of each block size, got 10 for 4"),
        (["--block-sizes", "4,x"], "--block-sizes must be whole numbers of at least 1"),
        (["--device", "nowhere"], "'nowhere'"),
    ],
)
def test_invalid_option_is_a_one_line_error(capsys, flags, expected):
    assert main(["paged", "--device", "cpu", *SMALL, *flags]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and expected in err and err.count("\n") == 1


def test_block_tables_have_each_block_of_the_memory_once():
    attention = Attention(case(), PLAIN)
    way = attention.paged(4)
    assert way.blocks.shape == (4, 2, 2, 4, 2, 4) and way.block_tables.shape == (2, 2)
    assert sorted(way.block_tables.flatten().tolist()) == [0, 1, 2, 3]
    assert way.blocks.data_ptr() == attention.sdpa().blocks.data_ptr()


def test_variant_that_fails_or_is_wrong_does_not_stop_the_others():
    def decode(q, blocks, layer, decodes, out):
        if blocks.shape[3] == 2:
            raise RuntimeError("no such\nkernel")
        PLAIN.paged_decode(q, blocks, layer, decodes, out)
        out += blocks.shape[3] == 4

    ops = PLAIN._replace(paged_decode=decode)
    measured, failures = paged.measure_cases([case()], ops, [2, 4], 2, 1)
    assert [*measured] == ["contiguous", "sdpa"]
    assert failures[0] == "2 x 8, blocks of 2: RuntimeError: no such kernel"
    assert failures[1].startswith("2 x 8, blocks of 4: ValueError: the result differs from plain operations by ")


def test_case_without_room_does_not_stop_the_others(monkeypatch):
    monkeypatch.setattr(paged, "MOST_BYTES_ON_CPU", 2 * case(1).layer_bytes)
    measured, failures = paged.measure_cases([case(4), case(1)], PLAIN, [4], None, 1)
    assert {key.split(":")[0] for key in measured["sdpa"]} == {"1 x 8"}
    assert failures == ["4 x 8: ValueError: a layer's keys and values need 2,048 bytes, got 1,024"]


def test_number_of_layers_exceeds_the_caches_and_fits_in_memory(monkeypatch):
    assert case(1).layer_bytes == 512  # 2 x 8 tokens x 2 heads x 4 numbers x 4 bytes
    assert case(1).fitted(None).num_layers == 8, "4096 bytes at least"
    assert case(64).fitted(None).num_layers == TINY.num_hidden_layers
    assert case(1).fitted(5).num_layers == 5
    monkeypatch.setattr(paged, "MOST_BYTES_ON_CPU", 1600)
    assert (case(1).fitted(None).num_layers, case(1).fitted(5).num_layers) == (3, 3)


def test_share_of_the_bandwidth_is_computed_per_layer():
    rounds = [{"blocks of 4": 3.0, "contiguous": 2.0}] * 2
    numbers = paged.numbers_of(case(), "blocks of 4", rounds, bandwidth=1024.0)
    assert numbers == {
        "2 x 8: us per layer": 1.5e6,
        "2 x 8: share of the bandwidth": 1024 / 1.5 / 1024,
        "2 x 8: time over contiguous": {"median": 1.5, "least": 1.5, "largest": 1.5},
    }
