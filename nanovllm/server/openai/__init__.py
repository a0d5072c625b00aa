"""The bodies of OpenAI's interface, as nanovllm serve and nanovllm batch read and write them, and the server's answers.

json_values.py  a value of JSON for the field of a dataclass
fields.py       which fields a body may have; elsewhere.py: those of other servers that are not served here
bodies.py       a body read: prompts or a conversation, parameters, how the answer is to come
chats.py        a conversation of it, and what the chat template is told
params.py       SamplingParams of it
choices.py      the choices of an answer; logprobs.py has what is told of their tokens

Of the server alone:

served.py       the model that is served: its names, its tokenizer, its prompts
work.py         what a body asks of the engine, and what has come of it
completions.py  /v1/completions and /v1/chat/completions
chunks.py       the same in a stream; streaming.py sends events
responses.py    /v1/responses
response_bodies.py   its body as that of a chat
response_objects.py  its answer, and the events of its stream
models.py       /v1/models
tokenize.py     /tokenize and /detokenize
"""
