"""python -m stages.bench race: engines in processes of their own, their reports and errors, and long peers."""

import ctypes
import json
import re
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest

from nanovllm import LLM
from nanovllm.bench import floor
from nanovllm.bench.engine import Run, serve
from nanovllm.bench.floor import Floor
from nanovllm.bench.workload import Task, mixed_tasks
from nanovllm.checkpoints.sizes import kv_bytes_per_token
from nanovllm.tests.testing.checkpoints import write_checkpoint
from nanovllm.tests.testing.engines import OPTIONS
from stages.bench import peers
from stages.bench.options import Peers
from stages.bench.peers import WORKER, Agreement, Job, PeerSpec, agreement, idle_notes, margins, numbers, peer_specs
from stages.bench.workers import serve_llama_cpp
from tests.fake_peer import ANSWERS, write_fake_peer


@pytest.fixture
def fake(tmp_path):
    return partial(write_fake_peer, tmp_path)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(floor, "NUM_BYTES", 1 << 20)
    monkeypatch.setattr(peers, "DECODE_LENGTH", 8)
    monkeypatch.setattr(peers, "find_library", lambda name: None)
    monkeypatch.setattr(peers, "mixed_tasks", lambda vocab_size: mixed_tasks(vocab_size, 3, low=2, high=9))


def test_engines_take_turns_serving_the_same_jobs(run, tmp_path, fake):
    file = tmp_path / "report.json"
    flags = ("--rounds", "2", "--jobs", "mixed,2", "--no-transformers", "--json", str(file))
    status, out, err = run("race", *flags, "--peer", f"vllm={fake()}", "--peer", f"llama.cpp={fake()},a.gguf")
    report = json.loads(file.read_text())
    measured = report["measured"]
    assert (status, err) == (0, "") and list(measured) == ["nanovllm", "vllm", "llama.cpp"]
    assert report["machine"]["vllm"] == "9.9"
    # the fake peer generates 4 tokens per second, the first after half a second
    assert measured["vllm"]["2 sequences: tokens per second"] == {"median": 8.0, "least": 8.0, "largest": 8.0}
    assert measured["vllm"]["2 sequences: step ms"] == 250.0
    ours = measured["nanovllm"]["2 sequences: tokens per second"]["median"]
    ratio = measured["vllm"]["2 sequences: nanovllm's speedup"]
    assert ratio["least"] <= ours / 8.0 <= ratio["largest"] + 0.01
    assert 0 < measured["nanovllm"]["mixed: share of the floor"] < 1
    assert re.search(r"\n *mixed: tokens per second +[\d.,]+ / ", out)
    assert re.search(
        r"vllm: the tokens of 0 of 3 requests are the same; .* the two best logits are at most [\d.]+ apart", out
    )


def test_engine_alone_is_compared_with_the_floor(run):
    status, out, _ = run("race", "--rounds", "1", "--jobs", "1", "--no-transformers")
    assert status == 0 and "1 sequence: share of the floor" in out and "speedup" not in out


@pytest.mark.full
def test_formats_prompts_and_a_busy_process_are_jobs_of_one_run(run, tmp_path, fake):
    file = tmp_path / "report.json"
    peer = fake()
    flags = ("--rounds", "2", "--jobs", "1", "--prompts", "20", "--busy-jobs", "1", "--no-transformers")
    several = ("--peer", f"llama.cpp={peer},a.gguf", "--peer", f"llama.cpp:Q4_0={peer},b.gguf", "--formats", "int8")
    model = write_checkpoint(tmp_path, intermediate_size=96)
    status, _, err = run("race", *flags, *several, "--json", str(file), model=model)
    assert (status, err) == (0, "")
    report = json.loads(file.read_text())
    measured = report["measured"]
    assert list(measured) == ["nanovllm", "nanovllm int8", "llama.cpp", "llama.cpp Q4_0"]
    for shown in measured.values():
        assert shown["1 sequence beside a busy process: tokens per second"]["median"] > 0
    assert measured["llama.cpp Q4_0"]["prompt 20: first token ms"]["median"] == 500.0  # as the fake peer says
    ours = measured["nanovllm"]["prompt 20: first token ms"]
    speedup = measured["llama.cpp"]["prompt 20: nanovllm's speedup"]
    assert speedup["least"] <= 500 / ours["median"] * 1.001 and 500 / ours["median"] <= speedup["largest"] * 1.001
    assert report["settings"]["formats"] == "int8" and "prompt 20: share of the floor" not in measured["nanovllm"]


