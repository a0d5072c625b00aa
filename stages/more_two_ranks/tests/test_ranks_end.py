"""All ranks end if one of them does, and rank 0 says why. Each test starts processes, which takes seconds."""

import multiprocessing
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from ..llm import LLM
from ..sampling import SamplingParams
from .helpers import greedy_without_cache

SECONDS = 60.0  # after which a test that hangs fails
PROMPT = [1, 5, 9]
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


@pytest.fixture
def two(checkpoint: Path) -> Iterator[LLM]:
    """Return an engine on two ranks, which has generated some tokens."""
    llm = LLM(checkpoint, tensor_parallel_size=2, offload_policy="recompute")
    llm.generate([PROMPT], GREEDY)
    yield llm
    llm.llm_engine.ranks.close()


@pytest.fixture
def rank_1(two: LLM) -> BaseProcess:
    [process] = multiprocessing.active_children()
    return process


def kill_in_an_all_reduce(llm: LLM, rank_1: BaseProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    all_reduce = dist.all_reduce

    def kill_first(tensor: Tensor) -> None:
        rank_1.kill()
        rank_1.join(SECONDS)
        all_reduce(tensor)

    monkeypatch.setattr(dist, "all_reduce", kill_first)


def raise_an_error(llm: LLM, rank_1: BaseProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    llm.llm_engine.ranks.tell("no such verb")


@pytest.mark.parametrize(
    ("die", "how"), [(kill_in_an_all_reduce, "signal SIGKILL"), (raise_an_error, "KeyError: 'no such verb'")]
)
def test_a_rank_that_dies_is_one_error_that_says_how(two, rank_1, die, how, monkeypatch):
    die(two, rank_1, monkeypatch)
    with pytest.raises(ConnectionError, match=rf"(?s)rank 1 terminated with .*{re.escape(how)}"):
        two.generate([PROMPT], GREEDY)
    assert has_ended(rank_1)
    assert not two.llm_engine.has_unfinished_requests() and two.kv_cache_manager.report().held == 0
    with pytest.raises(ConnectionError):
        two.generate([PROMPT], GREEDY)


def test_a_step_that_fails_on_rank_0_ends_the_others(two, rank_1, monkeypatch):
    """Rank 1 waits in an all-reduce. In the next step it would add its numbers of this one."""

    def interrupted(*args: Any) -> Tensor:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(two.model_runner, "forward", interrupted)
        two.generate([PROMPT], GREEDY)
    assert has_ended(rank_1)
    with pytest.raises(ConnectionError):
        two.generate([PROMPT], GREEDY)


def has_ended(process: BaseProcess) -> bool:
    process.join(SECONDS)
    return process not in multiprocessing.active_children()


PROGRAM = """
import sys
from {package} import LLM, SamplingParams
llm = LLM(sys.argv[1], tensor_parallel_size=2, block_size=4, kv_cache_tokens=64)
params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
print(llm.generate([[1, 5, 9]], params)[0].outputs[0].token_ids, flush=True)
sys.stdin.readline()
"""


def test_no_process_is_left_when_a_program_ends_or_is_killed(checkpoint, model):
    """All of its processes have its standard output open, which closes with the last of them."""
    package = __package__.rpartition(".")[0]
    root = Path(__file__).resolve().parents[len(package.split(".")) + 1]
    command = [sys.executable, "-c", PROGRAM.format(package=package), str(checkpoint)]
    environment = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    start: Callable = partial(subprocess.Popen, command, env=environment, text=True, **pipes)
    expected = f"{greedy_without_cache(model, PROMPT, 6)}\n"
    with start() as ends, start() as is_killed:
        for process in (ends, is_killed):
            said = process.stdout.readline()
            assert said == expected, process.communicate(timeout=SECONDS)
        is_killed.kill()
        assert is_killed.communicate(timeout=SECONDS)[0] == ""
        assert ends.communicate("\n", timeout=SECONDS) == ("", "")
    assert (ends.returncode, is_killed.returncode) == (0, -9)
