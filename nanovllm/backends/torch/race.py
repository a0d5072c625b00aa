"""The exponential race: the token with the largest p / Exp(1) wins, each token with its probability p.

Noise of 1e-5 in the logits almost never changes the winner; inverting the cumulative distribution would shift every
token behind the noise. Nothing is sorted: sorting a row of 128,256 logits takes longer than the rest of the sampler.
"""

import hashlib
import math
from itertools import count
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

CHUNK = 128  # tokens that race as one before they race with each other
PIECE = 32  # tokens that share a maximum in the search for the likeliest ones


class RowParams(NamedTuple):
    """The sampling parameters of each row. All are [num_rows, 1]."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor  # inf: no limit. (Rounding may take a sum of probabilities past 1.)
    key: Tensor  # int64, of its noise


def race_all(logits: Tensor, params: RowParams) -> Tensor:
    """Sample each row from all tokens, or from the fewest whose probabilities sum to top_p.

    A row that draws a token outside of these draws again, from the tokens that are likelier: with top_p 0.9 that is one
    row in ten. logits float32 [num_rows, vocab_size] -> tokens, int64 [num_rows]
    """
    probs = probs_in_chunks(logits, params)  # [num_rows, num_chunks, CHUNK]
    tokens = draw(probs, params.key, attempt=0)
    rows = torch.arange(len(logits), device=logits.device)  # whose tokens may be left out by top_p
    for attempt in count(1):
        if not params.top_p[rows].isfinite().any():
            return tokens
        probs = keep_likelier(probs, tokens[rows])
        before = probs.sum(dim=(1, 2))  # [len(rows)]
        again = ((before >= params.top_p[rows, 0]) & (before > 0)).nonzero().squeeze(1)
        rows, probs = rows[again], probs[again]
        tokens[rows] = draw(probs, params.key[rows], attempt)
    raise AssertionError("count() never ends")


def probs_in_chunks(logits: Tensor, params: RowParams) -> Tensor:
    """Return the probabilities, in chunks of tokens. logits [num_rows, vocab_size] -> [num_rows, num_chunks, CHUNK]"""
    probs = (logits / params.temperature).softmax(dim=-1)
    if logits.shape[1] % CHUNK:
        probs = pad(probs, (0, -logits.shape[1] % CHUNK))
    return probs.view(len(logits), -1, CHUNK)


def draw(probs: Tensor, keys: Tensor, attempt: int) -> Tensor:
    """Let chunks race with the sums of their tokens, then the tokens of the chunk that won.

    This is as exact as a race of all tokens, and needs noise for few of them.
    probs float32 [num_rows, num_chunks, CHUNK], keys [num_rows, 1] -> tokens [num_rows]
    """
    num_rows, num_chunks, _ = probs.shape
    racers = num_chunks + CHUNK
    noise = exponential_noise(keys, attempt * racers + torch.arange(racers, device=probs.device))  # [num_rows, racers]
    chunks = (probs.sum(dim=-1) / noise[:, :num_chunks]).argmax(dim=-1)  # [num_rows]
    within = probs[torch.arange(num_rows, device=probs.device), chunks] / noise[:, num_chunks:]  # [num_rows, CHUNK]
    return chunks * CHUNK + within.argmax(dim=-1)


def keep_likelier(probs: Tensor, tokens: Tensor) -> Tensor:
    """Zero each row's token and all less likely ones. Of equally likely tokens the first counts as the likeliest.

    probs, out [num_rows, num_chunks, CHUNK], tokens [num_rows]
    """
    rows, chunks, places = torch.arange(len(probs), device=probs.device), tokens // CHUNK, tokens % CHUNK
    own = probs[rows, chunks, places].unsqueeze(1)  # [num_rows, 1]
    is_ahead = torch.arange(probs.shape[1], device=probs.device) < chunks.unsqueeze(1)  # [num_rows, num_chunks]
    least = torch.where(is_ahead, own.nextafter(torch.zeros_like(own)), own)  # in chunks ahead, equals come before it
    kept = torch.gt(probs, least.unsqueeze(2), out=torch.empty_like(probs)).mul_(probs)  # 1.0 or 0.0, times probs
    same = probs[rows, chunks]  # [num_rows, CHUNK]
    is_ahead = torch.arange(CHUNK, device=probs.device) < places.unsqueeze(1)
    kept[rows, chunks] += same * ((same == own) & is_ahead)
    return kept


def race_likeliest(logits: Tensor, params: RowParams) -> Tensor:
    """Sample each row from its top_k likeliest tokens, or from the fewest of these whose probabilities sum to top_p.

    logits float32 [num_rows, vocab_size] -> tokens, int64 [num_rows]
    """
    return race_among(likeliest(logits, int(params.top_k.max())), logits, params)


def race_among(tokens: Tensor, logits: Tensor, params: RowParams) -> Tensor:
    """Sample like race_likeliest(), given the likeliest tokens of each row, in order, at least top_k of them.

    tokens int64 [num_rows, k]; logits float32 [num_rows, vocab_size] -> int64 [num_rows]
    """
    rank = torch.arange(tokens.shape[1], device=logits.device)  # [k]
    ordered = (logits.gather(1, tokens) / params.temperature).masked_fill(rank >= params.top_k, -math.inf)
    probs = ordered.softmax(dim=-1)  # [num_rows, k]
    before = probs.cumsum(dim=-1) - probs  # of all likelier tokens
    probs = probs.masked_fill((before >= params.top_p) & (rank > 0), 0)
    winners = (probs / exponential_noise(params.key, tokens)).argmax(dim=-1, keepdim=True)  # [num_rows, 1]
    return tokens.gather(1, winners).squeeze(1)


def likeliest(logits: Tensor, k: int) -> Tensor:
    """Return the k likeliest tokens of each row, the likeliest first, and of equals the first. int64 [num_rows, k]

    They are in the k pieces with the largest maxima, so only these are searched. logits float32 [num_rows, vocab_size]
    """
    if logits.shape[1] % PIECE:
        logits = pad(logits, (0, -logits.shape[1] % PIECE), value=-math.inf)
    maxima = logits.view(len(logits), -1, PIECE).amax(dim=-1)  # [num_rows, num_pieces]
    pieces = first_in_order(maxima, torch.arange(maxima.shape[1], device=logits.device), k)  # [num_rows, at most k]
    places = torch.arange(PIECE, device=logits.device)
    tokens = (pieces.unsqueeze(2) * PIECE + places).flatten(1)  # [num_rows, at most k * PIECE]
    return first_in_order(logits.gather(1, tokens), tokens, k)


def first_in_order(values: Tensor, ids: Tensor, k: int) -> Tensor:
    """Return the ids of the k largest values of each row; of equals the smallest ids.

    values float32, ids int64 [num_rows, n]
    Value and id are packed into one number, sorted like them: the bits of the float above, minus the id below.
    """
    bits = (values + 0.0).view(torch.int32)  # -0.0 becomes 0.0
    bits = (bits ^ (bits >> 31 & 0x7FFFFFFF)).long()  # the bits of negative floats order backwards
    packed = (bits << 32) - ids
    return -packed.topk(min(k, packed.shape[1]), dim=-1).values & 0xFFFFFFFF


def noise_key(seed: int, sample_index: int, position: int) -> int:
    """Return 64 bits that determine all noise of a row, whatever runs beside it and whatever ran before."""
    text = f"{seed},{sample_index},{position}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), signed=True)


def exponential_noise(keys: Tensor, places: Tensor) -> Tensor:
    """Return Exp(1) noise, a function of key and place alone, the same on every device. float32 [num_rows, n]

    The numbers are those of splitmix64 (Steele, Lea and Flood, 2014).
    keys int64 [num_rows, 1], places int64 [n] or [num_rows, n]
    """
    z = keys + (places + 1) * (0x9E3779B97F4A7C15 - 2**64)
    z = (z ^ (z >> 30 & (1 << 34) - 1)) * (0xBF58476D1CE4E5B9 - 2**64)  # & makes >> shift in zeros
    z = (z ^ (z >> 27 & (1 << 37) - 1)) * (0x94D049BB133111EB - 2**64)
    z = z ^ (z >> 31 & (1 << 33) - 1)
    uniform = ((z >> 12 & (1 << 52) - 1).double() + 0.5) * 2.0**-52  # exact, above 0 and below 1
    return -torch.log1p(-uniform).float()
