"""nanovllm bench peers: engines in processes of their own, what is told of them, and long contexts."""

import json
import re
import sys
from functools import partial

import pytest
import torch

from .. import LLM
from ..cli.benchmarks import contexts, floor, peers
from ..cli.benchmarks.agreement import agreement, margins
from ..cli.benchmarks.answers import Answer, Job, serve_here
from ..cli.benchmarks.peer_process import WORKER, PeerSpec, peer_specs
from ..cli.benchmarks.peers import Turn, busy_while_idle, figures
from ..cli.benchmarks.workers import serve_llama_cpp, to_gguf
from ..cli.benchmarks.workload import Task, mixed_tasks
from ..engine.kv_cache import bytes_per_token
from .fake_peer import ANSWERS, write_fake_peer
from .helpers import OPTIONS


@pytest.fixture
def fake(tmp_path):
    return partial(write_fake_peer, tmp_path)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(floor, "MAX_BYTES", 1 << 20)
    monkeypatch.setattr(peers, "DECODE_LENGTH", 8)
    monkeypatch.setattr(peers, "mixed_tasks", lambda llm: mixed_tasks(llm, 3, low=2, high=9))


def test_engines_serve_the_same_in_turn_and_are_compared(run, tmp_path, fake):
    file = tmp_path / "found.json"
    flags = ("--rounds", "2", "--jobs", "mixed,2", "--no-transformers", "--json", str(file))
    status, out, err = run("bench peers", *flags, "--peer", f"vllm={fake()}", "--peer", f"llama.cpp={fake()},a.gguf")
    found = json.loads(file.read_text())
    measured = found["measured"]
    assert (status, err) == (0, "") and list(measured) == ["nanovllm", "vllm", "llama.cpp"]
    assert found["machine"]["vllm"] == "9.9"
    # the fake one's tokens come 4 a second, its first after half a second
    assert measured["vllm"]["2 sequences: tokens per second"] == {"median": 8.0, "least": 8.0, "largest": 8.0}
    assert measured["vllm"]["2 sequences: step ms"] == 250.0
    ours = measured["nanovllm"]["2 sequences: tokens per second"]["median"]
    ratio = measured["vllm"]["2 sequences: nanovllm is times as fast"]
    assert ratio["least"] <= ours / 8.0 <= ratio["largest"] + 0.01
    assert 0 < measured["nanovllm"]["mixed: share of the floor"] < 1
    assert re.search(r"\n *mixed: tokens per second +[\d.,]+ / ", out)
    assert re.search(
        r"vllm: tokens of 0 of 3 requests are the same; .* the two best logits are at most [\d.]+ apart", out
    )


def test_without_peers_there_are_shares_of_the_floor(run):
    status, out, _ = run("bench peers", "--rounds", "1", "--jobs", "1", "--no-transformers")
    assert status == 0 and "1 sequence: share of the floor" in out and "times as fast" not in out


@pytest.mark.full
def test_transformers_of_this_environment_gives_the_same_tokens(run):
    batch = "--peer", f"transformers-batch={sys.executable}"
    status, out, _ = run("bench peers", "--rounds", "1", "--jobs", "mixed,1", *batch)
    assert status == 0 and "mixed: transformers: the tokens of all 3 requests are the same" in out
    assert "mixed: transformers-batch: the tokens of all 3 requests are the same" in out


@pytest.mark.parametrize(
    ("code", "ready", "says"),
    [
        ("", "sys.exit('no module named vllm')", "vllm ended with exit status 1: no module named vllm"),
        ("", "os._exit(3)", "vllm ended with exit status 3: it said nothing"),
        ("", 'say(error="ImportError: gone")', "vllm: ImportError: gone"),
        ("", "print('Hello')", "vllm answered 'Hello', no JSON with version"),
        ("sys.stdin.readline(); os._exit(5)", 'say(version="1")', "vllm ended with exit status 5: it said nothing"),
        ("sys.stdin.readline(); say(tokens=1)", 'say(version="1")', "vllm answered '{\"tokens\": 1}', no JSON with"),
        ("sys.stdin.readline(); print('[]')", 'say(version="1")', "vllm answered '[]', no JSON with tokens, times"),
        (
            ANSWERS.replace("[7] * n", "[7]"),
            'say(version="1")',
            "vllm answered other numbers of tokens than were",
        ),
        (ANSWERS.replace("0.25 * i", "-i"), 'say(version="1")', "vllm answered times that are not one for each token"),
    ],
)
def test_a_peer_that_fails_is_told_in_one_line(run, fake, code, ready, says):
    status, out, err = run(
        "bench peers", "--rounds", "1", "--jobs", "1", "--no-transformers", "--peer", f"vllm={fake(code, ready)}"
    )
    assert (status, out) == (2, "") and err.startswith(f"error: {says}") and err.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (
            ["--peer", "vllm"],
            "--peer vllm: give one of vllm, llama.cpp, transformers, transformers-batch as NAME=PYTHON or NAME=",
        ),
        (["--peer", "sglang=python"], "--peer sglang=python: give one of vllm"),
        (["--peer", "llama.cpp=python"], "--peer llama.cpp=python: llama.cpp needs its weights, as NAME=PYTHON,FILE"),
        (["--peer", "vllm=python,a"], "--peer vllm=python,a: vllm takes no file"),
        (["--peer", "vllm=a", "--peer", "vllm=b"], "--peer names an engine twice: vllm, vllm"),
        (["--peer", "vllm=no/python"], "vllm: 'no/python' cannot be run: No such file or directory"),
        (["--jobs", "mixed,0"], "--jobs '0': give whole numbers of at least 1 with commas between them"),
        (["--contexts", "1k"], "--contexts '1k': give whole numbers"),
        (["--jobs", "", "--contexts", "60"], "a prompt and its output have 60 + 9 tokens: max_model_len is 64"),
        (["--jobs", "", "--contexts", "40", "--kv-cache-tokens", "64"], "8 contexts of 40 tokens: the pool has 64"),
    ],
)
def test_a_mistake_is_one_line(run, flags, says):
    status, out, err = run("bench peers", "--no-transformers", "--rounds", "1", "--jobs", "1", *flags)
    assert (status, out) == (2, "") and err.startswith(f"error: {says}") and err.count("\n") == 1


