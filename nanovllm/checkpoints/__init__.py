"""Published checkpoints: a folder or a name on the Hub becomes a model, a tokenizer and a chat template.

hub.py            find a checkpoint: a folder, or a download from the Hugging Face Hub. Start here
entries.py        typed access to JSON files, with errors that name the file and the entry
model_config.py   config.json and generation_config.json: shape, end-of-text tokens, recommended sampling
weights.py        load safetensors into the model, and check every tensor; or make random weights
gguf.py           llama.cpp's files, unpacked into a folder
packed.py         integer weights in safetensors files: GPTQ and compressed-tensors
tokenizer.py      text to token ids and back; tokenizer_files.py reads tokenizer.json or tokenizer.model
stream_decoder.py text from token ids as they arrive
chat_template.py  messages to a prompt
sizes.py          estimates of the memory that a model needs
"""