@pytest.mark.nightly
def test_transformers_generates_the_same_tokens(run):
    batch = "--peer", f"transformers-batch={sys.executable}"
    status, out, _ = run("race", "--rounds", "1", "--jobs", "mixed,1", *batch)
    assert status == 0 and "mixed: transformers: the tokens of all 3 requests are the same" in out
    assert "mixed: transformers-batch: the tokens of all 3 requests are the same" in out


@pytest.mark.parametrize(
    ("code", "ready", "expected"),
    [
        ("", "sys.exit('no module named vllm')", "vllm ended with exit status 1: no module named vllm"),
        ("", "os._exit(3)", "vllm ended with exit status 3: no output"),
        ("", 'write(error="ImportError: no vllm")', "vllm: ImportError: no vllm"),
        ("", "print('Hello')", "vllm printed 'Hello', not JSON with version"),
        ("sys.stdin.readline(); os._exit(5)", 'write(version="1")', "vllm ended with exit status 5: no output"),
        (
            "sys.stdin.readline(); write(tokens=1)",
            'write(version="1")',
            "vllm printed '{\"tokens\": 1}', not JSON with",
        ),
        ("sys.stdin.readline(); print('[]')", 'write(version="1")', "vllm printed '[]', not JSON with tokens, times"),
        (
            ANSWERS.replace("[7] * n", "[7]"),
            'write(version="1")',
            "vllm returned 1 tokens for request 0, which needs 8",
        ),
        (ANSWERS.replace("0.25 * i", "-i"), 'write(version="1")', "vllm returned times that are not one per token"),
    ],
)
def test_failed_peer_is_a_one_line_error(run, fake, code, ready, expected):
    status, out, err = run(
        "race", "--rounds", "1", "--jobs", "1", "--no-transformers", "--peer", f"vllm={fake(code, ready)}"
    )
    assert (status, out) == (2, "") and err.startswith("error: ") and expected in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (
            ["--peer", "vllm"],
            "vllm, llama.cpp, transformers, transformers-batch, got 'vllm'",
        ),
        (["--peer", "sglang=python"], "got 'sglang=python'"),
        (["--peer", "llama.cpp=python"], "--peer llama.cpp=python: llama.cpp needs its weights, as NAME=PYTHON,FILE"),
        (["--peer", "vllm=python,a"], "--peer vllm=python,a: vllm takes no file"),
        (["--peer", "vllm=a", "--peer", "vllm=b"], "--peer names an engine twice: vllm, vllm"),
        (["--peer", "vllm=no/python"], "vllm: cannot run 'no/python': No such file or directory"),
        (["--jobs", "mixed,0"], "--jobs must be whole numbers of at least 1, separated by commas, got '0'"),
        (["--contexts", "1k"], "--contexts must be whole numbers"),
        (["--jobs", "", "--contexts", "60"], "60 + 9 tokens, but max_model_len is 64"),
        (
            ["--jobs", "", "--contexts", "40", "--kv-cache-tokens", "64"],
            "8 contexts of 40 tokens do not fit in the pool of 64 slots",
        ),
    ],
)
def test_invalid_option_is_a_one_line_error(run, flags, expected):
    status, out, err = run("race", "--no-transformers", "--rounds", "1", "--jobs", "1", *flags)
    assert (status, out) == (2, "") and err.startswith("error: ") and expected in err and err.count("\n") == 1


