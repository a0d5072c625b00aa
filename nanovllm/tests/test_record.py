"""A record of the engine's answers: tokens, texts, reasons, counts and logprobs.

A rewrite that should change nothing must reproduce them. A greedy token may differ only where the record marks a near
tie of the two best logits, and for at most one token in a thousand. Sampled tokens may never differ.

    python -m nanovllm.tests.test_record           run the requests, and print the differences
    python -m nanovllm.tests.test_record --write   rewrite data/record.json.gz

The kernels must match the same record: cpu/test_kernel_record.py.
"""

import gzip
import json
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from .. import LLM, BeamSearchParams, RequestOutputKind, SamplingParams, StructuredOutputsParams

RECORD = Path(__file__).parent / "data" / "record.json.gz"
STORYTELLER = Path(__file__).resolve().parents[2] / "models" / "storyteller"
MARGIN = 1e-3  # of the logits' standard deviation: closer logits are a near tie
MAX_EXCUSED = 1000  # tokens for each one that may differ
TOLERANCE = 1e-4  # of a logprob

TEXTS = [
    "Once upon a time there was a little rabbit who",
    "The King had three sons, and the youngest",
    "A",
    "“Wer bist du?” fragte die Prinzessin, und der Frosch",
    "昔々あるところに、おじいさんと 🦊 and",
    "The end of the line\nand the next line\n\nand one more",
]
LONG = (
    "The miller had a daughter, and the daughter had a goose. Every morning she led it down to the river, where the "
    "water was clear and the stones were smooth, and every evening she led it home again. One day the goose would not "
    "come. It stood in the shallow water with its neck stretched out, and looked at the far bank, and said nothing. "
)
IDS = [[1], [1, 403, 88, 1200, 4095, 3, 259], [77, 78, 79, 80, 2000, 2001], [5] * 33]
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
SCHEMA = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["age"],
}
OFFLOADING = {"kv_cache_tokens": 128, "block_size": 8, "max_model_len": 112}


# The random checkpoint


CONFIG: dict[str, Any] = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 4096,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def write_random(folder: Path) -> Path:
    """Return the folder with the storyteller's tokenizer and a random Qwen3 with grouped queries, always the same."""
    (folder / "config.json").write_text(json.dumps(CONFIG))
    for name in ("tokenizer.model", "tokenizer_config.json"):
        (folder / name).write_bytes((STORYTELLER / name).read_bytes())
    generator = torch.Generator().manual_seed(7)
    tensors = {f"{name}.weight": random_tensor(name, shape, generator) for name, shape in shapes()}
    save_file(tensors, folder / "model.safetensors")
    return folder


def shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the name and shape of each weight, in a fixed order."""
    hidden, inner, dim = CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["head_dim"]
    q, kv = dim * CONFIG["num_attention_heads"], dim * CONFIG["num_key_value_heads"]
    linears = {"q_proj": (q, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden), "o_proj": (hidden, q)}
    inner_linears = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    yield "model.embed_tokens", (CONFIG["vocab_size"], hidden)
    yield "lm_head", (CONFIG["vocab_size"], hidden)
    yield "model.norm", (hidden,)
    for i in range(CONFIG["num_hidden_layers"]):
        yield from ((f"model.layers.{i}.self_attn.{name}", shape) for name, shape in linears.items())
        yield from ((f"model.layers.{i}.self_attn.{name}", (dim,)) for name in ("q_norm", "k_norm"))
        yield from ((f"model.layers.{i}.mlp.{name}", shape) for name, shape in inner_linears.items())
        yield from ((f"model.layers.{i}.{name}", (hidden,)) for name in ("input_layernorm", "post_attention_layernorm"))


def random_tensor(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    noise = torch.randn(shape, generator=generator)
    if len(shape) == 1:
        return 1 + 0.2 * noise
    return noise if "embed" in name else noise * 1.5 * shape[-1] ** -0.5


@pytest.fixture(scope="session")
def random_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random(tmp_path_factory.mktemp("random"))


# Requests


class PromptAndParams(NamedTuple):
    prompt: Any
    params: dict[str, Any]


def greedy(prompt: Any, max_tokens: int = 16, **params: Any) -> PromptAndParams:
    return PromptAndParams(prompt, {"temperature": 0.0, "max_tokens": max_tokens} | params)


def sampled(prompt: Any, seed: int, **params: Any) -> PromptAndParams:
    return PromptAndParams(prompt, {"seed": seed, "max_tokens": 14} | params)


def each_after_the_other(text: str) -> list[PromptAndParams]:
    return [greedy(text, 6), greedy(f"{text} Then", 6), greedy(text[:150], 6), sampled(text, 3, n=2, max_tokens=6)]


# Each group: the options of its engine, its requests, and whether they run together or one after the other.
TOGETHER: dict[str, tuple[dict[str, Any], list[PromptAndParams]]] = {
    "greedy": ({}, [greedy(prompt, 20) for prompt in [*TEXTS, LONG]]),
    "token ids": ({}, [greedy(prompt, 20, ignore_eos=True) for prompt in IDS]),
    "sampled": (
        {},
        [
            sampled(TEXTS[0], 1),
            sampled(TEXTS[1], 2, temperature=0.7),
            sampled(TEXTS[2], 3, top_k=5),
            sampled(TEXTS[3], 4, temperature=0.8, top_k=40, top_p=0.9),
            sampled(TEXTS[4], 5, top_p=0.5),
            sampled(TEXTS[5], 6, min_p=0.1),
            sampled(TEXTS[0], 7, n=3),
        ],
    ),
    "penalties": (
        {},
        [
            greedy(TEXTS[0], repetition_penalty=1.3, ignore_eos=True),
            greedy(TEXTS[1], presence_penalty=1.5, frequency_penalty=0.5, ignore_eos=True),
            sampled(TEXTS[2], 1, repetition_penalty=0.8),
            sampled(TEXTS[3], 2, presence_penalty=-1.0, frequency_penalty=2.0),
        ],
    ),
    "bans": (
        {},
        [
            greedy(TEXTS[0], bad_words=["the", "was a very"]),
            greedy(TEXTS[0], logit_bias={262: -100.0, 311: 2.5}),
            greedy(TEXTS[1], allowed_token_ids=[262, 311, 597, 261, 2], min_tokens=6),
            sampled(TEXTS[1], 5, min_tokens=8, logit_bias={2: 20.0}),
        ],
    ),
    "forms": (
        {},
        [
            greedy(
                TEXTS[0], 30, structured_outputs=StructuredOutputsParams(regex="The (old |little )?(fox|owl) sat\\.")
            ),
            sampled(TEXTS[1], 4, structured_outputs=StructuredOutputsParams(choice=["a fox", "an owl", "émoji 🎉"])),
            greedy(TEXTS[2], 30, structured_outputs=StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True)),
            sampled(TEXTS[0], 6, structured_outputs=StructuredOutputsParams(grammar='start: "a"~2..3 "."')),
        ],
    ),
    "stops": (
        {},
        [
            greedy(TEXTS[0], 24, stop=["e", "zz"], min_tokens=5),
            greedy(TEXTS[1], 24, stop="a", include_stop_str_in_output=True),
            greedy(TEXTS[1], 24, stop_token_ids=[262, 311]),
            sampled(TEXTS[0], 1, logit_bias={2: 9.0}, max_tokens=24),
            sampled(TEXTS[0], 1, logit_bias={2: 9.0}, ignore_eos=True),
            greedy(TEXTS[2], 8, detokenize=False),
        ],
    ),
    "logprobs": (
        {"max_num_batched_tokens": 24},
        [
            greedy(TEXTS[0], 8, logprobs=3),
            greedy(TEXTS[1], 4, prompt_logprobs=2),
            greedy(TEXTS[3], 6, logprobs=2),
            sampled(TEXTS[2], 4, logprobs=2, max_tokens=8),
            greedy(TEXTS[0], 6, logprob_token_ids=[5, 9, 400]),
        ],
    ),
    "chunks": ({"max_num_batched_tokens": 7, "max_num_seqs": 7}, [greedy(LONG, 8), sampled(TEXTS[0], 1, n=2)]),
    "few seats": ({"max_num_seqs": 2, "block_size": 1}, [greedy(text, 8) for text in TEXTS]),
    "small pool": (
        {"kv_cache_tokens": 96, "block_size": 4, "max_model_len": 96, "watermark": 0.0},
        [*(greedy(text, 36, ignore_eos=True) for text in TEXTS[:4]), sampled(TEXTS[5], 1, n=2, max_tokens=30)],
    ),
    "failed": (
        {"kv_cache_tokens": 128},
        [
            greedy([1] * 257),
            greedy([1] * 200),
            greedy([]),
            greedy(""),
            greedy([99999]),
            greedy([-1]),
            greedy(TEXTS[0], stop_token_ids=[4096]),
            greedy(TEXTS[0], min_tokens=1000, max_tokens=None),
        ],
    ),
}
IN_TURN: dict[str, tuple[dict[str, Any], list[PromptAndParams]]] = {
    "prefix caching": ({}, each_after_the_other(LONG)),
    "without caching": ({"enable_prefix_caching": False}, each_after_the_other(LONG)),
    "loaded": (OFFLOADING, [greedy(prompt, 6) for prompt in [LONG[:250], TEXTS[0] * 6, TEXTS[1] * 6] * 2]),
    "computed again": (
        OFFLOADING | {"offload_policy": "recompute"},
        [greedy(prompt, 6) for prompt in [LONG[:250], TEXTS[0] * 6, TEXTS[1] * 6] * 2],
    ),
}
BEAMS: list[dict[str, Any]] = [
    {"beam_width": 2},
    {"beam_width": 4, "length_penalty": 0.0},
    {"beam_width": 3, "length_penalty": 2.0, "early_stopping": True},
    {"beam_width": 3, "ignore_eos": True, "early_stopping": "never"},
]
BAD_PARAMS: list[dict[str, Any]] = [
    {"n": 0},
    {"temperature": -1},
    {"top_p": 1.5},
    {"min_tokens": 20, "max_tokens": 10},
    {"stop": ["a"], "detokenize": False},
    {"logit_bias": {"a": 1}},
    {"logprobs": -2},
    {"temprature": 1},
    {"best_of": 2},
]

# Answers as JSON

Answers = dict[str, Any]  # by the name of a request
Make = Callable[..., LLM]  # builds an engine with these options


def as_places(logprobs: Any) -> list[list[tuple[int, float]] | None] | None:
    """Return the tokens at each position and their logprobs."""
    if logprobs is None:
        return None
    return [place and [(token, ending.logprob) for token, ending in place.items()] for place in logprobs]


def as_answer(output: Any, is_greedy: bool = False) -> dict[str, Any]:
    completions = [
        {
            "token_ids": [*each.token_ids],
            "text": each.text,
            "reasons": [each.finish_reason, each.stop_reason],
            "logprob": each.cumulative_logprob,
            "places": as_places(each.logprobs),
        }
        for each in output.outputs
    ]
    counts = {"prompt_token_ids": [*output.prompt_token_ids], "num_cached_tokens": output.num_cached_tokens}
    ending = {"finished": output.finished, "failed": output.error is not None, "outputs": completions}
    return counts | ending | {"prompt_places": as_places(output.prompt_logprobs), "is_greedy": is_greedy}


def answer_all(make: Make) -> Answers:
    """Return the answers to all requests."""
    answers: Answers = {}
    for name, (options, requests) in TOGETHER.items():
        answers |= generated(make(**options), name, requests)
    for name, (options, requests) in IN_TURN.items():
        llm = make(**options)
        for i, each in enumerate(requests):
            answers |= generated(llm, f"{name} {i}", [each])
        answers[f"{name}, counted"] = counts_of(llm)
    for part in (answer_beams, answer_steps, answer_chat, answer_bad_params):
        answers |= part(make)
    return answers


def generated(llm: LLM, name: str, requests: list[PromptAndParams]) -> Answers:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some requests cannot be served
        params = [SamplingParams(**each.params) for each in requests]
        outputs = llm.generate([each.prompt for each in requests], params, use_tqdm=False)
    pairs = enumerate(zip(requests, outputs, strict=True))
    return {f"{name}: {i}": as_answer(output, is_plain(each)) for i, (each, output) in pairs}


def is_plain(requests: PromptAndParams) -> bool:
    """Return True if each token is the likeliest by the model's own logits: only then are near ties known."""
    changes = {"repetition_penalty", "presence_penalty", "frequency_penalty", "bad_words", "logit_bias"}
    changes |= {"allowed_token_ids", "structured_outputs", "min_tokens"}
    return requests.params.get("temperature") == 0 and not changes & requests.params.keys()


