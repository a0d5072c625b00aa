"""Plain references to compare with: attention, greedy decoding and sampling without a cache, computed from scratch."""

import math
from collections import abc
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ... import SamplingParams
from ...backends.torch.sampler import sample
from ...checkpoints.stream_decoder import StreamDecoder
from ...checkpoints.tokenizer import HFTokenizer
from ...engine.kv_cache import KVCache
from ...llama import LlamaForCausalLM
from ...requests.logits_processors import bad_words_token_ids
from ...requests.tokens import SamplingRow

OUT = -float("inf")


def attend_without_cache(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return the attention of one whole text: softmax over each token's own past, without a cache.

    q, out [num_tokens, num_heads, head_dim]; k, v [num_tokens, num_kv_heads, head_dim]
    """
    num_tokens, num_heads, head_dim = q.shape
    k, v = (x.repeat_interleave(num_heads // x.shape[1], dim=1) for x in (k, v))  # [num_tokens, num_heads, head_dim]
    scores = torch.einsum("qhd,khd->hqk", q, k) * head_dim**-0.5
    future = torch.ones(num_tokens, num_tokens, dtype=torch.bool).triu(1)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(future, float("-inf")).softmax(dim=-1), v)


@torch.inference_mode()
def next_logits(model: LlamaForCausalLM, token_ids: list[int]) -> Tensor:
    """Return the logits of the token after `token_ids`, [vocab_size], computed from scratch."""
    hidden = model(torch.tensor(token_ids), torch.arange(len(token_ids)), attend_without_cache)
    return model.compute_logits(hidden[-1:])[0]


def greedy_without_cache(model: LlamaForCausalLM, prompt: list[int], num_tokens: int) -> list[int]:
    """Return the greedy output for `prompt`, computed from scratch for each token. No token may be close to a tie."""
    token_ids = list(prompt)
    for _ in range(num_tokens):
        logits = next_logits(model, token_ids)
        best, second = logits.topk(2).values
        assert best - second > 1e-3 * logits.std(), f"a tie after {token_ids}: choose another prompt"
        token_ids.append(int(logits.argmax()))
    return token_ids[len(prompt) :]


def attend_block_by_block(q: Tensor, kv_cache: KVCache, layer: int, block_table: list[int], context_len: int) -> Tensor:
    """Return one token's attention as in FlashAttention, to test against. q, out [num_heads, head_dim]."""
    num_kv_heads, head_dim = kv_cache.blocks.shape[-2:]
    q = q.float().view(num_kv_heads, -1, head_dim)  # [num_kv_heads, group, head_dim]
    highest = torch.full(q.shape[:2], float("-inf"), device=q.device)  # highest score so far, [num_kv_heads, group]
    total, out = (
        torch.zeros_like(highest),
        torch.zeros_like(q),
    )  # sums of exp(score - highest), without and with the values
    for i, block in enumerate(block_table[: -(-context_len // kv_cache.block_size)]):
        k, v = kv_cache.blocks[block, layer, :, : context_len - i * kv_cache.block_size].float().transpose(1, 2)
        scores = q @ k.transpose(1, 2) / math.sqrt(head_dim)  # [num_kv_heads, group, slots of the block]
        before, highest = highest, torch.maximum(highest, scores.amax(-1))
        weights, shrink = (scores - highest.unsqueeze(-1)).exp(), (before - highest).exp()
        total = total * shrink + weights.sum(-1)
        out = out * shrink.unsqueeze(-1) + weights @ v
    return (out / total.unsqueeze(-1)).flatten(0, 1)


# Sampling


@dataclass
class Expected:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Tensor] = field(
        default_factory=list
    )  # for each output token, the raw logprobs of all tokens [vocab_size]
    text: str = ""
    finish_reason: str | None = None
    stop_reason: str | int | None = None


def expected_output(
    model: LlamaForCausalLM, tokenizer: HFTokenizer, room: int, prompt: list[int], params: SamplingParams, index: int
) -> Expected:
    """Return the expected sample `index`. `room` limits its length, and `params` have a seed."""
    expected = Expected()
    decoder = StreamDecoder(tokenizer, prompt)
    words = bad_words_token_ids(params.bad_words, tokenizer, model.config.vocab_size)
    eos = model.config.eos_token_ids[0]
    while not expected.finish_reason:
        raw = next_logits(model, prompt + expected.token_ids)
        how = SamplingParams(temperature=params.temperature, top_k=params.top_k, top_p=params.top_p)
        row = SamplingRow(how, params.seed, index, position=len(prompt) + len(expected.token_ids))
        logits = sampled_from(raw, params, prompt, expected.token_ids, words, eos)
        if logits.max() == OUT:
            expected.finish_reason = "error"
            break
        [token_id] = sample(logits.unsqueeze(0), [row]).token_ids
        assert token_id in nucleus(logits, params)
        expected.token_ids.append(token_id)
        expected.logprobs.append(raw.log_softmax(-1))
        end(expected, params, decoder, eos, room)
    return expected


def sampled_from(
    raw: Tensor, params: SamplingParams, prompt: list[int], output: list[int], words: list[list[int]], eos: int
) -> Tensor:
    """Return the logits after all processors, one token at a time: [vocab_size], as `raw`."""
    logits = raw.tolist()
    banned = {word[-1] for word in words if [*output, word[-1]][-len(word) :] == word}
    if len(output) < params.min_tokens:
        banned |= {eos, *params.stop_token_ids}
    for token_id in range(len(logits)):
        allowed = params.allowed_token_ids is None or token_id in params.allowed_token_ids
        if not allowed or token_id in banned:
            logits[token_id] = OUT
        logits[token_id] += (params.logit_bias or {}).get(token_id, 0.0)
        if token_id in prompt + output:
            penalty = params.repetition_penalty
            logits[token_id] *= 1 / penalty if logits[token_id] > 0 else penalty
        count = output.count(token_id)
        logits[token_id] -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
    weighed = torch.tensor(logits)
    if params.temperature:
        probs = (weighed / params.temperature).softmax(-1)
        weighed[probs < params.min_p * probs.max()] = OUT
    return weighed


def nucleus(logits: Tensor, params: SamplingParams) -> list[int]:
    """Return the tokens that may be sampled: top_k, then top_p of the rest. logits [vocab_size]."""
    kept = logits.argsort(descending=True, stable=True).tolist()[: params.top_k or None]
    if params.temperature == 0:
        return kept[:1]
    probs, total = (logits[kept] / params.temperature).softmax(-1).tolist(), 0.0
    match: list[int] = []
    for token_id, prob in zip(kept, probs, strict=True):
        if total >= params.top_p and match and params.top_p < 1:
            break
        match.append(token_id)
        total += prob
    return match


def end(expected: Expected, params: SamplingParams, decoder: StreamDecoder, eos: int, room: int) -> None:
    """Add the last token's text, and finish the output if it ends here."""
    last, num_tokens = expected.token_ids[-1], len(expected.token_ids)
    is_stop = last in params.stop_token_ids or (last == eos and not params.ignore_eos)
    before = len(expected.text)
    if params.detokenize and (not is_stop or params.include_stop_str_in_output):
        expected.text += decoder.push([last])
    match = first_stop(expected.text, before, params.stop) if num_tokens > params.min_tokens else None
    if match:
        start, stop = match
        expected.text = expected.text[: start + len(stop) * params.include_stop_str_in_output]
        expected.finish_reason, expected.stop_reason = "stop", stop
    elif is_stop:
        expected.finish_reason, expected.stop_reason = "stop", None if last == eos else last
    elif num_tokens == min(room, params.max_tokens or room):
        expected.finish_reason = "length"
    elif num_tokens >= params.min_tokens and ends_in_a_loop(expected.token_ids, params):
        expected.finish_reason, expected.stop_reason = "repetition", "repetition_detected"
    if expected.finish_reason and not match and params.detokenize:
        expected.text += decoder.flush()


def first_stop(text: str, before: int, stops: abc.Sequence[str]) -> tuple[int, str] | None:
    """Return the start of the first stop string that is complete after `before` characters, and the string."""
    for length in range(before + 1, len(text) + 1):
        for stop in stops:
            if text[:length].endswith(stop):
                return length - len(stop), stop
    return None


def ends_in_a_loop(token_ids: list[int], params: SamplingParams) -> bool:
    if (detection := params.repetition_detection) is None:
        return False
    for size in range(detection.min_pattern_size or 1, detection.max_pattern_size + 1):
        pieces = [token_ids[len(token_ids) - size * (i + 1) :][:size] for i in range(detection.min_count)]
        if len(token_ids) >= size * detection.min_count and all(piece == pieces[0] for piece in pieces):
            return True
    return False
