"""Checkpoints as people publish them: from a folder or a name on the Hub to a model, a tokenizer and a chat template.

hub.py            find a checkpoint: a folder, or a download from the Hugging Face Hub. Start here
entries.py        typed access to JSON files, with errors that name the file and the entry
model_config.py   config.json and generation_config.json: shape, end-of-text tokens, recommended sampling
weights.py        safetensors into the model, every tensor checked; or random weights
gguf.py           llama.cpp's files, unpacked into a folder
tokenizer.py      tokenizer.json or tokenizer.model; text to token ids and back, also as tokens arrive
chat_template.py  messages to a prompt
sizes.py          estimates of the memory that a model needs
"""
