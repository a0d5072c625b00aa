"""nanovllm inspect: calculate parameters, bytes, and how many sequences fit, without reading weights."""

import json
import os
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import click

from ..checkpoints import sizes
from ..checkpoints.known import KNOWN
from ..checkpoints.sizes import show_bytes, show_seconds
from ..options.config import QUANTIZATIONS
from .click_options import SIZE, choose_model, model_argument, usage_errors

TIERS = {  # bytes per second, one way, at best: datasheets, not measurements
    "NVLink 4": 450e9,
    "PCIe 5.0 x16": 63e9,
    "network, 400 Gb/s": 50e9,
    "PCIe 4.0 x16": 32e9,
    "NVMe, PCIe 4.0": 7e9,
}
DEFAULT_LENGTHS = (256, 1024, 4096, 16384, 65536)
DIMENSION_NAMES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")


def print_names(context: click.Context, _: click.Parameter, is_given: bool) -> None:
    if is_given:
        click.echo("\n".join([*sizes.SHAPES, *KNOWN]))
        context.exit()


@click.command()
@model_argument
@click.option("--model", help="the same as MODEL")
@click.option("--list", is_flag=True, is_eager=True, expose_value=False, callback=print_names, help="list known models")
@click.option("--revision", help="branch, tag or commit of a model on the hub")
@click.option(
    "--dtype",
    type=click.Choice(["auto", *sizes.DTYPE_BYTES]),
    default="auto",
    show_default=True,
    help="type of weights, keys and values; auto: the model's own on a GPU, float32 on a CPU",
)
@click.option(
    "--weight-bits",
    type=click.FloatRange(1, 32),
    help="bits per weight of a quantized checkpoint, such as 4; default: the size of --dtype",
)
@click.option(
    "--quantization",
    type=click.Choice(QUANTIZATIONS),
    help="quantize the weights while they load; excludes --weight-bits",
)
@click.option(
    "--kv-cache-dtype",
    type=click.Choice(["auto", "int8", "fp8"]),
    default="auto",
    show_default=True,
    help="type of keys and values; auto: same as --dtype",
)
@click.option("--memory", metavar="SIZE", help="memory such as 24GiB; default: this machine's GPU, or else its RAM")
@click.option(
    "--gpu-memory-utilization",
    "share",
    type=click.FloatRange(0, 1, min_open=True),
    default=0.9,
    show_default=True,
    help="share of the memory for weights and KV cache; the rest is for activations",
)
@click.option("--block-size", type=click.IntRange(min=1), default=16, show_default=True, help="tokens in a block")
@click.option("--max-model-len", type=SIZE, help="longest prompt plus output; default: the model's own limit")
@click.option(
    "--length", "lengths", type=SIZE, multiple=True, help="length of the sequences; may be given several times"
)
@click.option("--bandwidth", metavar="SIZE", help="memory bandwidth such as 3.35TB/s, to estimate the time of a step")
@click.option("--tiers", is_flag=True, help="estimate how long a block and a sequence take over each kind of link")
@click.option("--json", "as_json", is_flag=True, help="print the numbers as JSON")
def inspect(name: str | None, model: str | None, revision: str | None, as_json: bool, **options: Any) -> int:
    """Calculate how much memory a model needs, and how many sequences fit in the rest.

    MODEL is a checkpoint folder, a GGUF file, a config.json, a model on the hub, or a known name (--list). No weights
    are read. A contiguous sequence reserves max_model_len slots. In blocks, it takes only the slots that it fills.
    """
    model = choose_model(name, model or "")
    if not model:
        raise click.UsageError("MODEL is missing: a folder, a file, a model on the hub, or one of --list")
    with usage_errors():
        dimensions, tensor_types = find_model(model, revision)
        report = make_report(dimensions, **options) | ({"tensor_types": tensor_types} if tensor_types else {})
        click.echo(json.dumps({"model": model} | report, indent=2) if as_json else "\n".join(as_table(model, report)))
    return 0