def counts_of(llm: LLM) -> dict[str, int]:
    stats = llm.stats()
    names = ("preemptions", "blocks_stored", "blocks_loaded", "prefix_hits", "prompt_tokens", "generation_tokens")
    return {name: getattr(stats, name) for name in names}


def answer_beams(make: Make) -> Answers:
    llm, answers = make(), Answers()
    for i, params in enumerate(BEAMS):
        prompts: list[Any] = [TEXTS[i], [1, 403, 88]]
        outputs = llm.beam_search(prompts, BeamSearchParams(max_tokens=8, **params))
        answers |= {f"beams {i}: {j}": as_answer(output) for j, output in enumerate(outputs)}
    return answers


def answer_steps(make: Make) -> Answers:
    """Serve requests that arrive at different times, with all kinds of outputs, and abort some of them."""
    llm = make(kv_cache_tokens=128, block_size=8, max_model_len=96)
    engine, answers = llm.llm_engine, Answers()
    requests = [greedy(TEXTS[i % 3], 12, ignore_eos=True, output_kind=kind) for i, kind in enumerate(RequestOutputKind)]
    requests += [
        sampled(TEXTS[3], 1, n=2, output_kind=RequestOutputKind.DELTA),
        greedy(LONG[:200], 20, ignore_eos=True),
    ]
    requests += [greedy(TEXTS[i], 20, ignore_eos=True) for i in range(4)]
    for step in range(100):
        if step < len(requests):
            engine.add_request(str(step), requests[step].prompt, SamplingParams(**requests[step].params))
        aborted = engine.abort_request({6: ["1"], 9: ["4", "8", "nobody"]}.get(step, []))
        for output in [*aborted, *engine.step()]:
            is_whole = requests[int(output.request_id)].params.get("output_kind") is not RequestOutputKind.DELTA
            if output.finished or not is_whole or step % 5 == 0:
                answers[f"step {step}: {output.request_id}"] = as_answer(output)
        if not engine.has_unfinished_requests():
            break
    return answers | {"steps, counted": counts_of(llm) | {"steps": step}}


