"""Attention in parts (claim 9), what paging costs and buys (10), where blocks lie (18), a roofline (19)."""

import itertools
from functools import reduce

import torch
from matplotlib.figure import Figure

from notebooks.helpers import pictures, s3, size
from notebooks.helpers.claims.reservations import CONFIG
from notebooks.helpers.claims.table import BLOG, LAYOUT, SOLVES, Finding, Timing, committed, in_words
from notebooks.helpers.pictures import ACCENT, GREY, USED, Line
from stages.bench import locality
from stages.bench.models import STORYTELLER
from stages.s3_paged_attention import LLM, SamplingParams
from stages.s3_paged_attention.online_softmax import merge_attn_states

# ---- softmax in parts


def largest_errors(num_tokens: int) -> dict[tuple[torch.dtype, int], float]:
    """Return the largest relative error of any head and layer for the last token, by dtype and keys of a tile."""
    llm = LLM(STORYTELLER, dtype="float32", kv_cache_tokens=1024)
    recorder = s3.record(llm)
    llm.generate([[3 + 7 * i % 4000 for i in range(num_tokens)]], SamplingParams(temperature=0, max_tokens=1))
    looks, errors = s3.looks_back(recorder.inputs), dict[tuple[torch.dtype, int], float]()
    for dtype, width in itertools.product((torch.float32, torch.bfloat16), (num_tokens, 64, 16)):
        worst = 0.0
        for look in looks.values():
            q, k, v = (x.to(dtype) for x in look)
            right = (q.double() @ k.double().transpose(2, 3) / CONFIG.head_dim**0.5).softmax(-1) @ v.double()
            tiles = zip(k.split(width, 2), v.split(width, 2), strict=True)
            out = reduce(merge_attn_states, (s3.attend(q, keys, values) for keys, values in tiles)).out
            worst = max(worst, ((out - right).norm() / right.norm()).item())
        errors[dtype, width] = worst
    return errors


def finding_9() -> Finding:
    num_tokens = size(512, 128)
    errors = largest_errors(num_tokens)
    tiles = {dtype: max(errors[dtype, width] for width in (64, 16)) for dtype in (torch.float32, torch.bfloat16)}
    whole = {dtype: errors[dtype, num_tokens] for dtype in tiles}
    return Finding(
        9,
        "online softmax over blocks equals softmax over the whole row",
        (BLOG,),
        f"every head of every layer of the storyteller, {num_tokens} keys, tiles of 16 and 64, against 64-bit numbers",
        f"largest error in tiles {tiles[torch.float32]:.0e}, in one piece {whole[torch.float32]:.0e} (float32); "
        f"{tiles[torch.bfloat16]:.0e} and {whole[torch.bfloat16]:.0e} (bfloat16)",
        "holds, but for rounding" if tiles[torch.float32] < 1e-5 else "does not hold",
    )


# ---- what paging costs


def finding_10() -> Finding:
    at_8 = committed("decode.cases.storyteller_float32_8_128.s3_over_s1")
    ms = {batch: committed(f"decode.cases.storyteller_float32_{batch}_128.s3_ms").value for batch in (8, 32)}
    of_s1 = committed("decode.cases.storyteller_float32_8_128.s1_ms").value
    speed, slices = (committed(f"claims.attention.{name}_4096_bytes_per_second") for name in ("s3", "s1"))
    lost = committed("claims.attention.s3_over_s1_4096")
    buys = (32 / ms[32]) / (8 / of_s1)
    return Finding(
        10,
        "paged costs about 4% of throughput at batch 8 (1,247 and 1,198 tok/s) and 15-30% of effective bandwidth, "
        "and buys "
        "2-4x by larger batches",
        (LAYOUT,),
        "a decode step of 8 sequences, stages 1 and 3 in turns; attention alone of 8 times 4,096 tokens; 32 "
        "sequences in "
        "blocks against 8 in pieces",
        f"stage 3 is {at_8.text()} times as fast at batch 8; attention alone reads {speed.text('{:.1f}', 1e-9)} GB/s "
        f"from blocks, {slices.text('{:.1f}', 1e-9)} from slices: {lost.text()} times as fast; a batch of 32 gives "
        f"{buys:.1f} "
        "times the tokens a second of a batch of 8",
        f"at batch 8 {in_words(at_8, 'it costs', 'nothing that the rounds can tell', 'it gains')}; "
        f"bandwidth {in_words(lost, 'is lost', 'is the same within the rounds', 'is gained')} where a tile is copied "
        "before "
        f"it is read; the larger batch buys {buys:.1f} times. On a GPU: make gpu PART=2",
    )


# ---- where blocks lie


def draw_reads(now: dict[str, float] | None) -> Figure:
    """Random over in a row, by piece size: as committed, with the spread, and of this machine now."""
    pieces = list(locality.PIECES)
    known = {piece: committed(f"claims.reads.{piece}") for piece in pieces}
    title = (
        f"Random pieces of {pieces[0]} bytes take {known[pieces[0]].value:.1f} times as long, of "
        f"{pieces[-1] // 1024} KB {known[pieces[-1]].value:.1f} times"
    )
    fig, (ax,) = pictures.figure(title, height=2.8)
    ax.fill_between(
        pieces, [t.least for t in known.values()], [t.largest for t in known.values()], color=USED, alpha=0.15
    )
    lines = [Line(pieces, [t.value for t in known.values()], "", USED, style="o-")]
    if now:
        lines.append(Line(pieces, [now[str(piece)] for piece in pieces], "", ACCENT, style="s--"))
    pictures.lines(ax, lines, "bytes of a piece, read in one go", "random / in a row", log="x")
    pictures.legend(ax, {"committed, and its spread": USED, **({"your machine, now": ACCENT} if now else {})})
    ax.axhline(1, color=GREY, linewidth=0.8)
    ax.set(ylim=(0, None), xticks=pieces, xticklabels=[s3.in_bytes(piece) for piece in pieces], xlim=(50, 4e5))
    ax.yaxis.set_major_formatter("{x:g}")
    return fig


