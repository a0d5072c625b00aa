"""/metrics: vLLM's names, types and labels, and numbers that are right."""

import asyncio

from prometheus_client.parser import text_string_to_metric_families

from ..test_vllm_names import DATA
from .inside import inside

PROMPT = [3, 17, 4, 29, 8, 15, 40, 22, 9, 31]
NAMED = {  # with their types
    "gauge": {"num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"},
    "counter": {
        *("num_preemptions", "prefix_cache_queries", "prefix_cache_hits", "external_prefix_cache_queries"),
        *("external_prefix_cache_hits", "prompt_tokens", "generation_tokens", "request_success"),
        *("kv_offload_load_bytes", "kv_offload_store_bytes", "admission_rejections"),
    },
    "histogram": {
        *("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds"),
        *("request_queue_time_seconds", "iteration_tokens_total"),
    },
}


def scraped(checkpoint, *bodies, metrics_of=None):
    """The families of /metrics by their names, after these completions one after the other."""

    async def scenario():
        async with inside(checkpoint) as server:
            for body in bodies:
                assert (await server.post(**{"temperature": 0, "ignore_eos": True} | body)).status_code == 200
            response = await server.client.get("/metrics")
            assert response.headers["content-type"].startswith("text/plain")
            return {family.name: family for family in text_string_to_metric_families(response.text)}

    return asyncio.run(scenario())


def value(families, name, **labels):
    """Of the one sample of this name with these labels."""
    samples = [sample for family in families.values() for sample in family.samples if sample.name == f"vllm:{name}"]
    [found] = [each.value for each in samples if labels.items() <= each.labels.items()]
    return found


def test_names_types_and_labels_are_vllms(checkpoint):
    families = scraped(checkpoint, {"prompt": PROMPT, "max_tokens": 3})
    for kind, names in NAMED.items():
        for name in names:
            family = families[f"vllm:{name}"]
            assert family.type == kind and family.documentation, name
            assert family.samples and all("model_name" in sample.labels for sample in family.samples), name
            if name != "admission_rejections":
                assert all(sample.labels["engine"] == "0" for sample in family.samples)
    own = {name for name in families if name.startswith("vllm:")}
    assert own <= {*DATA["metrics"]["names"]}, own - {*DATA["metrics"]["names"]}
    assert "process_cpu_seconds" in families, "the front's own"


def test_numbers(checkpoint):
    body = {"prompt": PROMPT, "max_tokens": 4}
    families = scraped(checkpoint, body, {**body, "prompt": [*PROMPT, *PROMPT], "n": 2}, {**body, "prompt": PROMPT * 2})
    assert value(families, "prompt_tokens_total") == 50 and value(families, "generation_tokens_total") == 16
    assert value(families, "request_success_total", finished_reason="length") == 4
    assert value(families, "prefix_cache_queries_total") == 50 and value(families, "prefix_cache_hits_total") == 16
    assert value(families, "time_to_first_token_seconds_count") == 4
    assert value(families, "request_queue_time_seconds_count") == 4
    assert value(families, "inter_token_latency_seconds_count") == 4 * 3, "between four tokens are three gaps"
    steps, tokens = (value(families, f"iteration_tokens_total_{each}") for each in ("count", "sum"))
    # A prompt and the tokens behind it but the last: 13; 19 and two last tokens of the prompt, then 2 x 3; 4 and 3.
    assert (steps, tokens) == (4 + 5 + 4, 13 + 19 + 2 * 4 + 4 + 3)
    assert value(families, "num_requests_running") == value(families, "kv_cache_usage_perc") == 0


def test_blocks_on_the_host_are_external(checkpoint):
    from ... import LLM
    from ..helpers import OPTIONS
    from ..test_stats import drawn

    llm = LLM(checkpoint, block_size=4, kv_cache_tokens=40, watermark=0.0, **OPTIONS)
    for prompt in (PROMPT, [*range(40, 79)], PROMPT):
        llm.generate(prompt, drawn(1))
    numbers = {metric.name.removeprefix("vllm:"): getattr(metric, "value", None) for metric in llm.get_metrics()}
    block = llm.kv_cache.blocks[0].nbytes
    assert llm.stats().blocks_loaded == 2 and numbers["kv_offload_load_bytes"] == 2 * block
    assert numbers["kv_offload_store_bytes"] == llm.stats().blocks_stored * block > 0
    assert (numbers["prefix_cache_hits"], numbers["external_prefix_cache_hits"]) == (0, 8)
    assert numbers["prefix_cache_queries"] == numbers["external_prefix_cache_queries"] == 10 + 39 + 10