def test_transformers_comes_from_this_environment_by_default():
    assert peer_specs(("transformers=python",), with_transformers=True) == [PeerSpec("transformers", "python")]
    assert peer_specs((), with_transformers=True) == [PeerSpec("transformers", sys.executable)]
    assert peer_specs((), with_transformers=False) == []


# The numbers


def test_share_of_the_floor_belongs_to_the_same_round(checkpoint):
    llm = LLM(checkpoint, **OPTIONS)
    job = Job("1 sequence", [Task([1, 2, 3], 3)], "decode")
    run = Run([[5, 6, 7]], [[9.0, 10.0, 11.0]])
    num_bytes = 2 * floor.weight_bytes(llm) + (4 + 5) * kv_bytes_per_token(llm.model_config, itemsize=4)
    rounds = [{"nanovllm": run, "read": num_bytes * times} for times in (1, 9, 1)]  # the floor is one of two seconds
    assert numbers(Floor.of(llm), job, "nanovllm", rounds) == {
        "1 sequence: tokens per second": {"median": 1.0, "least": 1.0, "largest": 1.0},
        "1 sequence: share of the floor": 0.5,
        "1 sequence: step ms": 1000.0,
    }


def test_floor_of_an_engine_has_the_bytes_of_its_own_weights(tmp_path):
    write_checkpoint(tmp_path, hidden_size=64, intermediate_size=128)
    llm = LLM(tmp_path, dtype="bfloat16", **OPTIONS)
    bf16 = Floor.of(llm)
    int8, int4 = (PeerSpec("nanovllm", "python", label=name).floor(llm) for name in ("int8", "int4"))
    assert PeerSpec("vllm", "python").floor(llm) == bf16
    assert bf16.step_bytes / 2 < int8.step_bytes < bf16.step_bytes * 0.6 and int4.step_bytes < int8.step_bytes * 0.8


def test_decoding_begins_when_every_request_has_its_first_token():
    run = Run([[1, 2, 3], [4, 5, 6]], [[1.0, 2.0, 3.0], [2.0, 3.0, 4.0]])
    assert (run.decode_seconds, run.decoded_per_second, run.step_seconds) == (2.0, 1.5, 1.0)
    assert (run.seconds, run.tokens_per_second) == (4.0, 1.5)


def test_engine_that_is_busy_out_of_turn_is_reported():
    calm, busy = (Run([[1, 2]], [[1.0, 2.0]], idle_cpu_seconds=used) for used in (0.01, 1.0))
    notes = idle_notes({"nanovllm": [calm], "vllm": [busy]})
    assert [*notes] == ["vllm used 50% of a core while other engines computed"]


def test_tokens_are_compared_up_to_the_first_difference(checkpoint):
    llm = LLM(checkpoint, **OPTIONS)
    tasks = [Task([5, 6, 7], 4), Task([9, 8], 3)]
    own = serve(llm, tasks, detokenize=False)
    assert agreement(llm, tasks, own, own) == Agreement([1.0, 1.0], 0.0)
    other = Run([own.tokens[0][:2] + [0, 0], own.tokens[1]], own.times)
    [margin] = margins(llm, [[5, 6, 7, *own.tokens[0][:2]]])
    result = agreement(llm, tasks, own, other)
    assert result == Agreement([0.5, 1.0], margin) and margin > 0
    assert result.text().startswith("the tokens of 1 of 2 requests are the same; where the others first differ, ")
    assert result.text().endswith(f"the two best logits are at most {margin:.2g} apart")


def test_tokens_after_the_end_of_a_text_are_not_compared(checkpoint):
    llm, times = LLM(checkpoint, **OPTIONS), [[1.0, 2.0, 3.0, 4.0]]
    [end] = llm.model_config.eos_token_ids
    own = Run([[5, end, 6, 7]], times)
    assert agreement(llm, [Task([5], 4)], own, Run([[5, end, 8, 9]], times)) == Agreement([1.0], 0.0)
    assert agreement(llm, [Task([5], 4)], own, Run([[5, 8, 8, 9]], times)).shares == [0.5]