def answer_chat(make: Make) -> Answers:
    messages = [{"role": "system", "content": "You are a fox."}, {"role": "user", "content": "Tell me a story"}]
    requests = greedy("", 10)
    outputs = make(chat_template=TEMPLATE).chat(messages, SamplingParams(**requests.params), use_tqdm=False)
    return {"chat": as_answer(outputs[0], True)}


def answer_bad_params(make: Make) -> Answers:
    """Return the errors of SamplingParams for invalid values."""
    return {f"params {i}": {"error": error_of(params)} for i, params in enumerate(BAD_PARAMS)}


def error_of(params: dict[str, Any]) -> str | None:
    try:
        SamplingParams(**params)
    except Exception as error:
        return type(error).__name__
    return None


# The comparison


class Compared(NamedTuple):
    num_tokens: int
    num_excused: int
    faults: list[str]


def compare(recorded: Answers, answers: Answers) -> Compared:
    """Return how many tokens were compared, how many differ in near ties, and all other differences."""
    num_tokens = num_excused = 0
    faults = [f"{name}: in only one of the two" for name in recorded.keys() ^ answers.keys()]
    for name in recorded.keys() & answers.keys():
        compared = compare_answer(recorded[name], as_read(answers[name]))
        num_tokens, num_excused = num_tokens + compared.num_tokens, num_excused + compared.num_excused
        faults += [f"{name}: {fault}" for fault in compared.faults]
    return Compared(num_tokens, num_excused, sorted(faults))


