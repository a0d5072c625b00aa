"""Attention in parts (claim 9), where blocks lie (18), what a step reads (34), a roofline (19), prefill singly (33)."""

import itertools
import math
from functools import reduce

import torch
from matplotlib.figure import Figure

from notebooks.helpers import pictures, s3, size
from notebooks.helpers.claims.contiguous import CONFIG
from notebooks.helpers.claims.findings import Finding, GpuTable, committed, finding, not_measured, on_gpu, under
from notebooks.helpers.pictures import ACCENT, GREY, USED, Line
from stages.bench import locality
from stages.bench.engines import stage
from stages.bench.models import STORYTELLER
from stages.bench.texts import cpp_engine
from stages.bench.texts.paged_attention import softmax_error
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
    num_tokens = size(512, 128)
    errors = largest_errors(num_tokens)
    shown = {
        f"{name}_{way}": f"{max(errors[dtype, width] for width in widths):.0e}"
        for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16))
        for way, widths in (("tiles", (64, 16)), ("whole", (num_tokens,)))
    }
    own = {"full": softmax_error(48, 48), "masked": softmax_error(38, 38), "old": softmax_error(38, 48)}
    own["zeros"] = softmax_error(38, 48, 0.0)
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


def draw_addresses(num_tokens: int = 48) -> Figure:
    """Draw where the fourth text's loop finds each token's key, in one piece and in scattered blocks."""
    table = [5, 2, 7]
    jump = cpp_engine.addresses(lambda token: token, 2)[1] // 1024
    title = f"Each token's key of a head lies {jump} KB behind the one before, paged or not"
    fig, (ax,) = pictures.figure(title, height=2.6)
    series = {"in one piece": lambda token: token, "in scattered blocks": cpp_engine.through(table)}
    colors = dict(zip(series, (USED, ACCENT), strict=True))
    at = {name: [a / 2**20 for a in cpp_engine.addresses(slot_of, num_tokens)] for name, slot_of in series.items()}
    lines = [Line(range(num_tokens), at[name], color=colors[name], style=".") for name in at]
    pictures.lines(ax, lines, "token", "MB into the layer")
    ax.yaxis.set_major_formatter("{x:g}")
    pictures.legend(ax, colors)
    return fig


def finding_18() -> Finding:
    small, layer = committed(f"claims.reads.{locality.PIECES[0]}"), under("claims.layer") or {}
    least = {
        (kind, way): layer.get(f"{kind}_{way}_ms_spread", [math.nan])[0]
        for kind in locality.PAGES
        for way in ("in_order", "256", "16", "1")
    }
    known = {block: committed(f"claims.scattered.{block}") for block in (1, 16, 256)}
    chain = [committed(f"claims.chain.{kind}_ns").text("{:.0f}") for kind in locality.PAGES]
    ratio = min(least[kind, "16"] / least[kind, "in_order"] for kind in locality.PAGES)
    return finding(
        18,
        pieces=small.text(),
        least=locality.PIECES[0],
        layer="; ".join(
            f"pages of {kind}: " + ", ".join(f"{least[kind, way]:.1f}" for way in ("in_order", "256", "16", "1"))
            for kind in locality.PAGES
        ),
        huge=f"{layer.get('2 MB_huge_kb', 0):,} KB of the keys",
        chain=" and ".join(f"{ns} ns from pages of {kind}" for ns, kind in zip(chain, locality.PAGES, strict=True)),
        scattered=", ".join(f"{t.text()} times as long at block size {block}" for block, t in known.items()),
        costs="costs time" if ratio > 1.1 else "costs nothing that this machine shows",
        by=ratio,
    )


def keys_read(reservation: str, prompt: int) -> tuple[int, int]:
    """Return the slots that stage 1 reserves for a prompt, and the keys of a layer that its next step reads."""
    llm = stage("s1").LLM(STORYTELLER, dtype="float32", kv_cache_tokens=2048, reservation=reservation)
    read, counts, observed = llm.kv_cache.read, list[int](), list[int]()

    def counted(layer: int, start: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        counts.append(count)
        observed.append(llm.kv_cache_manager.report().held)
        return read(layer, start, count)

    llm.kv_cache.read = counted
    llm.generate([[3] * prompt], stage("s1").SamplingParams(temperature=0, max_tokens=2))
    return observed[-1], counts[-1]


def finding_34(prompt: int = 40) -> Finding:
    (large, one), (small, two) = (keys_read(reservation, prompt) for reservation in ("max_model_len", "request"))
    return finding(34, one == two and large > 10 * small, read=one, large=large, small=small)


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
    share = not_measured(6)
    if (one := on_gpu(6, "llama-2-7b")) and (small := on_gpu(6, "tinyllama-1.1b")):
        shares = [
            f"{name} {', '.join(share_of_floor(table, count) for count in (1, 8))}"
            for name, table in (("7B", one), ("1.1B", small))
        ]
        share = f"{one.machine}, share of the time to read what a step must, at batch 1 and 8: {'; '.join(shares)}"
    if ridge_gpu := on_gpu(4, "The two roofs"):
        share += f"; its ridge is at {ridge_gpu.rows['device']['ridge, operations per byte']:.0f} operations per byte"
    return fig, finding(
        19,
        gpu=share,
        steps=shown,
        ridge=ridge,
        longest=steps["prefill_512"][0].intensity,
        prefill=pictures.span(prefill),
        decode=pictures.span(decode),
        holds="holds" if max(prefill) > 0.5 else "is not shown here",
        binds="memory binds" if min(decode) > 0.5 else "overhead binds, not memory: a step is many small operations",
    )


def share_of_floor(table: GpuTable, count: int) -> str:
    """Return the share of the floor that decode steps of so many sequences reach."""
    row = table.rows.get(f"{count} sequence{'s' * (count > 1)}: share of the floor")
    return f"{row['nanovllm']:.0%}" if row else "-"


def finding_33(num_tokens: int = 256) -> Finding:
    ratio = committed("claims.singly.singly_over_at_once")
    return finding(33, num_tokens=num_tokens, runs=cpp_engine.forwards(num_tokens, 1), ratio=ratio.text("{:.0f}"))
