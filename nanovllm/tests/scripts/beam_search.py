"""Print the best continuations of each prompt."""

from vllm import LLM
from vllm.sampling_params import BeamSearchParams

llm = LLM(model="facebook/opt-125m", max_model_len=256)
params = BeamSearchParams(beam_width=3, max_tokens=8)
outputs = llm.beam_search([{"prompt": "Hello, my name is "}, {"prompt_token_ids": [1, 403, 88]}], params)

for output in outputs:
    for sequence in output.sequences:
        average = sequence.cum_logprob / len(sequence.logprobs)
        print(f"{len(sequence.tokens)} tokens, {average:.2f} a token: {sequence.text!r}")
