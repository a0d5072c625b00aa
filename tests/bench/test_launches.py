"""python -m stages.bench launches: counts of a decode step, from one engine after the other."""

import json
import weakref
from types import SimpleNamespace

import pytest
from torch.autograd import DeviceType

from nanovllm import LLM
from nanovllm.tests.testing.engines import model_runner
from stages.bench import launches


def test_launches_counts_operations_without_a_gpu(run, tmp_path):
    file = tmp_path / "report.json"
    flags = ("--attention-backend", "torch", "--rounds", "2", "--batch-size", "3", "--input-len", "7")
    status, out, _ = run("launches", *flags, "--json", str(file))
    report = json.loads(file.read_text())
    assert status == 0 and list(report["measured"]) == ["plain operations"]
    numbers = report["measured"]["plain operations"]
    assert 0 < numbers["step ms"]["least"] <= numbers["step ms"]["median"] <= numbers["step ms"]["largest"]
    assert numbers["operations of torch"] > 50
    assert report["says"][0].startswith("plain operations: ") and "operations of torch" in out


def test_every_counted_step_decodes_all_sequences(checkpoint, monkeypatch):
    llm, batches = LLM(str(checkpoint), attention_backend="torch", max_num_batched_tokens=8), []
    runner = model_runner(llm.llm_engine)
    real = runner.run
    monkeypatch.setattr(runner, "run", lambda batch: batches.append([n for _, n in batch]) or real(batch))
    launches.start_decoding(llm, batch_size=3, input_len=5, num_steps=12)
    batches.clear()
    for _ in range(12):
        llm.llm_engine.step()
    assert batches == [[1, 1, 1]] * 12


def test_tally_counts_driver_calls_by_name():
    def event(key, count, device=DeviceType.CPU):
        return SimpleNamespace(key=key, count=count, device_type=device)

    events = [
        *(event("cudaLaunchKernel", 5), event("cuLaunchKernelEx", 2), event("cudaGraphLaunch", 10)),
        *(event("cudaMemcpyAsync", 3), event("cudaStreamSynchronize", 4), event("aten::mm", 9)),
        event("cudaDeviceSynchronize", 1),  # ends a profile
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
def test_launches_reports_a_way_that_fails(run, monkeypatch):
    assert list(launches.ways({"device": "cuda:1"})) == ["plain operations", "kernels", "graphs"]
    monkeypatch.setattr(launches, "ways", lambda engine: launches.WAYS_ON_GPU)
    status, out, _ = run("launches", "--rounds", "1", "--input-len", "4")
    assert status == 0 and "graphs: ValueError: " in out


@pytest.mark.full
def test_engine_is_freed_before_the_next_one_even_if_it_fails(run, monkeypatch):
    engines = []

    def failing(llm, *_):
        assert not [each for each in engines if each() is not None], "an earlier engine holds its memory"
        engines.append(weakref.ref(llm.llm_engine))
        raise KeyError("no kernel")  # a compiler may raise any kind of error

    plain = {"attention_backend": "torch"}
    monkeypatch.setattr(launches, "ways", lambda engine: {"first": plain, "second": plain})
    monkeypatch.setattr(launches, "numbers", failing)
    status, out, err = run("launches", "--rounds", "1")
    assert (status, out, len(engines)) == (2, "", 2)
    assert err.endswith("\nerror: first: KeyError: 'no kernel'; second: KeyError: 'no kernel'\n")


@pytest.mark.parametrize("command", ["launches", "race", "published"])
def test_shape_and_model_must_not_both_be_set(command, run, checkpoint):
    status, out, err = run(command, "--shape", "smollm2-135m", "--model", str(checkpoint))
    assert (status, out) == (2, "") and f"--shape smollm2-135m and --model {checkpoint}" in err