def test_transformers_is_taken_from_here_unless_another_is_named():
    assert peer_specs(("transformers=python",), with_transformers=True) == [PeerSpec("transformers", "python")]
    assert peer_specs((), with_transformers=True) == [PeerSpec("transformers", sys.executable)]
    assert peer_specs((), with_transformers=False) == []


# The table's arithmetic


def test_a_share_of_the_floor_is_of_the_same_round(checkpoint):
    llm = LLM(checkpoint, **OPTIONS)
    job = Job("1 sequence", [Task([1, 2, 3], 3)], is_decode=True)
    answer = Answer([[5, 6, 7]], [[9.0, 10.0, 11.0]])
    num_bytes = 2 * floor.weight_bytes(llm) + (4 + 5) * bytes_per_token(llm.model_config, torch.float32)
    other = Turn(answer, num_bytes)  # the floor is a second of the two
    rounds = [{"nanovllm": Turn(answer, num_bytes * times), "vllm": other, "b": other} for times in (1, 9, 1)]
    assert figures(llm, job, "nanovllm", rounds) == {
        "1 sequence: tokens per second": {"median": 1.0, "least": 1.0, "largest": 1.0},
        "1 sequence: share of the floor": 0.5,
        "1 sequence: step ms": 1000.0,
    }


def test_decoding_begins_when_every_request_has_its_first_token():
    answer = Answer([[1, 2, 3], [4, 5, 6]], [[1.0, 2.0, 3.0], [2.0, 3.0, 4.0]])
    assert (answer.decode_seconds, answer.decoded_per_second, answer.step_seconds) == (2.0, 1.5, 1.0)
    assert (answer.seconds, answer.tokens_per_second) == (4.0, 1.5)


def test_an_engine_that_is_busy_while_others_compute_is_told():
    calm, busy = (Answer([[1]], [[2.0]], idle_cpu_seconds=used) for used in (0.01, 1.0))
    found = [{"a": Turn(calm, 1.0), "b": Turn(busy, 1.0)}]
    assert list(busy_while_idle(found)) == ["b used 50% of a core while others computed"]


def test_tokens_are_compared_to_the_first_that_differs_and_the_margin_is_told_there(checkpoint):
    llm = LLM(checkpoint, **OPTIONS)
    tasks = [Task([5, 6, 7], 4), Task([9, 8], 3)]
    here = serve_here(llm, tasks)
    assert agreement(llm, tasks, here, here) == {"equal": 2, "of": 2}
    other = Answer([here.tokens[0][:2] + [0, 0], here.tokens[1]], here.times)
    [margin] = margins(llm, [[5, 6, 7, *here.tokens[0][:2]]])
    assert agreement(llm, tasks, here, other) == {"equal": 1, "of": 2, "largest_margin": margin} and margin > 0


def test_mixed_tasks_are_the_same_on_every_machine(checkpoint):
    tasks = mixed_tasks(LLM(checkpoint, **OPTIONS))
    assert [(len(task.prompt), task.num_tokens) for task in tasks[:2]] == [(232, 114), (210, 243)]
    assert (len(tasks), sum(task.num_tokens for task in tasks)) == (32, 4259)


# Long contexts


def test_a_step_at_a_context_reads_so_many_keys_and_computes_no_prompt(checkpoint):
    llm = LLM(checkpoint, **OPTIONS, kv_cache_tokens=1024, enable_prefix_caching=False)
    before = llm.llm_engine.executor.num_tokens
    assert contexts.step_seconds(llm, 50, batch_size=4) > 0
    assert llm.llm_engine.executor.num_tokens - before == 4 * (1 + contexts.NUM_STEPS)
    assert not llm.llm_engine.has_unfinished_requests() and "allocate" not in vars(llm.llm_engine.kv_cache_manager)