def find_model(model: str, revision: str | None) -> tuple[sizes.Dimensions, dict[str, int]]:
    """Return the dimensions of a model, and how many tensors of each type a GGUF file has.

    Raise ValueError if `model` is neither a checkpoint nor a known name.
    """
    if not os.path.exists(model) and model.lower() in sizes.SHAPES:
        return sizes.SHAPES[model.lower()], {}
    if not os.path.exists(model) and "/" not in model and not model.endswith(".gguf") and model not in KNOWN:
        similar_names = get_close_matches(model.lower(), [*sizes.SHAPES, *KNOWN], n=1)
        hint = f"did you mean {similar_names[0]}?" if similar_names else "--list prints the known models"
        raise ValueError(
            f"the folder {Path(model).absolute()} does not exist, and {model} is not a known model: {hint}"
        )

    from ..checkpoints.entries import Entries
    from ..checkpoints.gguf import tensor_types
    from ..checkpoints.hub import find_config
    from ..checkpoints.model_config import model_config

    path = find_config(model, revision)
    return model_config(Entries.read(path), Entries({}, path)), tensor_types(path.parent)


# The numbers


def make_report(
    model: sizes.Dimensions,
    dtype: str,
    weight_bits: float | None,
    quantization: str | None,
    kv_cache_dtype: str,
    memory: str | None,
    share: float,
    block_size: int,
    max_model_len: int | None,
    lengths: tuple[int, ...],
    bandwidth: str | None,
    tiers: bool,
) -> dict[str, Any]:
    """Return the numbers that --json prints. `share` is the part of the memory for weights and KV cache.

    Raise ValueError for an invalid value.
    """
    available = sizes.Memory(sizes.parse_size(memory), "given", True) if memory else sizes.find_memory()
    if dtype == "auto":  # the rule of EngineConfig.torch_dtype()
        dtype = model.dtype if available.is_gpu and model.dtype in sizes.DTYPE_BYTES else "float32"
    limit = min(model.max_position_embeddings, model.sliding_window or model.max_position_embeddings)
    max_model_len = limit if max_model_len is None else max_model_len
    if (shortest := min((max_model_len, *lengths))) < 1:
        raise ValueError(f"--max-model-len and --length must be at least 1, got {shortest}")
    if max_model_len > limit:
        raise ValueError(f"max_model_len is {max_model_len}, but the model's limit is {limit}")
    if max(lengths, default=0) > max_model_len:
        raise ValueError(f"length must be at most {max_model_len}, the max_model_len, got {max(lengths)}")
    if quantization is not None:
        if weight_bits is not None:
            raise ValueError("--weight-bits and --quantization exclude each other: use only one")
        weight_bits = sizes.weight_bits(model, quantization, sizes.DTYPE_BYTES[dtype])
    shares = int(share * available.size), block_size, max_model_len, weight_bits
    fit = sizes.Fit(model, sizes.DTYPE_BYTES[dtype], *shares, kv_cache_dtype)
    bytes_per_second = sizes.parse_size(bandwidth) if bandwidth else None
    if bytes_per_second == 0:
        raise ValueError("bandwidth must be above 0, got 0")
    lengths = lengths or (*(length for length in DEFAULT_LENGTHS if length < max_model_len), max_model_len)
    parameter_counts = sizes.parameters(model)
    report = {
        **{name: getattr(model, name) for name in (*DIMENSION_NAMES, "max_position_embeddings")},
        "parameters": {**parameter_counts, "total": sum(parameter_counts.values())},
        "weight_bytes": {name: size * sum(parameter_counts.values()) for name, size in sizes.DTYPE_BYTES.items()},
        "dtype": dtype,
        "weight_bits": weight_bits or 8 * fit.itemsize,
        "kv_cache_dtype": kv_cache_dtype if kv_cache_dtype in ("int8", "fp8") else dtype,
        "kv_bytes_per_token": fit.slot_bytes,
        "block_size": block_size,
        "kv_bytes_per_block": fit.block_bytes,
        "memory": {
            "of": available.source,
            "bytes": available.size,
            "share": share,
            "weights_and_pool": fit.room,
            "weights": fit.weight_bytes,
        },
        "fits": fit.room >= fit.weight_bytes + fit.block_bytes,
        "num_blocks": fit.num_blocks,
        "num_slots": fit.num_slots,
        "max_model_len": max_model_len,
        "sliding_window": model.sliding_window,
        "sequences": [sequences_that_fit(fit, length, bytes_per_second) for length in lengths],
    }
    report |= {"tiers": [tier(fit, name, max(lengths)) for name in TIERS]} if tiers else {}
    return report | ({"seconds_per_token_alone": fit.step_bytes(1, 0) / bytes_per_second} if bytes_per_second else {})