def test_mixed_tasks_are_the_same_on_every_machine():
    tasks = mixed_tasks(320)
    assert [(len(task.prompt), task.num_output_tokens) for task in tasks[:2]] == [(232, 114), (210, 243)]
    assert (len(tasks), sum(task.num_output_tokens for task in tasks)) == (32, 4259)


# Settings of other engines

UNIFIED = 'json.loads(sys.argv[3])["kv_unified"]'
PRELOADED = '"libiomp5.so" in os.environ.get("LD_PRELOAD", "")'


def answers(is_fast: str, slow: float = 0.25) -> str:
    """Return the code of a peer with two speeds, whose steps take 0.125 or `slow` seconds. It notes them in a file."""
    lengths = 'lengths = json.loads(line)["lengths"]'
    count = f"step = 0.125 if {is_fast} else {slow}; open('jobs', 'a').write(f'{{step}} ')"
    return ANSWERS.replace(lengths, f"{lengths}; {count}").replace("0.25 * i", "step * i")


def test_each_job_counts_at_the_best_setting_of_an_engine(run, tmp_path, fake, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "report.json"
    flags = ("--rounds", "3", "--jobs", "mixed,2", "--prompts", "20", "--no-transformers", "--json", str(file))
    llama = f"llama.cpp:Q8_0={fake(answers(f'{UNIFIED} == (len(lengths) == 3)'))},a.gguf"  # the mixed job has three
    status, out, err = run("race", *flags, "--peer", llama)
    report = json.loads(file.read_text())
    assert (status, err) == (0, "")
    own = report["variants"]["llama.cpp Q8_0"]
    best = {job: own[job]["best"] for job in own}
    assert best == {"mixed": "kv_unified=true", "2 sequences": "kv_unified=false"}, "a prompt alone needs no choice"
    assert "mixed: llama.cpp Q8_0 is fastest with kv_unified=true\n" in out
    speeds = {name: spread["median"] for name, spread in own["2 sequences"]["speeds"].items()}
    assert speeds == {"kv_unified=false": 16.0, "kv_unified=true": 8.0}
    assert report["measured"]["llama.cpp Q8_0"]["2 sequences: tokens per second"]["median"] == 16.0
    assert report["advice"]["llama.cpp"]["kv_unified=true"].startswith("the default of llama-server")
    steps = Path("jobs").read_text().split()
    counts = steps.count("0.125"), steps.count("0.25")
    assert counts == (2 * (1 + 1 + 3) + 1 + 3, 2 * (1 + 1)), "a slow one serves a warm-up and one job"


@pytest.mark.parametrize("best", ["false", "true"])
def test_settings_that_are_close_race_all_rounds(run, tmp_path, fake, monkeypatch, best):
    monkeypatch.chdir(tmp_path)
    flags = ("--rounds", "3", "--jobs", "2", "--no-transformers", "--json", "report.json")
    code = answers(f"{UNIFIED} == {best.title()}", slow=0.13)
    assert run("race", *flags, "--peer", f"llama.cpp={fake(code)},a.gguf")[0] == 0
    steps = Path("jobs").read_text().split()
    assert steps.count("0.125") == steps.count("0.13") == 1 + 1 + 3
    report = json.loads(Path("report.json").read_text())
    assert report["variants"]["llama.cpp"]["2 sequences"]["best"] == f"kv_unified={best}"
    assert report["measured"]["llama.cpp"]["2 sequences: tokens per second"]["median"] == 16.0


def test_libraries_are_preloaded_from_the_peers_environment(run, tmp_path, fake, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bin").mkdir()
    python, flags = write_fake_peer(tmp_path / "bin", answers(PRELOADED)), ("--rounds", "1", "--jobs", "2")
    status, out, _ = run("race", *flags, "--no-transformers", "--peer", f"vllm={python}")
    assert status == 0 and "vllm was not tried with tcmalloc and libiomp5 preloaded: libtcmalloc_minimal and" in out
    libs = tmp_path / "lib/python3.11/site-packages/vllm/libs"
    libs.mkdir(parents=True)
    (libs / "libtcmalloc_minimal.so.4").touch()
    (tmp_path / "lib/libiomp5.so").touch()
    status, out, _ = run("race", *flags, "--no-transformers", "--peer", f"vllm={python}", "--json", "report.json")
    assert status == 0 and "was not tried" not in out
    assert json.loads(Path("report.json").read_text())["variants"]["vllm"]["2 sequences"]["best"].startswith("tcmalloc")


# Written questions


def test_prompts_are_questions_in_the_models_template(checkpoint, tmp_path):
    write_checkpoint(tmp_path, max_position_embeddings=512)
    (tmp_path / "chat_template.jinja").write_text(
        "{{ messages[0].content }}{% if add_generation_prompt %} A:{% endif %}"
    )
    llm = LLM(tmp_path, **OPTIONS)
    questions = peers.QUESTIONS.read_text().splitlines()
    job = peers.with_questions(llm, peers.named_jobs("--jobs", "2", 320)[0])
    assert [llm.get_tokenizer().decode(task.prompt) for task in job.tasks] == [f"{text} A:" for text in questions[:2]]
    assert {task.num_output_tokens for task in job.tasks} == {peers.DECODE_LENGTH} and job.kind == "decode"
    with pytest.raises(ValueError, match=f"{len(questions)} questions, but 33 sequences need 33"):
        peers.with_questions(llm, peers.named_jobs("--jobs", "33", 320)[0])


def test_questions_are_served_without_a_prefix_cache(run, tmp_path, fake, monkeypatch):
    engines: list[LLM] = []
    monkeypatch.setattr(peers, "load_llm", lambda options: engines.append(LLM(**options)) or engines[0])
    model, file = write_checkpoint(tmp_path / "model", max_position_embeddings=512), tmp_path / "report.json"
    (model / "chat_template.jinja").write_text("{{ messages[0].content }}")
    flags = ("--written", "--rounds", "1", "--jobs", "2", "--no-transformers", "--json", str(file))
    status, _, err = run("race", *flags, "--peer", f"llama.cpp={fake()},a.gguf", model=model)
    assert (status, err) == (0, "")
    report = json.loads(file.read_text())
    assert report["settings"]["written"] is True and not engines[0].config.enable_prefix_caching
    shares = report["agreement"]["llama.cpp"]["2 sequences"]["shares"]
    assert len(shares) == 2 and all(0 <= share < 1 for share in shares), "the fake peer writes one token"


# Long contexts


def test_step_at_a_long_context_computes_no_prompt(checkpoint):
    llm = LLM(checkpoint, **OPTIONS, kv_cache_tokens=1024)
    [job] = peers.make_jobs(Peers(jobs="", contexts="50", context_batch=4), vocab_size=320)
    before = llm.llm_engine.executor.num_tokens
    run = peers.serve_as_computed(llm, job.tasks)
    assert (run.num_steps, run.num_cached_tokens) == (1 + peers.NUM_STEPS, 0)
    assert llm.llm_engine.executor.num_tokens - before == 4 * (1 + peers.NUM_STEPS)
    assert not llm.llm_engine.has_unfinished_requests() and "allocate" not in vars(llm.llm_engine.kv_cache_manager)


def test_pool_has_room_for_every_job_and_keeps_a_given_size():
    jobs = peers.make_jobs(Peers(jobs="1,4", contexts="10", context_batch=2), vocab_size=320)
    engine = {"block_size": 4, "watermark": 0.5, "max_num_seqs": 1, "max_num_batched_tokens": 64}
    sizes = dict.fromkeys(("kv_cache_tokens", "kv_cache_memory_bytes", "gpu_memory_utilization"))
    seats = {"max_num_seqs": 2, "max_num_batched_tokens": 64}
    assert peers.with_room(engine | sizes, jobs) == seats | {"kv_cache_tokens": 2 * 4 * (8 + 8 + 4) + 1}
    assert peers.with_room(engine | sizes | {"kv_cache_tokens": 9}, jobs) == seats
    assert peers.with_room(engine | sizes, jobs[:2]) == {}, "nothing changes without long contexts"


def test_engine_decodes_alone_at_long_contexts(run, fake):
    flags = ("--jobs", "1", "--contexts", "40", "--context-batch", "2", "--rounds", "1", "--no-transformers")
    status, out, _ = run("race", *flags, "--peer", f"vllm={fake()}")
    assert status == 0 and re.search(r"context 40: step ms +[\d.]+ +-\n", out)
    assert "context 40: the floor is 8 steps that read weights of" in out


def test_engine_with_a_kv_cache_in_int8_races_itself_at_long_contexts(run, tmp_path):
    model, file = write_checkpoint(tmp_path, hidden_size=64), tmp_path / "report.json"
    flags = ("--kv-cache-dtype", "int8", "--jobs", "", "--contexts", "40", "--context-batch", "2", "--rounds", "1")
    status, out, _ = run("race", *flags, "--no-transformers", "--json", str(file), model=model)
    own, other = json.loads(file.read_text())["measured"].values()
    assert status == 0 and other["context 40: nanovllm's speedup"]["least"] > 0 and "KV cache in int8" in out
    assert own.keys() < other.keys() and "requests are the same" not in out


# The peers' processes


def test_library_output_does_not_mix_with_results(tmp_path):
    """Run the worker with a made-up engine."""
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
    command = [sys.executable, "-S", str(tmp_path / "worker.py"), "serve_made_up:load", json.dumps(settings)]
    job = json.dumps({"prompts": [[3]], "lengths": [1]}) + "\n"
    done = subprocess.run(command, input=job + "no job\n", capture_output=True, text=True)
    ready, answer, error = map(json.loads, done.stdout.splitlines())
    assert ready == {"version": "1.0"} and (answer["tokens"], answer["times"]) == ([[3]], [[0.5]])
    assert error["error"].startswith("JSONDecodeError") and done.returncode == 1 and "loading m" in done.stderr


class FakeLlamaCpp:
    """The C functions that the loop calls. The next token is the sum of all tokens in its slot, modulo 11."""

    def __init__(self):
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

    def llama_get_logits_ith(self, context, row):
        logits = (ctypes.c_float * 11)()
        logits[self.logits[row]] = 1.0
        return ctypes.pointer(logits)

    def llama_init_from_model(self, model, params):
        self.params = params
        return MagicMock()

    def llama_batch_init(self, *sizes):
        return self.batch

    def llama_vocab_n_tokens(self, vocab):
        return 11

    def __getattr__(self, name):
        return MagicMock()  # what the loop does not call

    def llama_memory_seq_rm(self, memory, slot, start, end):
        del self.slots[slot]


def test_llama_cpp_gets_each_token_once_in_a_free_slot(monkeypatch):
    monkeypatch.setattr(serve_llama_cpp, "MAX_BATCH", 8)
    sizes = {"max_num_seqs": 2, "max_model_len": 8, "threads": 1}
    settings = SimpleNamespace(**sizes, file="model.gguf", dtype="bfloat16", kv_unified=True)
    made = serve_llama_cpp.Context(c := FakeLlamaCpp(), np, settings)
    prompts, lengths = [[1, 2, 3], [4, 5], [6], [7, 8, 9]], [3, 1, 4, 2]
    tokens, times = made.serve(prompts, lengths)
    for prompt, length, new in zip(prompts, lengths, tokens, strict=True):
        text = list(prompt)
        for _ in range(length):
            text.append(sum(text) % 11)
        assert new == text[len(prompt) :]
    assert [len(each) for each in times] == lengths and c.slots == {} and c.most_slots == 2
    assert c.params.kv_unified is True