def draw_scattered(sizes: tuple[int, ...] = (1, 4, 16, 64, 256)) -> Figure:
    """Stage 3's attention, scattered over in a row, by block size, with the spread of the rounds."""
    known = {block: committed(f"claims.scattered.{block}") for block in sizes}
    apart = [str(block) for block, timing in known.items() if not timing.is_one]
    finding = (
        f"Scattered or in a row: apart with blocks of {' and '.join(apart)}"
        if apart
        else "Scattered or in a row: the same"
    )
    fig, (ax,) = pictures.figure(f"{finding}, as far as the rounds tell", height=2.7)
    values = [timing.value for timing in known.values()]
    low, high = ([abs(t[i] - t.value) for t in known.values()] for i in (1, 2))
    ax.errorbar(sizes, values, [low, high], fmt="o", color=USED, capsize=4, linewidth=1.4)
    ax.axhline(1, color=GREY, linewidth=0.8)
    ax.set(xscale="log", xlabel="block size", ylabel="scattered / in a row", ylim=(0, None))
    s3.ticks_at(ax.xaxis, sizes)
    ax.yaxis.set_major_formatter("{x:g}")
    return fig


def finding_18() -> Finding:
    known = {block: committed(f"claims.scattered.{block}") for block in (1, 16, 256)}
    small = committed(f"claims.reads.{locality.PIECES[0]}")
    piece = 16 * CONFIG.num_key_value_heads * CONFIG.head_dim * 4
    at_16 = in_words(known[16], "no dearer", "the same within the rounds", "dearer")
    return Finding(
        18,
        "blocks in random order cost a CPU its prefetching and address look-asides dearly; block size trades this off",
        (SOLVES,),
        "reads beyond the caches, random against in a row, by piece size; stage 3's attention, 8 times 960 tokens, "
        "blocks "
        "in a row and dealt out at random, in turns",
        f"reads: pieces of {locality.PIECES[0]} bytes {small.text()} times as long. Attention, scattered: "
        + ", ".join(f"{t.text()} times with blocks of {block}" for block, t in known.items()),
        f"true of small pieces; a block of 16 is read in pieces of {piece:,} bytes a layer, and there it is {at_16}",
    )


# ---- a roofline


def roofline() -> tuple[Figure, Finding]:
    """Draw a roofline from the committed times of the storyteller's steps, and return it with its finding."""
    arithmetic, bandwidth = (committed(f"claims.roofline.{name}_per_second") for name in ("operations", "bytes"))
    steps, ridge = committed_steps(), arithmetic.value / bandwidth.value
    reached = {n: share_of_roof(work, ms, arithmetic.value, bandwidth.value) for n, (work, ms) in steps.items()}
    left = [name for name, (work, _) in steps.items() if work.intensity < ridge]
    fig, (ax,) = pictures.figure(
        f"The ridge is at {ridge:.1f} operations a byte; {len(left)} of {len(steps)} steps are left of it", height=3.4
    )
    s3.numbered_roofline(ax, arithmetic.value, bandwidth.value, {n: (w, t.value / 1000) for n, (w, t) in steps.items()})
    found = "; ".join(f"{s3.in_words(n)} {steps[n][0].intensity:.1f} and {reached[n]:.0%}" for n in steps)
    finding = Finding(
        19,
        "prefill is bound by arithmetic, decode by memory",
        (SOLVES,),
        "operations and bytes of stage 3's steps counted, times committed, beside the speed of large matrices and of "
        "one large read, float32, one thread",
        f"operations a byte, and the share of the roof: {found}; the ridge is at {ridge:.1f}",
        f"{'holds' if not [n for n in left if n.startswith('prefill')] else 'does not hold'} for prefill; for decode "
        f"with few sequences ({'; '.join(s3.in_words(n) for n in left)}); a large batch on a processor with so little "
        "arithmetic is right of the ridge. A GPU's ridge is at some hundreds: make gpu PART=4",
    )
    return fig, finding


def committed_steps() -> dict[str, tuple[s3.Work, Timing]]:
    """Steps of the storyteller: what they compute and read, and how long they took."""
    rows = {f"prefill_{n}": [(n, n)] for n in (32, 128, 512)}
    rows |= {f"decode_{b}_{n}": [(1, n)] * b for b, n in ((1, 128), (8, 128), (32, 128), (32, 960))}
    return {
        name: (s3.work(CONFIG, tokens, itemsize=4), committed(f"claims.roofline.{name}_ms"))
        for name, tokens in rows.items()
    }


def share_of_roof(work: s3.Work, ms: Timing, arithmetic: float, bandwidth: float) -> float:
    return work.operations / (ms.value / 1000) / s3.roof(work.intensity, arithmetic, bandwidth)
