"""Ranks: processes that each have a part of every layer, and of every block's keys and values.

    x, the same on all ranks    [num_tokens, hidden_size]
    qkv_proj                    rows of the rank's heads: nothing to exchange, because heads are independent
    attend                      the keys and values of its own KV heads, in all blocks
    o_proj                      columns of these heads: a part of each sum, and an all-reduce adds up the parts
    gate_up_proj                rows of the rank's hidden units: nothing to exchange, because units are independent
    down_proj                   columns of these units: a part of each sum, and an all-reduce

The embedding, the norms and the head are the same on all ranks. The layout is Megatron-LM's (Shoeybi et al. 2019,
arXiv:1909.08053).

Rank 0 schedules and samples. It tells the others what it does with tensors: a step of the model, or a copy of blocks.
They do the same, and decide nothing. No answer comes back: in a step, the ranks meet in the all-reduces. A rank that
dies closes its connections, which ends the all-reduce that another one waits in.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from multiprocessing import Pipe
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import ProcessContext, ProcessException, spawn

from .config import EngineConfig
from .llama import LlamaForCausalLM, ModelConfig


class RowParallelLinear(nn.Linear):
    """A linear layer whose inputs are divided among the ranks. Each has the columns of the weight for its inputs."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the whole layer's output [num_tokens, out_features] for this rank's x [num_tokens, in_features]."""
        out = x @ self.weight.T
        dist.all_reduce(out)
        return out if self.bias is None else out + self.bias  # after the sum, so that it counts once


def local_config(config: ModelConfig, size: int) -> ModelConfig:
    """Return the config of a rank's part. Raise ValueError if the heads or the units of the MLP cannot be divided.

    >>> part = local_config(ModelConfig(320, 32, 48, 2, num_attention_heads=4, num_key_value_heads=2, head_dim=8), 2)
    >>> part.num_attention_heads, part.num_key_value_heads, part.intermediate_size, part.hidden_size
    (2, 1, 24, 32)
    """
    names = "num_attention_heads", "num_key_value_heads", "intermediate_size"
    if wrong := [name for name in names if size < 1 or getattr(config, name) % size]:
        raise ValueError(f"tensor_parallel_size is {size}, and must divide {wrong[0]}, {getattr(config, wrong[0])}")
    return replace(config, **{name: getattr(config, name) // size for name in names})


def part_of_model(whole: LlamaForCausalLM, rank: int, size: int, max_model_len: int) -> LlamaForCausalLM:
    """Return a rank's part of a model: the same code, with fewer heads and two other linear layers in each layer."""
    with torch.device("meta"):  # shapes without memory
        part = LlamaForCausalLM(local_config(whole.config, size), max_model_len)
        for name, old in list(part.named_modules()):
            if isinstance(old, nn.Linear) and name.endswith(("o_proj", "down_proj")):
                part.set_submodule(name, RowParallelLinear(old.in_features, old.out_features, old.bias is not None))
    # A tied head is listed, too, and stays tied
    state = {n: part_of(n, w, whole.config, rank, size) for n, w in whole.named_parameters(remove_duplicate=False)}
    part.load_state_dict(state, assign=True)
    return part.requires_grad_(False)


def part_of(name: str, weight: Tensor, config: ModelConfig, rank: int, size: int) -> Tensor:
    """Return a rank's part of a weight or bias: some rows, some columns, or all if every rank has the same."""
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        return weight.chunk(size, dim=1)[rank].contiguous()
    q, kv = (num * config.head_dim for num in (config.num_attention_heads, config.num_key_value_heads))
    # a layer of several matrices, end to end: the rows of each
    sizes = {"qkv_proj": [q, kv, kv], "gate_up_proj": [config.intermediate_size] * 2}.get(name.split(".")[-2])
    return torch.cat([matrix.chunk(size)[rank] for matrix in weight.split(sizes)]) if sizes else weight


class Ranks:
    """A rank's view of the others. Only rank 0 tells, and only if there are others to tell."""

    def __init__(self, rank: int = 0, pipes: Sequence = (), others: ProcessContext | None = None) -> None:
        self.rank, self._pipes, self._others = rank, pipes, others or ProcessContext([], [])
        self.close = weakref.finalize(self, end, self._others.processes)  # at the latest when the program exits

    @classmethod
    def start(cls, config: EngineConfig, follow: Callable[..., None]) -> "Ranks":
        """Start the other ranks, as processes that call `follow`, and connect to them. Return rank 0's view.

        Raise ValueError if this program has connected ranks already.
        """
        if dist.is_initialized():
            raise ValueError("only one engine in a program can have ranks at a time: close() those of the other one")
        folder, ends = TemporaryDirectory(), [Pipe() for _ in range(config.tensor_parallel_size - 1)]
        others = spawn(follow, (config, folder.name, [end for _, end in ends]), len(ends), join=False, daemon=True)
        ranks = cls(0, [pipe for pipe, _ in ends], others)
        weakref.finalize(ranks, folder.cleanup)
        ranks.tell("connect", 0, config, folder.name, work=connect)
        return ranks

    def tell(self, verb: str, *args: object, work: Callable[..., Tensor] = lambda *args: None) -> Tensor:
        """Let the other ranks do something, do the same `work` here, and return its result.

        If that fails, end the other ranks, which are in the middle of a step. Raise ConnectionError if one has died.
        """
        try:
            for pipe in self._pipes:
                pipe.send((verb, args))
            return work(*args)
        except BaseException:
            try:
                self._others.join(timeout=1)  # if one has died, this ends the rest
            except ProcessException as death:
                raise ConnectionError(f"rank {death.error_index + 1} {death.msg[death.msg.find('term') :]}") from None
            self.close()
            raise


def connect(rank: int, config: EngineConfig, folder: str) -> None:
    """Connect a rank to the others. They find each other through a file in `folder`."""
    torch.set_num_threads(max(1, torch.get_num_threads() // config.tensor_parallel_size))  # they share the processor
    if config.device == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if config.device == "cuda" else "gloo"
    dist.init_process_group(backend, f"file://{folder}/store", timedelta(minutes=2), config.tensor_parallel_size, rank)


def end(processes: Sequence) -> None:
    """Kill the other ranks, which have nothing to save, and forget the connections."""
    for process in processes:
        process.kill()
    if processes and dist.is_initialized():
        dist.destroy_process_group()
