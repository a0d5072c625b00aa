"""Throughput, latency and cached prefixes of this engine, and of other engines (peers) that take turns with it."""

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

from ..llm import LLM
from ..options.config import POOL_SIZES
from ..tiers.cost_model import measure as measure_cost
from .bench_options import Latency, Offload, Prefix, Throughput, whole_numbers
from .engine import Run, load_llm, serve, summarize_runs
from .floor import Floor, device_bandwidth, floor_note
from .harness import Spread, ratio, take_turns
from .report import OURS, Report, machine, report_of, settings
from .workload import Task, check_lengths, random_tasks, random_tokens, read_dataset

NOTE = "times in ms: p50 / p90 / p99 of all rounds"
HOST_POOL_FACTOR = 4  # the size of the host's pool, as a multiple of the device's
Call = Callable[[], Run]
Peers = Callable[[LLM, Sequence[Task]], AbstractContextManager[tuple[Mapping[str, Call], list[str]]]]


def no_peers(llm: LLM, tasks: Sequence[Task]) -> AbstractContextManager[tuple[Mapping[str, Call], list[str]]]:
    """Return no peers, and no notes about them."""
    return nullcontext(({}, []))


def throughput(
    engine: dict[str, Any], options: Throughput, texts: Sequence[str] = (), peers: Peers = no_peers
) -> Report:
    """Serve random prompts, `texts`, or the requests of options.dataset_path, all at the same time."""
    if options.prompts and options.dataset_path:
        raise ValueError(f"--prompts {options.prompts} and --dataset-path {options.dataset_path} must not both be set")
    requests = [(text, options.output_len) for text in texts]
    if options.dataset_path:
        requests = read_dataset(options.dataset_path, options.output_len)
    elif options.prompts and not texts:
        raise ValueError(f"{options.prompts} has no prompts")
    llm, shown_settings = load_llm(engine), settings(options)
    if not requests:
        lengths = options.input_len, options.output_len, options.spread
        tasks = random_tasks(llm.model_config.vocab_size, options.num_prompts, *lengths)
    elif llm.tokenizer is None:
        raise ValueError("prompts from a file need a tokenizer, and the checkpoint has none")
    else:
        tasks = [Task(llm.tokenizer.encode(text), num_tokens) for text, num_tokens in requests]
        shown_settings = {name: value for name, value in shown_settings.items() if name not in ("input_len", "spread")}
        shown_settings |= {"num_prompts": len(tasks)}
    return compare("throughput", llm, {"": tasks}, options.rounds, shown_settings, peers)


def latency(engine: dict[str, Any], options: Latency, peers: Peers = no_peers) -> Report:
    """Serve a few random prompts on an idle engine, for each batch size."""
    sizes, lengths = whole_numbers("--batch-size", options.batch_size), (options.input_len, options.output_len)
    if not sizes or len({*sizes}) < len(sizes):
        raise ValueError(f"--batch-size must have at least one number, and each one once, got {options.batch_size!r}")
    llm = load_llm(engine)
    suffixes = [f", batch {size}" if len(sizes) > 1 else "" for size in sizes]
    batches = [random_tasks(llm.model_config.vocab_size, size, *lengths) for size in sizes]
    return compare("latency", llm, dict(zip(suffixes, batches, strict=True)), options.rounds, settings(options), peers)


def compare(
    name: str, llm: LLM, batches: Mapping[str, list[Task]], rounds: int, settings: dict[str, Any], peers: Peers
) -> Report:
    """Serve each batch with this engine and its peers, which take turns. A batch's key ends its columns' names."""
    for tasks in batches.values():
        check_lengths(tasks, llm.max_model_len)
    rounds_of, notes = dict[str, list[dict[str, Run]]](), dict[str, None]()
    for suffix, tasks in batches.items():
        own_call: dict[str, Call] = {OURS: partial(serve, llm, tasks)}
        with peers(llm, tasks) as (peer_calls, more):
            rounds_of[suffix] = take_turns({**own_call, **peer_calls}, rounds, title=f"{name}{suffix}")
        notes |= dict.fromkeys(more)
    bandwidth = device_bandwidth(llm.llm_engine.device)
    measured = {
        f"{engine}{suffix}": numbers
        for suffix, results in rounds_of.items()
        for engine, numbers in scores(results, batches[suffix], Floor.of(llm), bandwidth).items()
    }
    return report_of(name, settings, machine(llm), measured, [NOTE, floor_note(bandwidth), *notes])


