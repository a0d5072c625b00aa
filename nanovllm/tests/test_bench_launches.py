"""nanovllm bench launches: what a step starts, by engines one after the other."""

import json
import weakref
from types import SimpleNamespace

import pytest
from torch.autograd import DeviceType

from .. import LLM
from ..cli.benchmarks import launches


def test_torchs_operations_are_counted_where_there_is_no_gpu(run, tmp_path):
    file = tmp_path / "found.json"
    flags = ("--attention-backend", "torch", "--rounds", "2", "--batch-size", "3", "--input-len", "7")
    status, out, _ = run("bench launches", *flags, "--json", str(file))
    found = json.loads(file.read_text())
    assert status == 0 and list(found["measured"]) == ["plain operations"]
    numbers = found["measured"]["plain operations"]
    assert numbers["step ms"] > 0 and numbers["operations of torch"] > 50
    assert "plain operations: plain operations: they were asked for" in found["says"] and "operations of torch" in out


def test_every_counted_step_decodes_all_sequences(checkpoint, monkeypatch):
    llm, batches = LLM(str(checkpoint), attention_backend="torch", max_num_batched_tokens=8), []
    real = llm.model_runner.run
    monkeypatch.setattr(llm.model_runner, "run", lambda batch: batches.append([n for _, n in batch]) or real(batch))
    launches.begin(llm, batch_size=3, input_len=5, num_steps=12)
    batches.clear()
    for _ in range(12):
        llm.llm_engine.step()
    assert batches == [[1, 1, 1]] * 12


def test_calls_of_the_driver_by_name():
    def event(key, count, device=DeviceType.CPU):
        return SimpleNamespace(key=key, count=count, device_type=device)

    events = [
        *(event("cudaLaunchKernel", 5), event("cuLaunchKernelEx", 2), event("cudaGraphLaunch", 10)),
        *(event("cudaMemcpyAsync", 3), event("cudaStreamSynchronize", 4), event("aten::mm", 9)),
        event("cudaDeviceSynchronize", 1),  # as a profile ends
        *(event("attend_split", 7, DeviceType.CUDA), event("Memcpy HtoD (Pinned -> Device)", 3, DeviceType.CUDA)),
    ]
    assert launches.tally(events) == {
        "kernels started": 7,
        "graphs started": 10,
        "copies started": 3,
        "waits": 4,
        "kernels that ran": 7,
    }


@pytest.mark.full
def test_a_gpu_has_three_ways_and_one_that_fails_is_told(run, monkeypatch):
    assert list(launches.ways({"device": "cuda:1"})) == ["plain operations", "kernels", "graphs"]
    monkeypatch.setattr(launches, "ways", lambda engine: launches.WAYS_ON_GPU)
    status, out, _ = run("bench launches", "--rounds", "1", "--input-len", "4")
    assert status == 0 and "graphs: ValueError: attention_backend 'triton' cannot be had" in out


@pytest.mark.full
def test_an_engine_is_gone_before_the_next_one_is_made_also_if_it_fails(run, monkeypatch):
    engines = []

    def failing(llm, *_):
        assert not [each for each in engines if each() is not None], "an engine before it holds its memory"
        engines.append(weakref.ref(llm.llm_engine))
        raise KeyError("no kernel")  # as of a compiler: any kind of error

    plain = {"attention_backend": "torch"}
    monkeypatch.setattr(launches, "ways", lambda engine: {"first": plain, "second": plain})
    monkeypatch.setattr(launches, "figures", failing)
    status, out, err = run("bench launches", "--rounds", "1")
    assert (status, out, len(engines)) == (2, "", 2)
    assert err == "error: first: KeyError: 'no kernel'; second: KeyError: 'no kernel'\n"


@pytest.mark.parametrize("command", ["launches", "peers", "published"])
def test_a_shape_and_a_checkpoint_are_one_too_many(command, run, checkpoint):
    status, out, err = run(f"bench {command}", "--shape", "smollm2-135m", "--model", str(checkpoint))
    assert (status, out) == (
        2,
        "",
    ) and err == f"error: --shape smollm2-135m and --model {checkpoint}: give one of them\n"
