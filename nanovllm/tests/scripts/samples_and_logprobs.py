"""Print several samples of a prompt, and the likeliest tokens at each position."""

from vllm import LLM, SamplingParams

llm = LLM("facebook/opt-125m", max_model_len=256, seed=1)
sampling_params = SamplingParams(n=3, temperature=1.0, top_p=0.9, max_tokens=6, logprobs=2, prompt_logprobs=1)
(output,) = llm.generate("The king had three sons", sampling_params)

for completion in output.outputs:
    print(completion.index, completion.text, completion.finish_reason, round(completion.cumulative_logprob, 3))
    for token_id, place in zip(completion.token_ids, completion.logprobs):
        chosen = place[token_id]
        others = [logprob.decoded_token for other, logprob in place.items() if other != token_id]
        print(f"  {chosen.decoded_token!r} (rank {chosen.rank}, {chosen.logprob:.2f}), not {others}")

for place in output.prompt_logprobs:
    print(None if place is None else {logprob.decoded_token: round(logprob.logprob, 2) for logprob in place.values()})