def as_read(answer: Any) -> Any:
    """Return a value as JSON reads it back."""
    return json.loads(json.dumps(answer))


def compare_answer(recorded: dict[str, Any], answer: dict[str, Any]) -> Compared:
    pairs = list(zip(recorded.get("outputs", []), answer.get("outputs", []), strict=False))
    compared = [compare_output(*pair) for pair in pairs]
    faults = [fault for each in compared for fault in each.faults]
    names = [name for name in recorded if name not in ("outputs", "prompt_places", "is_greedy")]
    faults += [
        f"{name} is {answer.get(name)}, recorded {recorded[name]}"
        for name in names
        if answer.get(name) != recorded[name]
    ]
    if len(recorded.get("outputs", [])) != len(answer.get("outputs", [])):
        faults.append("the number of outputs differs")
    if not are_near(recorded.get("prompt_places"), answer.get("prompt_places")):
        faults.append("the prompt's log-probabilities differ")
    return Compared(sum(each.num_tokens for each in compared), sum(each.num_excused for each in compared), faults)


def compare_output(recorded: dict[str, Any], output: dict[str, Any]) -> Compared:
    """Compare up to the first difference in a near tie, after which anything is possible."""
    recorded_value, got = recorded["token_ids"], output["token_ids"]
    different = [i for i, (one, other) in enumerate(zip(recorded_value, got, strict=False)) if one != other]
    if different and different[0] in recorded.get("ties", []):
        return Compared(different[0] + 1, 1, [])
    if recorded_value != got:
        return Compared(len(recorded_value), 0, [f"tokens are {got}, recorded {recorded_value}"])
    faults = [
        f"{name} is {output[name]!r}, recorded {recorded[name]!r}"
        for name in ("text", "reasons")
        if output[name] != recorded[name]
    ]
    if not is_near(recorded["logprob"], output["logprob"], max(1, len(recorded_value))):
        faults.append(f"cumulative_logprob is {output['logprob']}, recorded {recorded['logprob']}")
    if not are_near(recorded["places"], output["places"]):
        faults.append("log-probabilities differ")
    return Compared(len(recorded_value), 0, faults)


def is_near(recorded: float, logprob: float, count: int = 1) -> bool:
    """Return True if a sum of `count` logprobs equals the recorded one."""
    return recorded == logprob or abs(recorded - logprob) <= TOLERANCE * count


def are_near(recorded: Any, places: Any) -> bool:
    """Return True if two lists have the same logprobs. Equal logprobs may belong to either token."""
    if recorded is None or places is None:
        return recorded is places
    if [place and len(place) for place in recorded] != [place and len(place) for place in places]:
        return False
    both = zip(recorded, places, strict=True)
    pairs = [pair for one, other in both for pair in zip(one or [], other or [], strict=True)]
    return all(is_near(one[1], other[1]) for one, other in pairs)


# The record


def make_with(folder: Path, backend: str) -> Make:
    """Return a function that builds an engine on a checkpoint."""
    given: dict[str, Any] = {"dtype": "float32", "device": "cpu", "max_model_len": 256, "kv_cache_tokens": 2048}
    given |= {"offload_policy": "load", "attention_backend": backend}
    return lambda **options: LLM(folder, **(given | options))


def read_record() -> dict[str, Answers]:
    return json.loads(gzip.decompress(RECORD.read_bytes()))


def write_record(record: dict[str, Answers]) -> None:
    """Write the record so that equal records give equal files."""
    text = json.dumps(record, separators=(",", ":"), ensure_ascii=False)
    RECORD.parent.mkdir(exist_ok=True)
    RECORD.write_bytes(gzip.compress(text.encode(), compresslevel=9, mtime=0))


