"""Generate outputs that end at a string or at a token."""

from vllm import LLM, SamplingParams

llm = LLM(model="facebook/opt-125m", max_model_len=512)
tokenizer = llm.get_tokenizer()
comma = tokenizer.encode(",", add_special_tokens=False)[-1]

for sampling_params in (
    SamplingParams(temperature=0, max_tokens=60, stop=["."]),
    SamplingParams(temperature=0, max_tokens=60, stop=[".", "!"], include_stop_str_in_output=True),
    SamplingParams(temperature=0, max_tokens=60, stop_token_ids=[comma]),
    SamplingParams(temperature=0, max_tokens=8, min_tokens=8, stop=["a"]),
):
    completion = llm.generate("Once upon a time", sampling_params)[0].outputs[0]
    print(repr(completion.text), completion.finish_reason, completion.stop_reason)