def tier(fit: sizes.Fit, name: str, length: int) -> dict[str, Any]:
    """Return the least time of a block, and of the blocks of a sequence, over a link."""
    seconds = fit.block_bytes / TIERS[name]
    row = {"link": name, "bytes_per_second": TIERS[name], "length": length, "block_seconds": seconds}
    return row | {"sequence_seconds": seconds * -(-length // fit.block_size)}


def sequences_that_fit(fit: sizes.Fit, length: int, bandwidth: int | None) -> dict[str, Any]:
    """Return how many sequences of `length` tokens fit, contiguous and in blocks.

    With `bandwidth` in bytes/s, also return the minimum time of a step with as many as fit in blocks, and its speed.
    """
    num_in_blocks = fit.paged(length)
    row: dict[str, Any] = {"length": length, "contiguous": fit.contiguous, "paged": num_in_blocks}
    if bandwidth:
        seconds = fit.step_bytes(max(num_in_blocks, 1), length) / bandwidth
        row |= {"step_seconds": seconds, "tokens_per_second": num_in_blocks / seconds}
    return row


# The table


def as_table(model: str, report: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of a table of at most 80 columns."""
    yield model
    layers, hidden, heads, kv_heads, head_dim = (report[name] for name in DIMENSION_NAMES)
    yield f"  {layers} layers of {hidden:,}, {heads} heads and {kv_heads} KV heads of {head_dim}"
    window = f" (a sliding window of {report['sliding_window']:,})" if report["sliding_window"] else ""
    yield f"  {report['max_position_embeddings']:,} positions{window}, max_model_len {report['max_model_len']:,}"

    if types := report.get("tensor_types"):
        yield f"  GGUF tensors: {', '.join(f'{count} {name}' for name, count in types.items())}"

    *parts, (_, total) = report["parameters"].items()
    yield f"\nparameters {total:19,}"
    for name, number in parts:
        yield f"  {name:9}{number:19,}{number / total:8.1%}" if number else f"  {name:9}  is the embedding"
    full, half = (show_bytes(report["weight_bytes"][name]) for name in ("float32", "bfloat16"))
    bits, weights = report["weight_bits"], report["memory"]["weights"]
    quantized = "" if weights in report["weight_bytes"].values() else f", {show_bytes(weights)} in {bits:.3g} bits"
    yield f"\nweights    {full} in float32, {half} in bfloat16 or float16{quantized}"
    token, block = (show_bytes(report[f"kv_bytes_per_{unit}"]) for unit in ("token", "block"))
    yield f"KV cache   {token} per token, {block} per block of {report['block_size']}, in {report['kv_cache_dtype']}"

    memory = report["memory"]
    usable, size = memory["weights_and_pool"], show_bytes(memory["bytes"])
    yield f"\nmemory     {size} ({memory['of']}), {memory['share']:.0%} for weights and KV cache: {show_bytes(usable)}"
    if not report["fits"]:
        missing = weights + report["kv_bytes_per_block"] - usable
        yield f"           the weights and one block need {show_bytes(missing)} more than that"
        return
    yield f"           weights {show_bytes(weights)}, KV cache {show_bytes(usable - weights)}"
    yield f"           the KV cache has {report['num_blocks']:,} blocks: {report['num_slots']:,} tokens"

    rows = report["sequences"]
    is_timed = "step_seconds" in rows[0]
    yield f"\nsequences that fit:      contiguous   in blocks{'  a step takes   tokens/s' if is_timed else ''}"
    for row in rows:
        line = f"  of {row['length']:,} tokens"
        line = f"{line:24}{row['contiguous']:12,}{row['paged']:12,}"
        if is_timed:
            line += f"{show_seconds(row['step_seconds']):>14}{row['tokens_per_second']:11,.0f}"
        yield line
    yield f"Contiguous: a sequence reserves {report['max_model_len']:,} slots. In blocks: only those it fills."
    if rows := report.get("tiers"):
        yield f"\nover a link, at best:            a block   {rows[0]['length']:,} tokens"
    for row in rows or ():
        name = f"  {row['link']}, {row['bytes_per_second'] / 1e9:,.0f} GB/s"
        yield f"{name:29}{1000 * row['block_seconds']:8.3f} ms{show_seconds(row['sequence_seconds']):>15}"
    if is_timed:
        yield "A step takes at least the time to read all weights, keys and values once."
        yield f"A single sequence takes at least {show_seconds(report['seconds_per_token_alone'])} per token."
