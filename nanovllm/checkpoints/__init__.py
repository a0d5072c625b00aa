"""Checkpoints as people have them: finding and checking one, its weights, its tokenizer, its recommendations.

hub.py                a folder, or a name on the hub, whose files are fetched: start here
forms.py              files that are no safetensors checkpoint, and what to do with them
model_config.py       config.json, each entry checked, as llama/'s ModelConfig
weights.py            safetensors into the model, each tensor checked; or random weights
entries.py            entries of a JSON file, read as what they must be
tokenizer.py          text to token ids and back, and the calls that scripts make on a tokenizer
tokenizer_files.py    tokenizer.json or tokenizer.model, and the files beside it, as a tokenizers.Tokenizer
stream_decoder.py     tokens to text as they come
chat_template.py      messages to a prompt
plain_template.py     a template for models that have none, if the user says so
template_environment.py  where a template runs, and its limits
tool_schema.py        Python functions to the JSON schemas of tools
generation_config.py  sampling parameters that a checkpoint recommends
sizes.py              what a model needs of a memory, and what this machine has
"""
