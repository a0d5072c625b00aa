"""Generate text for prompts with a common prefix, with and without the prefix cache."""

from vllm import LLM, SamplingParams

prefix = (
    "You are an expert school principal, skilled in effectively managing faculty and staff. Draft 10-15 questions for "
    "a potential first grade Head Teacher for my K-12, all-girls', independent school that emphasizes community, "
    "joyful discovery, and life-long learning. Based on these constraints, fulfill the following paragraph: "
)
prompts = ["Hello, my name is", "The president of the United States is", "The capital of France is"]
generating_prompts = [prefix + prompt for prompt in prompts]
sampling_params = SamplingParams(temperature=0.0, max_tokens=8)


def main():
    regular_llm = LLM(model="facebook/opt-125m", gpu_memory_utilization=0.4, enable_prefix_caching=False)
    generated_texts = [output.outputs[0].text for output in regular_llm.generate(generating_prompts, sampling_params)]
    del regular_llm

    prefix_cached_llm = LLM(model="facebook/opt-125m", enable_prefix_caching=True, gpu_memory_utilization=0.4)
    prefix_cached_llm.generate(generating_prompts[0], sampling_params)
    outputs = prefix_cached_llm.generate(generating_prompts, sampling_params)
    cached_texts = [output.outputs[0].text for output in outputs]
    generated_same = all(a == b for a, b in zip(generated_texts, cached_texts))
    print(f"Generated answers are the same: {generated_same}")
    print("cached tokens:", [output.num_cached_tokens for output in outputs])
    print("cache was reset:", prefix_cached_llm.reset_prefix_cache())


if __name__ == "__main__":
    main()
