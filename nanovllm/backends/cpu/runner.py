"""StepRunner, which packs a model's weights, plans each step, and runs it with helpers."""

import math
from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate, groupby
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...distributed.layers import RowParallelLinear
from ...distributed.rank_group import RankGroup
from ...engine.executor import Scheduled
from ...engine.kv_cache import KVCache
from ...llama import LlamaForCausalLM
from ...quantization import GROUP, MixedLinear, QuantizedLinear
from ...requests.tokens import SamplingRow, StepOutput
from ..torch.backend import end_positions
from ..torch.sampler import invalid_logits_message, sample
from .layout import (
    CHUNK,
    COLUMNS,
    JOB,
    LAST_PHASES,
    MERGE,
    NO_STEP,
    PART,
    PHASES,
    PLACES,
    SCORES,
    SPLIT,
    STRIDE,
    SUMS,
    WIDTH,
    Int8Pool,
    Pool,
    Sizes,
    Step,
    Weights,
    Workspace,
    int8_scratch_size,
    pack,
    type_of,
)
from .machine_code import STEPS, RunStep, Variant
from .threads import Helpers

QUERY_TILE = 64  # rows per job of a chunk: queries x query heads that share a KV head


class StepRunner:
    """A model, or a rank's part of it, ready for kernels, which run its layers, logits and likeliest tokens."""

    def __init__(
        self, model: LlamaForCausalLM, kv_cache: KVCache, max_model_len: int, ranks: RankGroup | None = None
    ) -> None:
        """Pack the weights of `model` in place, after everything else that can fail, on any of the `ranks`.

        Plain operations cannot use the model afterwards. The compiled step must have been loaded.
        """
        self._ranks = RankGroup() if ranks is None else ranks
        self._run_step = STEPS[Variant(kv_cache.dtype, kv_cache.is_int8)]
        self._blocks, self._dtype, self._max_model_len = kv_cache.blocks, kv_cache.dtype, max_model_len
        config, workers, head_dim = model.config, torch.get_num_threads(), kv_cache.head_dim
        num_kv_heads = kv_cache.num_kv_heads
        shape = kv_cache.num_layers, kv_cache.block_size, num_kv_heads, head_dim
        self._shape = Int8Pool(*shape) if kv_cache.is_int8 else Pool(*shape)
        self._vocab_size, heads = config.vocab_size, config.num_attention_heads
        self._num_own_logits = model.lm_head.out_features  # of a row: this rank's part of the vocabulary
        group = heads // num_kv_heads
        widest = max(config.hidden_size, config.intermediate_size, heads * head_dim)
        job_rows = max(QUERY_TILE, group)
        scratch = int8_scratch_size(job_rows, head_dim) if kv_cache.is_int8 else SCORES
        sizes = config.hidden_size, heads, group, config.intermediate_size, job_rows, widest, scratch
        self._sizes = Sizes(workers, *sizes)
        # Kernels hold addresses, which must stay valid even if the model gets new weights. A helper may read them
        # after the last step.
        self._kept: list[Tensor] = [tensor.detach() for tensor in (*model.parameters(), *model.buffers())]
        self._scratch = torch.empty(0)
        self._model, self._helpers = self._ranks.call_on_all(partial(self._prepare, model))
        for matrix in matrices_of(model):
            pack(matrix)

    def _prepare(self, model: LlamaForCausalLM) -> tuple[int, Helpers]:
        """Return the address of the model's numbers, and the helpers."""
        workers = self._sizes.workers
        weights, work = self._weights_of(model), self._make_workspace(workers, type_of(self._dtype))
        numbers = self._keep(torch.tensor([*self._shape, *self._sizes, *weights, *work]))
        return numbers, Helpers(workers - 1, partial(help_with, self._run_step, numbers, self._kept))

    def run(self, batch: list[Scheduled]) -> tuple[Tensor, Tensor | None]:
        """Run the model on the tokens that are scheduled for each sequence.

        Return hidden [num_tokens, hidden_size] in the model's dtype, and logits float32 [batch size, vocab_size] after
        the last token of each item, or None if a sequence has more tokens to compute.
        """
        assert batch and all([count > 0 for _, count in batch]), "a step needs at least one token per sequence"
        plan = plan_step(batch, self._shape.block_size, max(1, QUERY_TILE // self._sizes.group))
        self._check(batch, plan.token_ids)
        rows = len(plan.token_ids)
        hidden = torch.empty(rows, self._sizes.hidden_size, dtype=self._dtype)
        logits = torch.empty(len(plan.outputs), self._num_own_logits) if plan.outputs else None
        size, heads, kvs = self._shape.head_dim, self._sizes.num_heads, self._shape.num_kv_heads
        width = self._sizes.hidden_size + 2 * (heads + kvs) * size + self._sizes.intermediate_size
        self._execute(
            4 * (rows * width + plan.num_splits * heads * (size + 2)),
            {"token_ids": plan.token_ids, "positions": plan.positions, "slots": plan.slots, "tables": plan.tables,
             "jobs": plan.jobs, "merges": plan.merges, "outputs": plan.outputs},
            rows=rows, stored_rows=rows if plan.has_chunks else 0, max_blocks=plan.max_blocks,
            num_jobs=len(plan.jobs) // JOB, num_merges=len(plan.merges) // MERGE, num_splits=plan.num_splits,
            num_outputs=len(plan.outputs), hidden=hidden.data_ptr(), vocab_size=self._num_own_logits,
            logits=0 if logits is None else logits.data_ptr(), end_half=2 * self._shape.num_layers,
        )  # fmt: skip
        return hidden, None if logits is None else self._ranks.gather(logits, self._vocab_size)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return the logits float32 [num_rows, vocab_size] of `hidden` [num_rows, hidden_size]."""
        hidden, rows = hidden.contiguous(), len(hidden)
        assert hidden.dtype == self._dtype and hidden.shape[1] == self._sizes.hidden_size
        logits = torch.empty(rows, self._num_own_logits)
        if rows:
            addresses = {"hidden": hidden.data_ptr(), "logits": logits.data_ptr()}
            self._execute(0, {"outputs": range(rows)}, num_outputs=rows, vocab_size=self._num_own_logits, **addresses)
        return self._ranks.gather(logits, self._vocab_size)

    def find_likeliest(self, logits: Tensor) -> tuple[list[int], list[float]]:
        """Return each row's likeliest token, and the token's log-probability, or NaN if its logit is not finite.

        logits [num_rows, vocab_size]
        """
        logits = logits.float().contiguous()
        rows, size = logits.shape
        tokens, logprobs = torch.empty(rows, dtype=torch.int64), torch.empty(rows)
        addresses = {"logits": logits.data_ptr(), "tokens": tokens.data_ptr(), "logprobs": logprobs.data_ptr()}
        self._execute(16 * rows * -(-size // PART), {}, num_outputs=rows, vocab_size=size, **addresses)
        return tokens.tolist(), logprobs.tolist()

    def _execute(self, num_bytes: int, lists: dict[str, Sequence[int]], **fields: int) -> None:
        """Run a step with `num_bytes` of scratch space. `lists` has the Step's int64 arrays, `fields` the rest."""
        if self._scratch.nbytes < num_bytes:
            self._scratch = torch.empty(0)  # free the old one before allocating more
            self._scratch = torch.empty(num_bytes, dtype=torch.uint8)
        numbers, starts = array("q", NO_STEP), {}  # the step comes first
        for name, values in lists.items():
            starts[name] = 8 * len(numbers)
            numbers.extend(values)
        address, _ = numbers.buffer_info()
        fields |= {name: address + start for name, start in starts.items()}
        work = self._scratch.data_ptr()  # where x is
        for step in self._segments(NO_STEP._replace(work=work, target=work, **fields)):
            numbers[: len(step)] = array("q", step)
            numbers[0] = number = self._helpers.start_step()  # a step begins with its number
            self._run_step(0, number - 1, address, self._model)

    def _segments(self, step: Step) -> Iterator[Step]:
        """Yield the step, or with several ranks each half of a layer. After each, they add up their parts of x."""
        if self._ranks.world_size == 1 or not step.rows:
            yield step
            return
        x = self._scratch[: 4 * step.rows * self._sizes.hidden_size].view(torch.float32)
        part = torch.empty_like(x)
        yield step._replace(end_half=0, hidden=0)  # the embeddings of this rank's tokens
        self._ranks.all_reduce(x)
        for half in range(step.end_half):
            part.zero_()
            yield step._replace(token_ids=0, first_half=half, end_half=half + 1, target=part.data_ptr(), hidden=0)
            self._ranks.all_reduce(part)
            x += part
        yield step._replace(token_ids=0, first_half=step.end_half)  # the last norm, and the logits

    def _check(self, batch: list[Scheduled], token_ids: list[int]) -> None:
        """Assert that all numbers are in range, because kernels do not check bounds."""
        is_in_range = min(token_ids) >= 0 and max(token_ids) < self._vocab_size
        assert is_in_range, f"token ids must be from 0 to {self._vocab_size - 1}, got {token_ids}"
        for length, (seq, _) in zip(end_positions(batch), batch, strict=True):
            slots = len(seq.block_table) * self._shape.block_size
            assert length <= self._max_model_len, f"at most {self._max_model_len} tokens are allowed, got {length}"
            assert length <= slots, f"a context of {length} tokens in {slots} slots"

    def _weights_of(self, model: LlamaForCausalLM) -> Weights:
        config, dtype, rotary = model.config, self._dtype, model.model.rotary_emb
        layers: Any = model.model.layers
        matrices: list[int] = []
        for layer in layers:
            attention, mlp = layer.self_attn, layer.mlp
            qkv, out = self._matrices_of(attention.qkv_proj), self._matrices_of(attention.o_proj)
            matrices += qkv + [0] * (3 * len(out) - len(qkv)) + out  # zeros if q, k and v are one matrix
            matrices += self._matrices_of(mlp.gate_up_proj, 2) + self._matrices_of(mlp.down_proj)
        norms = [norm for layer in layers for norm in (layer.input_layernorm, layer.post_attention_layernorm)]
        qk_norm_layers = layers if config.qk_norm else []
        qk_norms = [norm for layer in qk_norm_layers for norm in (layer.self_attn.q_norm, layer.self_attn.k_norm)]
        return Weights(
            matrices=self._keep(torch.tensor(matrices + self._matrices_of(model.lm_head))),
            norms=self._keep(torch.stack([norm.weight.detach().float() for norm in norms])),
            head_norms=self._keep(torch.stack([norm.weight.detach().float() for norm in qk_norms])) if qk_norms else 0,
            last_norm=self._keep(model.model.norm.weight.detach().float()),
            eps=self._keep(torch.tensor([config.rms_norm_eps], dtype=torch.float32)),
            embedding=0 if config.tie_word_embeddings else model.model.embed_tokens.weight.data_ptr(),
            vocab_size=self._num_own_logits,
            first_token=self._ranks.rank * self._num_own_logits,
            cos=self._keep(rotary.cos.to(dtype)),
            sin=self._keep(rotary.sin.to(dtype)),
            pool=self._blocks.data_ptr(),
        )

    def _matrices_of(self, linear: nn.Module, count: int = 1) -> list[int]:
        """Return MATRIX numbers for each of the `count` matrices that a linear layer stacks, or of its formats."""
        assert isinstance(linear, nn.Linear | QuantizedLinear | MixedLinear)
        is_part = isinstance(linear, RowParallelLinear) and self._ranks.rank > 0  # of a sum whose bias rank 0 adds
        bias = torch.zeros(linear.out_features) if is_part or linear.bias is None else linear.bias.detach()
        bias_address = self._keep(F.pad(bias, (0, COLUMNS)).to(self._dtype))
        layers, count = ([*linear.parts], 1) if isinstance(linear, MixedLinear) else ([linear], count)
        numbers = []
        for layer in layers:
            assert isinstance(layer, nn.Linear | QuantizedLinear)
            outputs = layer.out_features // count
            for first in range(0, layer.out_features, outputs):
                column = first // WIDTH
                if isinstance(layer, nn.Linear):
                    addresses, format = (layer.weight[first:].data_ptr(), 0), 0
                else:
                    addresses = layer.values[column:].data_ptr(), layer.scales[column:].data_ptr()
                    format = int(layer.format)
                numbers += [*addresses, bias_address, format, outputs]
                bias_address += outputs * self._dtype.itemsize
        return numbers

    def _make_workspace(self, workers: int, dtype: torch.dtype) -> Workspace:
        num_layers, _, _, size = self._shape
        job_rows, widest = self._sizes.job_rows, self._sizes.widest

        def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> int:
            return self._keep(torch.zeros(shape, dtype=dtype))

        return Workspace(
            normed=numbers(workers, CHUNK, self._sizes.hidden_size, dtype=dtype),
            tile=numbers(workers, CHUNK, 2 * COLUMNS),
            values=numbers(workers, CHUNK, widest, dtype=torch.int8),
            scales=numbers(workers, CHUNK, -(-widest // GROUP)),
            sums=numbers(workers, CHUNK, -(-widest // GROUP), SUMS),
            heads=numbers(workers, 3 * job_rows + 1, size),
            peaks=numbers(workers, 4, job_rows),
            scratch=numbers(workers, self._sizes.scratch),
            places=numbers(workers, PLACES, dtype=torch.int64),
            counters=numbers(num_layers * PHASES + LAST_PHASES, STRIDE, dtype=torch.int64),
            mailbox=numbers(len(Step._fields), dtype=torch.int64),
        )

    def _keep(self, tensor: Tensor) -> int:
        """Keep a tensor alive, and return its address."""
        self._kept.append(tensor)
        return tensor.data_ptr()


def help_with(run_step: RunStep, model: int, kept: list[Tensor], worker: int, seen: int) -> int:
    """Take part in steps as a helper. `kept` keeps the tensors alive whose addresses the helper uses."""
    return run_step(worker, seen, 0, model)


# Packing


def matrices_of(model: LlamaForCausalLM) -> list[Tensor]:
    """Return the matrices to pack: one for each linear layer, but two for gate_up_proj."""
    matrices: list[Tensor] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            weight = module.weight.detach()
            matrices += weight.chunk(2) if name.endswith("gate_up_proj") else [weight]
    return matrices


def why_unsupported(model: LlamaForCausalLM) -> str | None:
    """Return why kernels cannot compute `model`, or None if they can."""
    for matrix in matrices_of(model):
        outputs, size = matrix.shape
        if size % 2 and type_of(matrix.dtype) == torch.bfloat16:
            return f"a weight of {outputs} x {size} cannot be packed in pairs of columns"
    return None


# Planning


class Plan(NamedTuple):
    """A step as lists of numbers: its tokens, block tables and jobs."""

    token_ids: list[int]  # [num_tokens]
    positions: list[int]  # [num_tokens]
    slots: list[int]  # [num_tokens]; -1 for a decode, whose job writes its key and value
    tables: list[int]  # [num_seqs, max_blocks]
    max_blocks: int
    jobs: list[int]  # [num_jobs, JOB], longest first
    merges: list[int]  # [num_merges, MERGE]
    num_splits: int
    outputs: list[int]  # the last row of each item, or none if a sequence has more tokens to compute
    has_chunks: bool


def plan_step(batch: list[Scheduled], block_size: int, tile: int) -> Plan:
    """Plan a step. A job has up to `tile` queries of a chunk, or up to SPLIT keys of a decode.

    All items of a sequence form one chunk, because the tokens of its draft attend to each other's keys.
    """
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    tables: list[int] = []
    jobs: list[tuple[int, ...]] = []
    merges: list[int] = []
    last_rows: list[int] = []
    item_ends = end_positions(batch)
    num_splits, max_blocks = 0, -(-max(item_ends) // block_size)
    seqs = [(seq, [count for _, count in items]) for seq, items in groupby(batch, key=itemgetter(0))]
    for number, (seq, counts) in enumerate(seqs):
        row, start, table, count = len(token_ids), seq.num_launched_tokens, seq.block_table[:max_blocks], sum(counts)
        end = start + count
        token_ids += seq.input_ids(count) if count > 1 else [seq.input_id(start)]
        positions += range(start, end)
        tables += table + [0] * (max_blocks - len(table))
        last_rows += [row + last - 1 for last in accumulate(counts)]
        if count > 1:
            slots += [table[at // block_size] * block_size + at % block_size for at in range(start, end)]
            starts = range(0, count, tile)
            jobs += [(row + i, min(tile, count - i), number, 0, min(start + i + tile, end), -1, 0) for i in starts]
            continue
        slots.append(-1)
        if end <= SPLIT:
            jobs.append((row, 1, number, 0, end, -1, 1))
            continue
        splits = range(0, end, SPLIT)
        jobs += [
            (row, 1, number, at, min(at + SPLIT, end), num_splits + i, int(at + SPLIT >= end))
            for i, at in enumerate(splits)
        ]
        merges += (row, num_splits, len(splits))
        num_splits += len(splits)
    jobs.sort(key=lambda job: -job[1] * (job[4] - job[3]))
    is_complete = all(end >= seq.num_tokens_with_placeholders for end, (seq, _) in zip(item_ends, batch, strict=True))
    job_numbers = [number for job in jobs for number in job]
    has_chunks = len(token_ids) > len(seqs)
    outputs = last_rows if is_complete else []
    return Plan(token_ids, positions, slots, tables, max_blocks, job_numbers, merges, num_splits, outputs, has_chunks)


# Sampling


def sample_rows(
    logits: Tensor, rows: list[SamplingRow], find_likeliest: Callable[[Tensor], tuple[list[int], list[float]]]
) -> StepOutput:
    """Sample one token for each row of `logits` [num_rows, vocab_size], as the plain sampler does.

    Raise FloatingPointError with the row's number if no token of a row can be sampled.
    """
    if not any(row.params.temperature == 0 for row in rows):
        return sample(logits, rows)
    tokens, logprobs = find_likeliest(logits)
    for i, logprob in enumerate(logprobs):
        if not math.isfinite(logprob):
            raise FloatingPointError(invalid_logits_message(i))
    not_greedy = [i for i, row in enumerate(rows) if row.params.temperature > 0]
    if not_greedy:
        drawn = sample(logits[not_greedy], [rows[i] for i in not_greedy])
        for i, token, logprob in zip(not_greedy, drawn.token_ids, drawn.logprobs, strict=True):
            tokens[i], logprobs[i] = token, logprob
    return StepOutput(tokens, logprobs)
