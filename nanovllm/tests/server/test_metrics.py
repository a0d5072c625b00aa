"""/metrics: vLLM's names, types and labels, and correct numbers."""

import asyncio
import math
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from ... import LLM
from ..test_stats import drawn
from ..test_vllm_names import DATA
from ..testing.engines import OPTIONS
from ..testing.inside import LONG, inside, slow, until

pytestmark = pytest.mark.anyio

PROMPT = [3, 17, 4, 29, 8, 15, 40, 22, 9, 31]
NAMES = {  # in the queries of vLLM's example dashboards, without the suffix of a counter or a histogram
    *("request_prompt_tokens", "request_generation_tokens", "request_max_num_generation_tokens"),
    *("request_prefill_time_seconds", "request_decode_time_seconds", "request_inference_time_seconds"),
    *("request_time_per_output_token_seconds", "request_params_n", "request_params_max_tokens", "cache_config_info"),
    *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions", "request_success"),
    *("prefix_cache_queries", "prefix_cache_hits", "external_prefix_cache_queries", "external_prefix_cache_hits"),
    *("prompt_tokens", "generation_tokens", "iteration_tokens_total", "request_queue_time_seconds"),
    *("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds"),
    *("kv_offload_load_bytes", "kv_offload_store_bytes", "admission_rejections"),
}
VLLMS = DATA["metrics"]["metrics"]


def scraped(checkpoint, *bodies, metrics_of=None):
    """Request these completions one by one, then return the families of /metrics by name."""

    async def scenario():
        async with inside(checkpoint) as server:
            for body in bodies:
                assert (await server.post(**{"temperature": 0, "ignore_eos": True} | body)).status_code == 200
            return parsed(await server.client.get("/metrics"))

    return asyncio.run(scenario())


def parsed(response):
    assert response.headers["content-type"].startswith("text/plain")
    return {family.name: family for family in text_string_to_metric_families(response.text)}


def values_of(llm):
    return {metric.name.removeprefix("vllm:"): getattr(metric, "value", None) for metric in llm.get_metrics()}


def value(families, name, **labels):
    """Return the value of the one sample with this name and these labels."""
    samples = [sample for family in families.values() for sample in family.samples if sample.name == f"vllm:{name}"]
    [result] = [each.value for each in samples if labels.items() <= each.labels.items()]
    return result


def documented_names():
    text = (Path(__file__).resolve().parents[2] / "docs" / "server.md").read_text(encoding="utf-8")
    table = text.partition("\n| metrics | ")[2].partition("\n\n")[0]
    return {name for row in table.splitlines() for name in re.findall(r"`(\w+)`", row.split("|")[1])}


def test_names_types_labels_and_buckets_are_vllms(checkpoint):
    families = scraped(checkpoint, {"prompt": PROMPT, "max_tokens": 3})
    own = {name.removeprefix("vllm:"): family for name, family in families.items() if name.startswith("vllm:")}
    assert own.keys() >= NAMES and own.keys() == documented_names()
    info = own.pop("cache_config_info")  # in vLLM, its labels are the fields of an object
    assert info.type == "gauge" and info.samples[0].labels.keys() >= {"block_size", "num_gpu_blocks", "model_name"}
    for name, family in own.items():
        vllms = VLLMS[f"vllm:{name}"]
        assert family.type == vllms["type"] and family.documentation and family.samples, name
        assert all({*sample.labels} - {"le"} == {*vllms["labels"]} for sample in family.samples), name
        assert all(sample.labels["model_name"] == checkpoint.name for sample in family.samples), (
            "a name without its folder"
        )
        assert all(sample.labels.get("engine", "0") == "0" for sample in family.samples), name
        bounds = [float(sample.labels["le"]) for sample in family.samples if "le" in sample.labels]
        up_to_64_positions = [1, 2, 5, 10, 20, 50]
        assert bounds == ([*(vllms["buckets"] or up_to_64_positions), math.inf] if "buckets" in vllms else []), name
    assert "process_cpu_seconds" in families, "the front's process is missing"


def test_drafts_are_counted_under_vllms_names(checkpoint):
    async def scenario():
        speculation = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 2}
        async with inside(checkpoint, speculative_config=speculation) as server:
            await server.post(prompt=[5, 6] * 8, max_tokens=30, temperature=0, ignore_eos=True)
            return parsed(await server.client.get("/metrics"))

    families = asyncio.run(scenario())
    drafts, drafted, accepted = (
        value(families, f"spec_decode_num_{name}_total") for name in ("drafts", "draft_tokens", "accepted_tokens")
    )
    names = "spec_decode_num_accepted_tokens_per_pos_total"
    by_position = [value(families, names, position=str(position)) for position in range(4)]
    assert 0 < drafts <= drafted and sum(by_position) == accepted
    own = {name.removeprefix("vllm:") for name in families if "spec_decode" in name}
    assert own == {
        f"spec_decode_num_{name}" for name in ("drafts", "draft_tokens", "accepted_tokens", "accepted_tokens_per_pos")
    }


