"""The numbers of nanovllm inspect, and the table that shows them."""

from collections.abc import Iterator
from typing import Any

from ..checkpoints.sizes import (
    DTYPE_BYTES,
    Dimensions,
    Fit,
    Memory,
    find_memory,
    kv_bytes_per_token,
    parameters,
    parse_bytes,
    show_bytes,
    show_seconds,
)

LENGTHS = (256, 1024, 4096, 16384, 65536)
ENTRIES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")


def make_report(
    model: Dimensions,
    dtype: str,
    memory: str | None,
    share: float,
    block_size: int,
    max_model_len: int | None,
    lengths: tuple[int, ...],
    bandwidth: str | None,
) -> dict[str, Any]:
    """Raises ValueError, with both numbers, for a value that cannot be."""
    there = Memory(parse_bytes(memory), "given", True) if memory else find_memory()
    if dtype == "auto":  # as EngineConfig.torch_dtype
        dtype = model.dtype if there.is_gpu and model.dtype in DTYPE_BYTES else "float32"
    max_model_len = check_length(model, max_model_len)
    check(share, block_size, max_model_len, lengths)
    fit = Fit(model, DTYPE_BYTES[dtype], int(share * there.size), block_size, max_model_len)
    per_second = parse_bytes(bandwidth) if bandwidth else None
    if per_second == 0:
        raise ValueError("bandwidth must be above 0")
    lengths = lengths or (*(length for length in LENGTHS if length < max_model_len), max_model_len)
    timed = {"seconds_per_token_alone": fit.step_bytes(1, 0) / per_second} if per_second else {}
    return {
        **needs(model, fit, dtype),
        "memory": {"of": there.of, "bytes": there.size, "share": share, "weights_and_pool": fit.room},
        "fits": fit.room >= fit.weight_bytes + fit.block_bytes,
        "num_blocks": fit.num_blocks,
        "num_slots": fit.num_slots,
        "max_model_len": max_model_len,
        "sliding_window": model.sliding_window,
        "sequences": [sequences(fit, length, per_second) for length in lengths],
        **timed,
    }


def needs(model: Dimensions, fit: Fit, dtype: str) -> dict[str, Any]:
    """What the model takes on any machine."""
    parts = parameters(model)
    return {
        **{name: getattr(model, name) for name in (*ENTRIES, "max_position_embeddings")},
        "parameters": {**parts, "total": sum(parts.values())},
        "weight_bytes": {name: size * sum(parts.values()) for name, size in DTYPE_BYTES.items()},
        "dtype": dtype,
        "kv_bytes_per_token": kv_bytes_per_token(model, fit.itemsize),
        "block_size": fit.block_size,
        "kv_bytes_per_block": fit.block_bytes,
    }


def check_length(model: Dimensions, max_model_len: int | None) -> int:
    """max_model_len, or all that the engine would serve: it has no sliding window."""
    positions, window = model.max_position_embeddings, model.sliding_window
    longest = min(positions, window or positions)
    if max_model_len is not None and max_model_len > longest:
        raise ValueError(f"max_model_len is {max_model_len}, the model has {longest} positions")
    return max_model_len or longest


def check(share: float, block_size: int, max_model_len: int, lengths: tuple[int, ...]) -> None:
    if not 0 < share <= 1:
        raise ValueError(f"gpu_memory_utilization must be above 0 and at most 1, not {share}")
    for name, value in (
        ("block_size", block_size),
        ("max_model_len", max_model_len),
        *(("length", n) for n in lengths),
    ):
        if value < 1:
            raise ValueError(f"{name} must be a whole number, at least 1, not {value}")
    if lengths and max(lengths) > max_model_len:
        raise ValueError(f"length is {max(lengths)}, max_model_len {max_model_len}")


def sequences(fit: Fit, length: int, bandwidth: int | None) -> dict[str, Any]:
    """How many of one length fit, and how long a step of all that fit in blocks takes at least."""
    batch = fit.paged(length)
    row: dict[str, Any] = {"length": length, "contiguous": fit.contiguous, "paged": batch}
    if bandwidth:
        seconds = fit.step_bytes(max(batch, 1), length) / bandwidth
        row |= {"step_seconds": seconds, "tokens_per_second": batch / seconds}
    return row


def show(model: str, report: dict[str, Any]) -> str:
    """The report in at most 80 columns."""
    return "\n".join([model, *shape_lines(report), *weight_lines(report), *memory_lines(report), *fit_lines(report)])


def shape_lines(report: dict[str, Any]) -> Iterator[str]:
    layers, hidden, heads, kv_heads, head_dim = (report[name] for name in ENTRIES)
    yield f"  {layers} layers of {hidden:,}, {heads} heads and {kv_heads} KV heads of {head_dim}"
    window = f" (a sliding window of {report['sliding_window']:,})" if report["sliding_window"] else ""
    yield f"  {report['max_position_embeddings']:,} positions{window}, max_model_len {report['max_model_len']:,}"


def weight_lines(report: dict[str, Any]) -> Iterator[str]:
    *parts, (_, total) = report["parameters"].items()
    yield f"\nparameters {total:19,}"
    for name, number in parts:
        yield f"  {name:9}{number:19,}{number / total:8.1%}" if number else f"  {name:9}  is the embedding"
    full, half = (show_bytes(report["weight_bytes"][name]) for name in ("float32", "bfloat16"))
    yield f"\nweights    {full} in float32, {half} in bfloat16 or float16"
    token, block = (show_bytes(report[f"kv_bytes_per_{unit}"]) for unit in ("token", "block"))
    yield f"KV cache   {token} a token, {block} a block of {report['block_size']}, in {report['dtype']}"


def memory_lines(report: dict[str, Any]) -> Iterator[str]:
    memory, weights = report["memory"], report["weight_bytes"][report["dtype"]]
    room, size = memory["weights_and_pool"], show_bytes(memory["bytes"])
    yield f"\nmemory     {size} ({memory['of']}), {memory['share']:.0%} for weights and pool: {show_bytes(room)}"
    if not report["fits"]:
        missing = weights + report["kv_bytes_per_block"] - room
        yield f"           the weights and one block need {show_bytes(missing)} more than that"
        return
    yield f"           weights {show_bytes(weights)}, pool {show_bytes(room - weights)}"
    yield f"           the pool has {report['num_blocks']:,} blocks: {report['num_slots']:,} tokens"


def fit_lines(report: dict[str, Any]) -> Iterator[str]:
    if not report["fits"]:
        return
    rows = report["sequences"]
    is_timed = "step_seconds" in rows[0]
    yield f"\nsequences that fit:     in one piece   in blocks{'  a step takes   tokens/s' if is_timed else ''}"
    for row in rows:
        line = f"  of {row['length']:,} tokens"
        line = f"{line:24}{row['contiguous']:12,}{row['paged']:12,}"
        if is_timed:
            line += f"{show_seconds(row['step_seconds']):>14}{row['tokens_per_second']:11,.0f}"
        yield line
    yield f"In one piece each reserves {report['max_model_len']:,} slots; in blocks it has what it fills."
    if is_timed:
        yield "A step reads the weights once and all keys and values: it cannot be faster."
        yield f"One sequence alone: at least {show_seconds(report['seconds_per_token_alone'])} a token."
