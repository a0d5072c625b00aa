"""Every knob of engine, sampling and server, with its flag's help: --help is shown without torch.

Made by `python -m nanovllm.cli.make_knobs` from the fields of four dataclasses. A test compares.
"""

# ruff: noqa: E501
from .knob import Knob

ENGINE = [
    Knob("model", str, "models/storyteller", "checkpoint folder: config.json, *.safetensors, tokenizer.model"),
    Knob("device", str, "cpu", "where the model and the pool are: cpu, cuda, mps"),
    Knob("dtype", str, "auto", "auto is float32 on the CPU, elsewhere the checkpoint's", ("auto", "float32", "bfloat16", "float16")),
    Knob("max_model_len", int, None, "longest prompt + output, in tokens; default: as the model was trained for"),
    Knob("max_num_seqs", int, 32, "most sequences that run at a time"),
    Knob("max_num_batched_tokens", int, 512, "most tokens in a step: a longer prompt is computed in chunks"),
    Knob("watermark", float, 0.05, "share of the blocks that admitting a sequence beside others leaves free"),
    Knob("block_size", int, 16, "slots in a block of the KV pool"),
    Knob("enable_prefix_caching", bool, True, "keep computed blocks for prompts that begin alike"),
    Knob("offload_policy", str, "auto", "whether evicted blocks come back from the host", ("auto", "load", "recompute")),
    Knob("kv_offloading_tokens", int, None, "the host's pool in tokens; 0: none; default: KV pool's, to 4 GiB"),
    Knob("tile_size", int, None, "slots that attention reads at a time; default: 4096 on a CPU, else 16384"),
    Knob("kv_cache_tokens", int, None, "size of the KV pool in tokens (slots)"),
    Knob("kv_cache_memory_bytes", int, None, "size of the KV pool in bytes"),
    Knob("gpu_memory_utilization", float, None, "share of the GPU's memory for weights and pool (0.9 on cuda)"),
    Knob("seed", int, 0, "what requests without a seed of their own draw theirs from"),
]

KERNELS = [
    Knob("attention_backend", str, "auto", "numba: kernels on a CPU; triton: on a GPU; torch: plain operations; auto: the best", ("auto", "numba", "triton", "torch")),
    Knob("enforce_eager", bool, False, "on a GPU no CUDA graphs; on a CPU as --attention-backend torch"),
]

SAMPLING = [
    Knob("n", int, 1, "samples of each prompt"),
    Knob("presence_penalty", float, 0.0, "taken off the logit of each token that the output has; from -2 to 2"),
    Knob("frequency_penalty", float, 0.0, "the same once for each time that the output has the token; from -2 to 2"),
    Knob("repetition_penalty", float, 1.0, "above 1 weakens, below 1 favours the tokens of prompt and output"),
    Knob("temperature", float, 1.0, "0 takes the likeliest token; above 1 flattens the distribution"),
    Knob("top_p", float, 1.0, "sample from the fewest tokens whose probabilities sum to p"),
    Knob("top_k", int, 0, "sample from the k likeliest tokens only; 0 or -1: from all"),
    Knob("min_p", float, 0.0, "sample from tokens at least this share as probable as the likeliest"),
    Knob("max_tokens", int, 16, "most tokens to generate"),
    Knob("min_tokens", int, 0, "no stop token and no stop string ends an output before it has this many tokens"),
    Knob("skip_special_tokens", bool, True, "leave special tokens out of the text"),
    Knob("include_stop_str_in_output", bool, False, "keep the stop string, or the stop token's text, in the text"),
]

SERVER = [
    Knob("host", str, "127.0.0.1", "the address to listen at; 0.0.0.0: all of this machine's"),
    Knob("port", int, 8000, "the port; 0: a free one, which the line that says where it listens names"),
    Knob("page_port", int, None, "a port of its own for the page and /metrics; without it they are at the first"),
    Knob("page_host", str, None, "the address of that port; without it 127.0.0.1"),
    Knob("chat_template", str, None, "a file with the template of chats, or the word plain"),
    Knob("show_text", bool, False, "show prompts and answers on the page to whoever opens it, not only their blocks"),
    Knob("shutdown_timeout", float, 30.0, "seconds that running requests have to end after SIGTERM"),
    Knob("allowed_origins", str, None, "servers whose pages may ask, with commas or as a JSON list; *: all"),
    Knob("max_num_queued_reqs", int, None, "most samples that run or wait; more are answered 429"),
    Knob("max_num_queued_tokens", int, None, "most tokens of prompts that wait for their first token, likewise"),
    Knob("max_logprobs", int, 20, "most log-probabilities that are told of a token; -1: as many as there are tokens"),
    Knob("max_request_tokens", int, 1048576, "most tokens that a request may come to, all prompts and samples"),
    Knob("max_body_bytes", int, 4194304, "most bytes of a request's body"),
    Knob("header_timeout", float, 10.0, "seconds in which a request's head must come"),
    Knob("body_timeout", float, 60.0, "seconds in which its body must come, and an answer finds its reader"),
]