def scores(
    results: Sequence[Mapping[str, Run]], tasks: Sequence[Task], floor: Floor, bandwidth: float
) -> dict[str, dict[str, Any]]:
    """Return each engine's numbers, the floor as a share of its time, and this engine's speedup over each peer."""
    measured = {name: summarize_runs([each[name] for each in results]) for name in results[0]}
    for name, run in results[0].items():
        generated = [task._replace(num_output_tokens=len(each)) for task, each in zip(tasks, run.tokens, strict=True)]
        floor_seconds = floor.num_bytes(generated, measured[name]["steps"]) / bandwidth
        measured[name] |= {"tokens": run.num_tokens, "floor_share": floor_seconds / measured[name]["seconds"]}
        if name != OURS:
            speedup = ratio(results, OURS, name, lambda run: run.tokens_per_second)
            measured[name][f"{OURS}'s speedup"] = speedup._asdict()
    return measured


# ---- cached prefixes


def prefix(engine: dict[str, Any], options: Prefix, peers: Peers = no_peers) -> Report:
    """Serve a prompt whose beginning is cached, and the same prompt from an empty cache."""
    llm = load_llm(engine | {"enable_prefix_caching": True})
    task, beginning, _ = prompts_of(llm, options)
    calls: dict[str, Call] = {"new": partial(serve, llm, [task]), "cached": partial(serve_after, llm, task, beginning)}
    with peers(llm, [task]) as (peer_calls, notes):
        results = take_turns({**calls, **peer_calls}, options.rounds, title="prefix")
    sooner = first_token_ratio(results, "new", "cached")
    notes = ["first token " + sooner.text("times as soon"), *notes]
    return report_of("prefix", options, machine(llm), first_tokens(results), notes, sooner=sooner._asdict())


def offload(engine: dict[str, Any], options: Offload) -> Report:
    """Serve a prompt whose beginning is on the device, on the host, on the disk, or recomputed.

    The disk tier uses a temporary folder, inside kv_disk_dir if that option is set.
    """
    with TemporaryDirectory(dir=engine["kv_disk_dir"]) as folder:
        length = options.prefix_len + options.input_len + options.output_len
        llm = load_llm(with_host_tier(engine, length) | {"kv_disk_dir": folder})
        return offload_report(llm, options)


def offload_report(llm: LLM, options: Offload) -> Report:
    """Return the report of offload(). The pool of `llm` must be too small for two prompts."""
    task, beginning, other = prompts_of(llm, options)
    engine, num_tokens = llm.llm_engine, min(llm.config.max_num_batched_tokens, len(task.prompt))
    parts = engine.kv_cache, engine.executor, engine.input_processor  # whose pool is overwritten
    cost = measure_cost(*parts, num_tokens, None)
    calls = {
        "computed": partial(serve, llm, [task]),
        "on the device": partial(serve_after, llm, task, beginning),
        "on the host": partial(serve_after, llm, task, beginning, other),
        "on the disk": partial(serve_from_disk, llm, task, beginning),
        "on the disk, not in memory": partial(serve_from_disk, llm, task, beginning, drops_page_cache=True),
    }
    results = take_turns(calls, options.rounds, title="offload")
    if engine.disk_tier:
        engine.disk_tier.flush()  # the folder is removed next
    sooner = first_token_ratio(results, "computed", "on the host")
    from_disk, not_in_memory = (first_token_ratio(results, "computed", name) for name in [*calls][-2:])
    policy = "load" if cost.prefers_load(engine.kv_cache.bytes_per_token) else "compute again"
    notes = [
        "from the host, the first token is " + sooner.text("times as soon"),
        "from the disk, as after a restart, it is " + from_disk.text("times as soon"),
        "and if the system has no copy of the files in memory, " + not_in_memory.text("times as soon"),
        f"measured when the engine starts: {cost}; the policy auto would {policy}",
    ]
    if not results[0]["on the host"].num_blocks_loaded:
        notes.insert(0, "nothing went to the host, because the pool has room for everything: lower --kv-cache-tokens")
    measured = first_tokens(results)
    for name, run in results[0].items():
        measured[name]["blocks_loaded"] = run.num_blocks_loaded
    ratios = {"sooner": sooner, "sooner_from_disk": from_disk, "sooner_from_disk_not_in_memory": not_in_memory}
    extra = {name: spread._asdict() for name, spread in ratios.items()}
    return report_of("offload", options, machine(llm), measured, notes, auto=policy, **extra)