def test_numbers_after_three_requests(checkpoint):
    body = {"prompt": PROMPT, "max_tokens": 4}
    families = scraped(checkpoint, body, {**body, "prompt": [*PROMPT, *PROMPT], "n": 2}, {**body, "prompt": PROMPT * 2})
    assert value(families, "prompt_tokens_total") == 50 and value(families, "generation_tokens_total") == 16
    assert value(families, "request_success_total", finished_reason="length") == 4
    assert value(families, "prefix_cache_queries_total") == 50 and value(families, "prefix_cache_hits_total") == 16
    assert value(families, "time_to_first_token_seconds_count") == 4
    assert value(families, "request_queue_time_seconds_count") == 4
    assert value(families, "inter_token_latency_seconds_count") == 4 * 3, "four tokens have three gaps"
    steps, tokens = (value(families, f"iteration_tokens_total_{each}") for each in ("count", "sum"))
    # A sample's last token is never computed. First request: 10 + 3 tokens. Second: 19 of the prompt, then its last
    # token and 3 outputs for each of 2 samples. Third: 4 uncached tokens and 3 outputs.
    assert (steps, tokens) == (4 + 5 + 4, 13 + 19 + 2 * 4 + 4 + 3)
    assert value(families, "num_requests_running") == value(families, "kv_cache_usage_perc") == 0
    assert (value(families, "request_params_n_count"), value(families, "request_params_n_sum")) == (3, 1 + 2 + 1)


async def test_running_requests_are_counted(checkpoint):
    async with inside(checkpoint, slow) as server:
        running = asyncio.create_task(server.post(**LONG))
        await until(lambda: server.num_started == 1)
        families = parsed(await server.client.get("/metrics"))
        assert value(families, "num_requests_running") == value(families, "time_to_first_token_seconds_count") == 1
        assert 0 < value(families, "kv_cache_usage_perc") < 1
        assert 0 < value(families, "generation_tokens_total") < LONG["max_tokens"]
        await running
        families = parsed(await server.client.get("/metrics"))
        assert value(families, "time_to_first_token_seconds_count") == 1, "a first token was counted twice"


async def test_counting_continues_while_the_page_is_open_and_after_it_closes(checkpoint):
    async with inside(checkpoint) as server:
        counts = []

        async def count():
            request = {"prompt": PROMPT, "max_tokens": 5, "temperature": 0, "ignore_eos": True}
            assert (await server.post(**request)).status_code == 200
            families = parsed(await server.client.get("/metrics"))
            names = ("iteration_tokens_total_count", "inter_token_latency_seconds_count", "prompt_tokens_total")
            counts.append(tuple(value(families, name) for name in names))

        observers = list(server.engine.observers)
        await count()
        async with server.client.stream("GET", "/events") as page:
            events = page.aiter_text()
            while "snapshot" not in await anext(events):
                pass
            assert len(server.engine.observers) == len(observers) + 1
            await count()
        await until(lambda: list(server.engine.observers) == observers)
        await count()
        assert counts == [(5 * i, 4 * i, 10 * i) for i in (1, 2, 3)]


def test_preempted_sample_is_not_looked_up_again(checkpoint):
    """It would only hit its own blocks. vLLM does the same."""
    llm = LLM(checkpoint, block_size=4, kv_cache_tokens=36, watermark=0.0, **OPTIONS)
    prompts = [[10 * i + each for each in range(9)] for i in range(4)]
    llm.generate(prompts, drawn(16))
    stats, counts = llm.stats(), values_of(llm)
    assert stats.preemptions == counts["num_preemptions"] > 0 and stats.prefix_queries > 4 * 9
    assert counts["prefix_cache_queries"] == counts["external_prefix_cache_queries"] == 4 * 9
    assert counts["prefix_cache_hits"] == counts["external_prefix_cache_hits"] == 0


def test_no_lookups_without_a_prefix_cache(checkpoint):
    llm = LLM(checkpoint, enable_prefix_caching=False, **OPTIONS)
    llm.generate(PROMPT, drawn(1))
    assert values_of(llm)["prefix_cache_queries"] == values_of(llm)["external_prefix_cache_queries"] == 0


def test_host_blocks_are_external(checkpoint):
    llm = LLM(checkpoint, block_size=4, kv_cache_tokens=40, watermark=0.0, **OPTIONS)
    for prompt in (PROMPT, [*range(40, 79)], PROMPT):
        llm.generate(prompt, drawn(1))
    numbers = values_of(llm)
    block = llm.llm_engine.kv_cache.blocks[0].nbytes
    assert llm.stats().blocks_loaded == 2 and numbers["kv_offload_load_bytes"] == 2 * block
    assert numbers["kv_offload_store_bytes"] == llm.stats().blocks_stored * block > 0
    assert (numbers["prefix_cache_hits"], numbers["external_prefix_cache_hits"]) == (0, 8)
    assert numbers["prefix_cache_queries"] == numbers["external_prefix_cache_queries"] == 10 + 39 + 10
