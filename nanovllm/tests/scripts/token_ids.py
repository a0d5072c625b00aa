"""Pass prompts as token ids, in the forms of common data sets."""

import numpy as np
import torch
from vllm import LLM, SamplingParams, TokensPrompt

llm = LLM(model="facebook/opt-125m", dtype=torch.float32, max_model_len=256, max_num_seqs=8)
tokenizer = llm.get_tokenizer()
ids = tokenizer.encode("Once upon a time")
sampling_params = SamplingParams(temperature=0.0, max_tokens=6, detokenize=True)

forms = [
    "Once upon a time",
    {"prompt": "Once upon a time"},
    {"prompt_token_ids": ids},
    TokensPrompt(prompt_token_ids=ids, prompt="Once upon a time"),
    ids,
    np.array(ids),
    torch.tensor(ids),
]
outputs = llm.generate(forms, sampling_params)
texts = {output.outputs[0].text for output in outputs}
print(len(outputs), "outputs,", len(texts), "text:", *texts)
print(llm.generate(np.array([ids, ids]), sampling_params)[1].outputs[0].text == texts.pop())