def first_token_ratio(results: Sequence[Mapping[str, Run]], numerator: str, denominator: str) -> Spread:
    """Return the ratio of the times to first token of two calls, over all rounds."""
    return ratio(results, numerator, denominator, lambda run: run.first_tokens[0])


def first_tokens(results: Sequence[Mapping[str, Run]]) -> dict[str, dict[str, Any]]:
    """Return each call's times, and how many tokens of its prompt were cached."""
    measured = {}
    for name, run in results[0].items():
        times = summarize_runs([each[name] for each in results])
        measured[name] = {key: times[key] for key in ("first_token_ms", "seconds")}
        measured[name]["tokens_hit"] = run.num_cached_tokens
    return measured


def with_host_tier(engine: dict[str, Any], length: int) -> dict[str, Any]:
    """Return the engine's options, with a pool too small for two prompts, so that the first one moves to the host."""
    slots = length + 2 * engine["block_size"]
    pool = {} if any(engine[size] for size in POOL_SIZES) else {"kv_cache_tokens": slots}
    host: dict[str, Any] = {"offload_policy": "load", "enable_prefix_caching": True}
    if engine["kv_offloading_tokens"] is None:
        host["kv_offloading_tokens"] = HOST_POOL_FACTOR * slots
    return engine | pool | host


def prompts_of(llm: LLM, options: Prefix) -> tuple[Task, list[int], list[int]]:
    """Return a task, the beginning of its prompt, and another prompt of the same length."""
    rng, vocab_size = random.Random(0), llm.model_config.vocab_size
    lengths = options.prefix_len, options.input_len, options.prefix_len + options.input_len
    beginning, end, other = (random_tokens(rng, vocab_size, length) for length in lengths)
    task = Task(beginning + end, options.output_len)
    check_lengths([task], llm.max_model_len)
    return task, beginning, other


def serve_after(llm: LLM, task: Task, *prompts: list[int]) -> Run:
    """Serve the prompts one by one, then the task. A second prompt evicts the first one's blocks from the device."""
    for number, prompt in enumerate(prompts):
        serve(llm, [Task(prompt, 1)], is_cold=number == 0)
    return serve(llm, [task], is_cold=False)


def serve_from_disk(llm: LLM, task: Task, beginning: list[int], drops_page_cache: bool = False) -> Run:
    """Serve the beginning, clear the caches on the device and the host, and serve the task, as after a restart.

    With `drops_page_cache`, the system also drops its copy of the files from memory.
    """
    serve(llm, [Task(beginning, 1)])
    engine = llm.llm_engine
    assert engine.disk_tier, "the engine has no kv_disk_dir"
    engine.disk_tier.flush()
    engine.kv_cache_manager.pool.reset_prefix_cache()
    engine.host_tier.reset()
    if drops_page_cache:
        engine.disk_tier.files.drop_page_cache()
    return serve(llm, [task], is_cold=False)