def with_ties(answers: Answers, make: Make) -> Answers:
    """Return rounded answers with the positions of near ties, from the model's logits for each output as a prompt."""
    llm = make(max_num_batched_tokens=512, max_model_len=512, enable_prefix_caching=False)
    for answer in answers.values():
        for output in answer.get("outputs", []):
            output["ties"] = ties(llm, answer["prompt_token_ids"], output["token_ids"]) if answer["is_greedy"] else []
    return json.loads(json.dumps(answers), parse_float=lambda digits: round(float(digits), 6))


def ties(llm: LLM, prompt: list[int], output: list[int]) -> list[int]:
    """Return the positions in `output` where the two best logits are within MARGIN standard deviations."""
    if not output:
        return []
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=-1, detokenize=False)
    [read] = llm.generate([prompt + output], params, use_tqdm=False)
    rows = torch.tensor(
        [[ending.logprob for ending in place.values()] for place in read.prompt_logprobs[len(prompt) :]]
    )
    best = rows.topk(2).values  # [len(output), 2]
    return [i for i, (one, two) in enumerate(best.tolist()) if one - two < MARGIN * rows[i].std().item()]


def check(model: str, folder: Path, backend: str) -> Compared:
    """Run the requests and compare their answers with the record."""
    return compare(read_record()[model], answer_all(make_with(folder, backend)))


def assert_as_recorded(compared: Compared) -> None:
    assert not compared.faults, "\n".join(compared.faults)
    assert compared.num_tokens > 1000, "nothing was compared"
    assert compared.num_excused * MAX_EXCUSED <= compared.num_tokens, (
        f"{compared.num_excused} tokens differ in near ties"
    )


@pytest.mark.parametrize("model", ["random", pytest.param("storyteller", marks=pytest.mark.full)])
def test_answers_match_the_record(model, random_folder):
    pytest.importorskip("llguidance")
    assert_as_recorded(check(model, STORYTELLER if model == "storyteller" else random_folder, "torch"))


def test_token_may_differ_only_in_a_near_tie():
    output = {"token_ids": [5, 6, 7], "text": "a", "reasons": ["length", None], "logprob": -3.0, "places": None}
    recorded = {"outputs": [output | {"ties": [1]}]}
    for tokens, num_tokens, num_excused, num_faults in (
        ([5, 6, 7], 3, 0, 0),
        ([5, 9, 9], 2, 1, 0),
        ([5, 6, 9], 3, 0, 1),
        ([5, 6], 3, 0, 1),
    ):
        compared = compare({"a": recorded}, {"a": {"outputs": [output | {"token_ids": tokens}]}})
        assert compared[:2] == (num_tokens, num_excused)
        assert len(compared.faults) == num_faults


@pytest.mark.parametrize("change", [{"text": "b"}, {"reasons": ["stop", None]}, {"logprob": -3.1}])
def test_any_other_difference_is_a_fault(change):
    output = {"token_ids": [5], "text": "a", "reasons": ["length", None], "logprob": -3.0, "places": None}
    recorded = {"outputs": [output], "num_cached_tokens": 0}
    assert compare_answer(recorded, {"outputs": [output | change], "num_cached_tokens": 0}).faults
    assert compare_answer(recorded, {"outputs": [output], "num_cached_tokens": 16}).faults
    assert not compare_answer(recorded, recorded).faults


def main() -> int:
    """Write the record, or print the differences from it."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        folders = {"storyteller": STORYTELLER, "random": write_random(Path(place))}
        if "--write" in sys.argv:
            makes = {model: make_with(folder, "torch") for model, folder in folders.items()}
            write_record({model: with_ties(answer_all(make), make) for model, make in makes.items()})
            return 0
        backend = "numba" if "--kernels" in sys.argv else "torch"
        compared = {model: check(model, folder, backend) for model, folder in folders.items()}
    for model, (num_tokens, num_excused, faults) in compared.items():
        print(*faults, f"{model}: {num_tokens} tokens, {num_excused} excused, {len(faults)} faults", sep="\n")
    return int(any(each.faults for each in compared.values()))


if __name__ == "__main__":
    sys.exit(main())