def test_contexts_stand_in_the_table(run):
    _, out, _ = run("bench peers", "--jobs", "", "--contexts", "40", "--context-batch", "2", "--rounds", "1")
    assert re.search(r"context 40: step ms +[\d.]+\n", out) and "attention's share of the bandwidth" in out


def test_a_share_is_not_told_where_a_long_step_was_not_the_slower_one():
    found = [{"16": 0.010, "40": seconds, "0": 1e9} for seconds in (0.012, 0.009)]
    assert contexts.figures(40, 1e6, found)["context 40: attention's share of the bandwidth"] is None


# What runs in the peers' processes


def test_what_a_library_prints_is_no_answer(tmp_path):
    """The worker, with a made-up engine beside it."""
    import subprocess

    (tmp_path / "worker.py").write_text(WORKER.read_text())
    (tmp_path / "serve_made_up.py").write_text(
        "print('hello')\n"
        "def load(settings):\n"
        "    print('loading', settings.model)\n"
        "    return '1.0', lambda prompts, lengths: (prompts, [[0.5] * n for n in lengths])\n"
    )
    settings = {name: 1 for name in ("threads", "max_model_len", "max_num_seqs", "kv_cache_bytes")}
    settings |= {"model": "m", "dtype": "float32", "file": ""}
    command = [sys.executable, "-S", str(tmp_path / "worker.py"), "serve_made_up", json.dumps(settings)]
    job = json.dumps({"prompts": [[3]], "lengths": [1]}) + "\n"
    done = subprocess.run(command, input=job + "no job\n", capture_output=True, text=True)
    ready, answer, error = map(json.loads, done.stdout.splitlines())
    assert ready == {"version": "1.0"} and (answer["tokens"], answer["times"]) == ([[3]], [[0.5]])
    assert error["error"].startswith("JSONDecodeError") and done.returncode == 1 and "loading m" in done.stderr


class FakeLlamaCpp:
    """The C functions that the loop calls: the next token is the sum of the tokens of its slot so far, modulo 11."""

    def __init__(self):
        from types import SimpleNamespace

        rows = range(64)
        self.batch = SimpleNamespace(
            n_tokens=0, token=[0] * 64, pos=[0] * 64, n_seq_id=[0] * 64, seq_id=[[0] for _ in rows], logits=[0] * 64
        )
        self.slots, self.most_slots, self.logits = {}, 0, {}

    def llama_decode(self, context, batch):
        self.logits = {}
        for row in range(batch.n_tokens):
            text = self.slots.setdefault(batch.seq_id[row][0], [])
            assert batch.pos[row] == len(text), "a position was left out"
            text.append(batch.token[row])
            if batch.logits[row]:
                self.logits[row] = sum(text) % 11
        self.most_slots = max(self.most_slots, len(self.slots))
        return 0

    def llama_memory_seq_rm(self, memory, slot, start, end):
        del self.slots[slot]


def test_llama_cpp_gets_each_token_once_in_a_slot_that_is_free():
    c, made = FakeLlamaCpp(), serve_llama_cpp.Context.__new__(serve_llama_cpp.Context)
    made._c, made._batch, made._slots, made._max_batch = c, c.batch, 2, 8
    made._context = made._memory = None
    made._likeliest = lambda row: c.logits[row]
    prompts, lengths = [[1, 2, 3], [4, 5], [6], [7, 8, 9]], [3, 1, 4, 2]
    tokens, times = made.serve(prompts, lengths)
    for prompt, length, new in zip(prompts, lengths, tokens, strict=True):
        text = list(prompt)
        for _ in range(length):
            text.append(sum(text) % 11)
        assert new == text[len(prompt) :]
    assert [len(each) for each in times] == lengths and c.slots == {} and c.most_slots == 2


def test_weights_are_read_from_a_checkpoint_and_rounded_as_torch_rounds(checkpoint, tmp_path):
    from safetensors.torch import load_file, save_file

    ours, there = dict(to_gguf.tensors(checkpoint)), load_file(checkpoint / "model.safetensors")
    assert ours.keys() == there.keys() and all((ours[name] == there[name].numpy()).all() for name in ours)
    wide = torch.randn(4, 6) * 100
    rounded = torch.from_numpy(to_gguf.bfloat16_bytes(wide.numpy())).view(torch.bfloat16)
    assert torch.equal(rounded, wide.to(torch.bfloat16))
    save_file({"a": rounded}, tmp_path / "a.safetensors")
    [(_, found)] = to_gguf.tensors(tmp_path)
    assert (found == rounded.float().numpy()).all()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": "qwen3"}, "model_type 'qwen3': this writes llama and mistral"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope scaling is not written"),
    ],
)
def test_what_a_file_cannot_say_is_refused(changes, says):
    with pytest.raises(ValueError, match=says):
        to_gguf.describe(None, {"model_type": "llama"} | changes)
    with pytest.raises(ValueError, match=r"tensor model\.layers\.0\.self_attn\.q_norm\.weight is not one of a Llama"):
        to_gguf.gguf_name("model.layers.0.self_attn.q_norm.weight")
