"""Attention in parts (claim 9), the cost and gain of paging (10), where blocks lie (18), and a roofline (19)."""

import itertools
import mmap
from functools import reduce

import torch
from matplotlib.figure import Figure

from nanovllm.bench.harness import seconds_of
from notebooks.helpers import pictures, s3, size
from notebooks.helpers.claims.contiguous import CONFIG
from notebooks.helpers.claims.findings import Finding, committed, finding, in_words
from notebooks.helpers.pictures import ACCENT, GREY, USED, Line
from stages.bench import locality
from stages.bench.models import STORYTELLER
from stages.s3_paged_attention import LLM, SamplingParams
from stages.s3_paged_attention.online_softmax import merge_attn_states

DECODE = "decode.cases.storyteller_float32"

# ---- softmax in parts


def largest_errors(num_tokens: int) -> dict[tuple[torch.dtype, int], float]:
    """Return the largest relative error of any head and layer for the last token, by dtype and keys per tile."""
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
    shown = {
        f"{name}_{way}": f"{max(errors[dtype, width] for width in widths):.0e}"
        for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16))
        for way, widths in (("tiles", (64, 16)), ("whole", (num_tokens,)))
    }
    holds = float(shown["float32_tiles"]) < 1e-5
    return finding(9, num_tokens=num_tokens, **shown, holds="holds" if holds else "does not hold")


# ---- the cost of paging


def finding_10() -> Finding:
    at_8, lost = map(committed, (f"{DECODE}_8_128.s3_over_s1", "claims.attention.s3_over_s1_4096"))
    paged, pieces = (committed(f"{DECODE}_{key}_ms").value for key in ("32_128.s3", "8_128.s1"))
    speeds = {
        name: committed(f"claims.attention.{key}_bytes_per_second").text("{:.1f}", 1e-9)
        for name, key in (("blocks", "s3_4096"), ("slices", "s1_4096"), ("read", "read"))
    }
    read, slices = (committed(f"claims.attention.{key}_bytes_per_second").value for key in ("read", "s1_4096"))
    return finding(
        10,
        holds_as_worded=slices < read / 2,  # far from the memory's limit
        **speeds,
        at_8=at_8.text(),
        lost=lost.text(),
        gain=(32 / paged) / (8 / pieces),
        costs=in_words(at_8, "costs speed", "costs nothing that the rounds can tell", "gains speed"),
        bandwidth=in_words(lost, "is lost", "is the same within the rounds", "is gained"),
    )


# ---- where blocks lie


def draw_reads(now: dict[str, float]) -> Figure:
    """Draw the time of random reads over reads in order, by piece size: committed, and on this machine."""
    pieces = list(locality.PIECES)
    known = [committed(f"claims.reads.{piece}") for piece in pieces]
    title = (
        f"Random pieces of {pieces[0]} bytes take {known[0].value:.1f} times as long, of {pieces[-1] // 1024} KB "
        f"{known[-1].value:.1f} times"
    )
    fig, (ax,) = pictures.figure(title, height=2.8)
    ax.fill_between(pieces, [t.least for t in known], [t.largest for t in known], color=USED, alpha=0.15)
    lines = [Line(pieces, [t.value for t in known], color=USED, style="o-")]
    lines.append(Line(pieces, [now[str(piece)] for piece in pieces], color=ACCENT, style="s--"))
    pictures.lines(ax, lines, "bytes of a piece, read at once", "random / in order", log="x")
    pictures.legend(ax, {"committed, with its spread": USED, "your machine, now": ACCENT})
    ax.axhline(1, color=GREY, linewidth=0.8)
    ax.set(ylim=(0, None), xticks=pieces, xticklabels=[s3.in_bytes(piece) for piece in pieces], xlim=(50, 4e5))
    ax.yaxis.set_major_formatter("{x:g}")
    return fig


def reads_by_page(num_bytes: int = 2**28, count: int = 2**16) -> dict[str, float]:
    """Return the nanoseconds of a random read of 64 bytes, from memory in pages of 4 KB and of 2 MB.

    A large page needs one entry of the TLB where 512 small ones need one each. The system may refuse large pages.
    """
    if not hasattr(mmap, "MADV_HUGEPAGE"):  # not Linux
        return {}
    rows, start = torch.randperm(num_bytes // 64)[:count], torch.zeros(1, dtype=torch.int64)
    memories, times = {}, dict[str, list[float]]()
    for name, advice in (("4 KB", mmap.MADV_NOHUGEPAGE), ("2 MB", mmap.MADV_HUGEPAGE)):
        area = mmap.mmap(-1, num_bytes)
        area.madvise(advice)
        memories[name] = torch.frombuffer(area, dtype=torch.float32).view(-1, 16).fill_(1)
    for name, memory in [*memories.items()] * 7:  # in turns
        times.setdefault(name, []).append(seconds_of(lambda memory=memory: locality.read(memory, rows, start)))
    return {name: 1e9 * min(seconds) / count for name, seconds in times.items()}


def finding_18(by_page: dict[str, float]) -> Finding:
    known = {block: committed(f"claims.scattered.{block}") for block in (1, 16, 256)}
    small = committed(f"claims.reads.{locality.PIECES[0]}")
    return finding(
        18,
        holds_as_worded=small.least > 1,
        least=locality.PIECES[0],
        small=small.text(),
        scattered=", ".join(f"{t.text()} times as long at block size {block}" for block, t in known.items()),
        pages=" and ".join(f"{ns:.0f} ns from pages of {name}" for name, ns in by_page.items()) or "an unknown time",
        piece=16 * CONFIG.num_key_value_heads * CONFIG.head_dim * 4,
        costs=in_words(known[16], "nothing", "nothing that the rounds can tell", "time"),
    )


# ---- a roofline


def roofline() -> tuple[Figure, Finding]:
    """Draw the committed times of the storyteller's steps under the machine's roof, and return the finding too."""
    arithmetic, bandwidth = (committed(f"claims.roofline.{name}_per_second").value for name in ("operations", "bytes"))
    rows = {f"prefill_{n}": [(n, n)] for n in (32, 128, 512)}
    rows |= {f"decode_{b}_{n}": [(1, n)] * b for b, n in ((1, 128), (8, 128), (32, 128), (32, 960))}
    steps = {
        name: (s3.work(CONFIG, tokens, itemsize=4), committed(f"claims.roofline.{name}_ms").value / 1000)
        for name, tokens in rows.items()
    }
    ridge = arithmetic / bandwidth
    reached = {
        n: work.operations / s / s3.roof(work.intensity, arithmetic, bandwidth) for n, (work, s) in steps.items()
    }
    fig, (ax,) = pictures.figure(f"The ridge of this machine is at {ridge:.1f} operations per byte", height=3.4)
    s3.numbered_roofline(ax, arithmetic, bandwidth, steps)
    prefill, decode = ([share for n, share in reached.items() if n.startswith(kind)] for kind in ("prefill", "decode"))
    shown = "; ".join(f"{s3.in_words(n)} {work.intensity:.1f}, {reached[n]:.0%}" for n, (work, _) in steps.items())
    return fig, finding(
        19,
        steps=shown,
        ridge=ridge,
        longest=steps["prefill_512"][0].intensity,
        prefill=pictures.span(prefill),
        decode=pictures.span(decode),
        holds="holds" if max(prefill) > 0.5 else "is not shown",
        binds="memory binds" if min(decode) > 0.5 else "overhead binds, not memory: a step is many small operations",
    )
