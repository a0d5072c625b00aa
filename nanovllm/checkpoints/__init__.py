"""A checkpoint as people have it: its tokenizer, and its chat template.

load_tokenizer.py        of a folder: tokenizer.json, or tokenizer.model, or none
hf_tokenizer.py          text to token ids and back, and the calls that scripts make on a tokenizer
tokenizer_calls.py       those calls: tokenizer(text), apply_chat_template(...), special tokens by name
tokenizer_config.py      what the files beside it say: special tokens, added tokens, flags, chat templates
tokenizer_backend.py     the tokenizers.Tokenizer that transformers makes of tokenizer.json
sentencepiece_file.py    the same of tokenizer.model
chat_template.py         messages to a prompt
message_contents.py      messages as OpenAI's interface has them, in the form that a template expects
template_environment.py  where a template runs, and its limits
template_values.py       what a template may see
tool_schema.py           Python functions to the JSON schemas of tools
"""
