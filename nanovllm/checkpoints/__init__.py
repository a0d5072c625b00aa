"""Checkpoints as people have them: finding and checking one, its weights, its tokenizer, its recommendations.

hub.py                 a folder, or a name of the hub, whose files are fetched
repository.py          the files of a model of the hub
hub_errors.py          what may go wrong on the way, in one line
forms.py               files that are no safetensors checkpoint are told by name, with what to do
load_tokenizer.py      of a folder: tokenizer.json, or tokenizer.model, or none
hf_tokenizer.py        text to token ids and back, and the calls that scripts make on a tokenizer
tokenizer_calls.py     those calls: tokenizer(text), apply_chat_template(...), special tokens by name
tokenizer_config.py    what the files beside it say: special tokens, added tokens, flags, chat templates
tokenizer_backend.py   the tokenizers.Tokenizer that transformers makes of tokenizer.json
sentencepiece_file.py  the same of tokenizer.model
chat_template.py       messages to a prompt
message_contents.py    messages as OpenAI's interface has them, in the form that a template expects
template_environment.py  where a template runs, and its limits; template_values.py what it may see
tool_schema.py         Python functions to the JSON schemas of tools
model_config.py        config.json, each entry checked, as llama/'s ModelConfig
weights.py             safetensors into the model, each tensor checked; or random weights
entries.py             entries of a JSON file, read as what they must be
stream_decoder.py      tokens to text as they come
generation_config.py   sampling parameters that a checkpoint recommends
sizes.py               parameters, bytes of weights, and what of a memory is left for keys and values
memory.py              how much memory this machine has
units.py               bytes as people write them
shapes.py              published models of 0.5 to 405 billion parameters, in numbers
"""
