"""Ranks as processes: rank 0 starts the others, and nothing is left when one of them ends."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ...async_llm import AsyncLLM, EngineDeadError
from ...beam_search import BeamSearchParams
from ...distributed.rank_group import RankError
from ...llm import LLM
from ...options.engine_args import EngineArgs
from ...requests.sampling_params import SamplingParams
from ..testing.engines import answer
from ..testing.processes import REPOSITORY

OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "attention_backend": "torch",
    "offload_policy": "load",
    "block_size": 4,
}
PROMPTS = ["the fox", "Once upon a time there was", [1, 300, 301]]
SECONDS = 60.0  # after which nothing may be left


def children(pid: int) -> list[int]:
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False)
    return [int(word) for word in found.stdout.split()]


def followers() -> list[int]:
    commands = {pid: Path(f"/proc/{pid}/cmdline") for pid in children(os.getpid())}
    return [pid for pid, path in commands.items() if path.exists() and "distributed.followers" in path.read_text()]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + SECONDS
    while any(map(is_alive, pids)):
        assert time.monotonic() < deadline, "a rank is left"
        time.sleep(0.02)


@pytest.mark.full
def test_two_processes_serve_like_one_until_one_dies(checkpoint):
    sampling = [SamplingParams(max_tokens=12, seed=i, n=1 + i % 2) for i in range(3)]
    one, two = (LLM(checkpoint, tensor_parallel_size=size, **OPTIONS) for size in (1, 2))
    expected = one.generate(PROMPTS, sampling, use_tqdm=False)
    for _ in range(2):
        outputs = two.generate(PROMPTS, sampling, use_tqdm=False)
        assert [[each.text for each in output.outputs] for output in outputs] == [
            [each.text for each in output.outputs] for output in expected
        ]
    next(stream := two.stream("the wolf", SamplingParams(max_tokens=12, temperature=0.0)))
    stream.close()  # an abort
    with pytest.warns(UserWarning, match="must have at most"):
        two.generate([list(range(3, 300))], sampling[0], use_tqdm=False)
    params = BeamSearchParams(beam_width=2, max_tokens=6)
    beams = [llm.beam_search([PROMPTS[2]], params)[0].sequences[0].tokens for llm in (one, two)]
    assert beams[0] == beams[1] and two.reset_prefix_cache()
    assert answer(two.generate(PROMPTS[0], sampling[0], use_tqdm=False)[0]) == answer(expected[0])
    [pid] = followers()
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(RankError, match="rank 1 has ended: signal 9"):
        two.generate(PROMPTS, sampling, use_tqdm=False)
    wait_until_gone([pid])


@pytest.mark.full
def test_idle_async_llm_ends_with_its_ranks(checkpoint):
    async def run() -> None:
        llm = AsyncLLM(EngineArgs(checkpoint, tensor_parallel_size=2, **OPTIONS))
        params = SamplingParams(max_tokens=8, seed=1)

        async def last(request_id: str) -> list[int]:
            return [answer(output) async for output in llm.generate("the fox", params, request_id)][-1]

        first, second = await asyncio.gather(last("a"), last("b"))
        assert first == second == answer(LLM(checkpoint, **OPTIONS).generate("the fox", params, use_tqdm=False)[0])
        [pid] = followers()
        os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + SECONDS
        while not llm.errored:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)
        with pytest.raises(EngineDeadError, match="rank 1 has ended: signal 9"):
            await last("c")

    asyncio.run(run())


SCRIPT = """
import sys, time
from nanovllm import LLM, SamplingParams
llm = LLM(sys.argv[1], tensor_parallel_size=2, max_model_len=64, {options})
params = SamplingParams(max_tokens=60, ignore_eos=True, temperature=0.0)
while True:
    llm.generate(["the fox"] * 4, params, use_tqdm=False)
    print("serving", flush=True)
"""


@pytest.mark.full
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_is_left_when_rank_0_ends(checkpoint, tmp_path, how):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(options=", ".join(f"{name}={value!r}" for name, value in OPTIONS.items())))
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, str(script), str(checkpoint)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == b"serving\n"
        pids = [process.pid, *children(process.pid)]
        assert len(pids) == 2
        process.send_signal(how)
        process.wait(SECONDS)
    wait_until_gone(pids)


EXTERNAL = """
import sys
import torch.distributed as dist
from nanovllm import LLM, SamplingParams
llm = LLM(sys.argv[1], tensor_parallel_size=2, distributed_executor_backend="external_launcher", {options})
outputs = llm.generate(["the fox", [1, 300, 301]], SamplingParams(max_tokens=12, seed=1), use_tqdm=False)
if dist.get_rank() == 0:
    print([output.outputs[0].token_ids for output in outputs])
"""


@pytest.mark.full
def test_torchrun(checkpoint, tmp_path):
    script, options = tmp_path / "script.py", ", ".join(f"{name}={value!r}" for name, value in OPTIONS.items())
    script.write_text(EXTERNAL.format(options=options))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(script), str(checkpoint)]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    outputs = LLM(checkpoint, **OPTIONS).generate(
        ["the fox", [1, 300, 301]], SamplingParams(max_tokens=12, seed=1), use_tqdm=False
    )
    assert result.stdout.strip() == str([output.outputs[0].token_ids for output in outputs])
