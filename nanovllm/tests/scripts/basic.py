"""Generate text for some prompts in one call."""

from vllm import LLM, SamplingParams

prompts = [
    "Hello, my name is",
    "The president of the United States is",
    "The capital of France is",
    "The future of AI is",
]
sampling_params = SamplingParams(temperature=0.8, top_p=0.95)


def main():
    llm = LLM(
        model="facebook/opt-125m",
        tensor_parallel_size=1,
        dtype="half",
        trust_remote_code=True,
        enforce_eager=True,
        swap_space=4,
        gpu_memory_utilization=0.8,
        max_model_len=512,
        disable_log_stats=True,
    )
    outputs = llm.generate(prompts, sampling_params)
    print("\nGenerated Outputs:\n" + "-" * 60)
    for output in outputs:
        prompt = output.prompt
        generated_text = output.outputs[0].text
        print(f"Prompt:    {prompt!r}")
        print(f"Output:    {generated_text!r}")
        print("-" * 60)


if __name__ == "__main__":
    main()
