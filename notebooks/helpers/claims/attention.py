"""Attention in parts (claim 9), where blocks lie (18), what a step reads (34), a roofline (19), prefill singly (33)."""

import itertools
from functools import reduce

import torch
from matplotlib.figure import Figure

from notebooks.helpers import pictures, s3, size
from notebooks.helpers.claims.contiguous import CONFIG
from notebooks.helpers.claims.findings import (
    Finding,
    GpuTable,
    Timing,
    committed,
    finding,
    in_words,
    not_measured,
    on_gpu,
)
from notebooks.helpers.pictures import ACCENT, GREY, USED, Line
from stages.bench import locality
from stages.bench.engines import stage
from stages.bench.models import STORYTELLER
from stages.bench.texts import cpp_engine
from stages.bench.texts.paged_attention import softmax_errors
from stages.s3_paged_attention import LLM, SamplingParams
from stages.s3_paged_attention.online_softmax import merge_attn_states

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
    num_tokens, own, shown = size(512, 128), softmax_errors(), dict[str, str]()
    errors = largest_errors(num_tokens)
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        shown[f"{name}_tiles"] = f"{max(errors[dtype, 64], errors[dtype, 16]):.0e}"
        shown[f"{name}_whole"] = f"{errors[dtype, num_tokens]:.0e}"
    return finding(
        9,
        holds_as_worded=max(own["full"], own["masked"]) < 1e-5 < 0.01 < min(own["old"], own["zeros"]),
        num_tokens=num_tokens,
        **shown,
        **{name: f"{error:.1e}" for name, error in own.items()},
        holds="holds" if float(shown["float32_tiles"]) < 1e-5 else "does not hold",
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


def draw_addresses() -> Figure:
    """Draw where the fourth text's loop finds each token's key, in one piece and in scattered blocks."""
    title = f"Each token's key of a head lies {cpp_engine.jump()} behind the one before, paged or not"
    fig, (ax,) = pictures.figure(title, height=2.6)
    colors, lines = {"in one piece": USED, "in scattered blocks": ACCENT}, []
    for color, slot_of in zip(colors.values(), (lambda token: token, cpp_engine.through([5, 2, 7])), strict=True):
        at = [address / 2**20 for address in cpp_engine.addresses(slot_of, 48)]
        lines.append(Line(range(48), at, color=color, style="."))
    pictures.lines(ax, lines, "token", "MB into the layer")
    ax.yaxis.set_major_formatter("{x:g}")
    pictures.legend(ax, colors)
    return fig


def finding_18() -> Finding:
    def least(kind: str, way: str) -> float:
        return committed(f"claims.layer.{kind}_{way}_ms").least

    large, small = (least(kind, "16") / least(kind, "in_order") for kind in locality.PAGES)
    chains = [committed(f"claims.chain.{kind}_ns") for kind in locality.PAGES]
    words = "less time", "as long, as far as the rounds tell", "longer"
    pieces, chain = (in_words(timing, *words) for timing in (committed("claims.reads.64"), ratio_of(*chains)))
    return finding(18, least=locality.PIECES[0], large=large, small=small, pieces=pieces, chain=chain)


def ratio_of(one: Timing, other: Timing) -> Timing:
    """Return how many times as long the other takes, with the widest spread that the two allow."""
    return Timing(other.value / one.value, other.least / one.largest, other.largest / one.least)


def keys_read(reservation: str, prompt: int) -> tuple[int, int]:
    """Return the slots that stage 1 reserves for a prompt, and the keys of a layer that its next step reads."""
    llm = stage("s1").LLM(STORYTELLER, dtype="float32", kv_cache_tokens=2048, reservation=reservation)
    read, observed = llm.kv_cache.read, list[tuple[int, int]]()

    def counted(layer: int, start: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        observed.append((llm.kv_cache_manager.report().held, count))
        return read(layer, start, count)

    llm.kv_cache.read = counted
    llm.generate([[3] * prompt], stage("s1").SamplingParams(temperature=0, max_tokens=2))
    return observed[-1]


def finding_34(prompt: int = 40) -> Finding:
    (large, one), (small, two) = (keys_read(reservation, prompt) for reservation in ("max_model_len", "request"))
    return finding(34, one == two and large > 10 * small, read=one, large=large, small=small)


# ---- a roofline


def roofs() -> tuple[float, float, dict[str, tuple[s3.Work, float]]]:
    """Return the operations and the bytes per second of the machine, and the work and the seconds of each step."""
    arithmetic, bandwidth = (committed(f"claims.roofline.{name}_per_second").value for name in ("operations", "bytes"))
    rows = {f"prefill_{n}": [(n, n)] for n in (32, 128, 512)}
    rows |= {f"decode_{b}_{n}": [(1, n)] * b for b, n in ((1, 128), (8, 128), (32, 128), (32, 960))}
    seconds = {name: committed(f"claims.roofline.{name}_ms").value / 1000 for name in rows}
    works = {name: (s3.work(CONFIG, tokens, itemsize=4), seconds[name]) for name, tokens in rows.items()}
    return arithmetic, bandwidth, works


def draw_roofline() -> Figure:
    """Draw the committed times of the storyteller's steps under the machine's roof."""
    arithmetic, bandwidth, steps = roofs()
    title = f"The ridge of this machine is at {arithmetic / bandwidth:.1f} operations per byte"
    fig, (ax,) = pictures.figure(title, height=3.4)
    s3.numbered_roofline(ax, arithmetic, bandwidth, steps)
    return fig


def finding_19() -> Finding:
    arithmetic, bandwidth, steps = roofs()
    reached = {
        n: work.operations / s / s3.roof(work.intensity, arithmetic, bandwidth) for n, (work, s) in steps.items()
    }
    prefill, decode = ([share for n, share in reached.items() if n.startswith(kind)] for kind in ("prefill", "decode"))
    shown = [f"{s3.in_words(n)} {work.intensity:.1f}, {reached[n]:.0%}" for n, (work, _) in steps.items()]
    gpu = not_measured(6)
    if (one := on_gpu(6, "llama-2-7b")) and (small := on_gpu(6, "tinyllama-1.1b")):
        shares = f"7B {shares_of_floor(one)}; 1.1B {shares_of_floor(small)}"
        gpu = f"{one.machine}, share of the time to read what a step must, at batch 1 and 8: {shares}"
    if roof := on_gpu(4, "The two roofs"):
        gpu += f"; its ridge is at {roof.rows['device']['ridge, operations per byte']:.0f} operations per byte"
    return finding(
        19,
        gpu=gpu,
        steps="; ".join(shown),
        ridge=arithmetic / bandwidth,
        longest=steps["prefill_512"][0].intensity,
        prefill=pictures.span(prefill),
        decode=pictures.span(decode),
        holds="holds" if max(prefill) > 0.5 else "is not shown here",
        binds="memory binds" if min(decode) > 0.5 else "overhead binds, not memory: a step is many small operations",
    )


def shares_of_floor(table: GpuTable) -> str:
    """Return the shares of the floor that decode steps of 1 and of 8 sequences reach."""
    rows = (table.rows.get(f"{count}: share of the floor") for count in ("1 sequence", "8 sequences"))
    return ", ".join(f"{row['nanovllm']:.0%}" if row else "-" for row in rows)


def finding_33(num_tokens: int = 256) -> Finding:
    return finding(33, num_tokens=num_tokens, runs=cpp_engine.forwards(num_tokens, 1))
