"""Give each prompt a seed: the same seed gives the same text, alone or in a batch."""

from vllm import LLM, SamplingParams

prompts = ["Once upon a time", "The fox said", "Once upon a time"]
sampling_params = [SamplingParams(temperature=1.0, seed=seed, max_tokens=10) for seed in (7, 8, 7)]

llm = LLM(model="facebook/opt-125m", dtype="float32", max_model_len=256)
texts = [output.outputs[0].text for output in llm.generate(prompts, sampling_params, use_tqdm=False)]
alone = llm.generate(prompts[0], sampling_params[0], use_tqdm=False)[0].outputs[0].text
print("equal seeds, equal texts:", texts[0] == texts[2] == alone)
print("different prompts and seeds, different texts:", texts[0] != texts[1])
