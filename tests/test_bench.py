"""The harness takes turns, and the engine without a model does what the engine with one does: what the tables need."""

import itertools
import json
import re
from functools import partial

import pytest

pytest.importorskip("torch")

from stages.bench import __main__ as command
from stages.bench import offload, prefix_cache, results, samples, serving
from stages.bench.engines import PACKAGES, WITHOUT_SCHEDULER, by_sample, without_model
from stages.bench.harness import median_scores, microseconds, milliseconds, take_turns
from stages.bench.models import STORYTELLER
from stages.bench.predict import s6 as questions_of_s6
from stages.bench.predict import s7 as questions_of_s7
from stages.bench.racing import Racer, computed_twice, race, sampling_params, serve
from stages.bench.workloads import Request, even_prompt, mixed_workload

each_stage = pytest.mark.parametrize("name", PACKAGES)
from_s4 = pytest.mark.parametrize("name", [name for name in PACKAGES if name not in WITHOUT_SCHEDULER])
SMALL = {"dtype": "float32", "kv_cache_tokens": 1024}


# The harness


def test_each_round_makes_every_call_once_in_an_order_of_its_own():
    calls = []
    rounds = take_turns({name: partial(lambda name: calls.append(name) or len(calls), name) for name in "abcd"}, 8)
    orders = ["".join(calls[i : i + 4]) for i in range(0, len(calls), 4)]
    assert len(rounds) == 8 and len(orders) == 9, "the first warms up"
    assert all({*order} == {*"abcd"} for order in orders) and len({*orders}) > 2
    assert rounds[0] == {name: 5 + orders[1].index(name) for name in "abcd"}


def test_rounds_end_with_the_time_but_not_before_the_least():
    assert len(take_turns({"a": lambda: 1.0}, 50, least_rounds=3, seconds=0.0)) == 3
    assert len(take_turns({"a": lambda: 1.0}, 5, least_rounds=3, seconds=1000.0)) == 5
    assert len(take_turns({"a": lambda: 1.0}, 5, seconds=0.0)) == 5, "without a least number all of them"


def test_a_score_that_differs_has_its_spread():
    rounds = [{"a": {"steps": 3, "seconds": seconds}} for seconds in (2.0, 1.0, 4.0)]
    assert median_scores(rounds) == {"a": {"steps": 3, "seconds": 2.0, "seconds_spread": [1.0, 4.0]}}


def test_times_are_of_the_calls():
    clock = itertools.count()
    times = milliseconds({name: lambda: next(clock) for name in "ab"}, rounds=2)
    assert {*times} == {"a", "b"} and min(times.values()) > 0 and next(clock) == 6
    assert 0 < microseconds(lambda: None, times=10, rounds=2) < 1000


# The engine without a model


@each_stage
def test_any_stage_runs_without_a_model(name):
    engine = without_model(name, lambda seq: seq.num_tokens, model=str(STORYTELLER), kv_cache_tokens=1024)
    prompt, params = even_prompt(5), sampling_params(name, Request([], 3))
    if name in WITHOUT_SCHEDULER:
        [output] = engine.generate([prompt], params)
    else:
        engine.add_request("0", prompt, params)
        outputs = [output for _ in range(3) for output in engine.step()]
        output = outputs[-1]
    assert output.finished and output.outputs[0].token_ids == [5, 6, 7], "the script's tokens"
    assert (engine.model_runner.num_steps, engine.model_runner.num_tokens) == (3, 5 + 2)
    assert engine.kv_cache_manager.report().held == 0


@pytest.mark.parametrize("name", ["s5", "s6", "s7"])
def test_samples_go_on_differently(name):
    engine = without_model(name, by_sample, model=str(STORYTELLER), kv_cache_tokens=256)
    engine.add_request("0", even_prompt(20), sampling_params(name, Request([], 2, n=3)))
    outputs = []
    while engine.has_unfinished_requests():
        outputs = engine.step() or outputs
    assert [sample.token_ids for sample in outputs[0].outputs] == [[3, 3], [4, 4], [5, 5]]


@from_s4
def test_without_a_model_the_counts_are_those_with_one(name):
    requests = [request._replace(num_output_tokens=30) for request in mixed_workload(4096, 4, high=40)]
    options = {"kv_cache_tokens": 160, "max_num_batched_tokens": 32} | (
        {"offload_policy": "load"} if name == "s7" else {}
    )
    racer = race({name: partial(Racer, name, STORYTELLER, requests, dtype="float32", **options)})[name]
    engine = without_model(name, model=str(STORYTELLER), **options)
    serve(name, engine, requests)
    counts = [
        (runner.num_steps, runner.num_tokens, scheduler.num_preemptions)
        for runner, scheduler in (
            (engine.model_runner, engine.scheduler),
            (racer.llm.model_runner, racer.llm.llm_engine.scheduler),
        )
    ]
    assert counts[0] == counts[1] and counts[0][2] > 0
    assert computed_twice(name, counts[0][1], requests) > 0


# Races


def test_racers_each_serve_everything_on_clocks_of_their_own():
    requests = [r._replace(num_output_tokens=r.num_output_tokens // 8) for r in mixed_workload(4096, 3)]
    racers = race({name: partial(Racer, name, STORYTELLER, requests, **SMALL) for name in ("s3", "s4")})
    num_tokens = sum(request.num_output_tokens for request in requests)
    for racer in racers.values():
        scores = racer.scores()
        assert scores["tokens_per_second"] == pytest.approx(num_tokens / scores["seconds"])
        assert 0 < scores["first_token_seconds"] < scores["seconds"]
        assert scores["steps"] >= max(request.num_output_tokens for request in requests)
        assert scores["tokens_computed"] == sum(request.num_tokens - 1 for request in requests)


def test_a_racer_that_is_not_at_the_finish_has_no_score():
    racer = Racer("s5", STORYTELLER, [Request(even_prompt(9), 60, n=2)], **SMALL)
    assert racer.next_slice() > 0
    with pytest.raises(AssertionError, match="of 120 tokens came"):
        racer.scores()


def test_speeds_are_compared_with_the_stage_before(monkeypatch):
    speeds = iter([1.0, 2.0, 5.0, 2.0, 3.0, 6.0])
    monkeypatch.setattr(serving, "race", lambda makers: {name: make() for name, make in makers.items()})
    monkeypatch.setattr(serving, "Racer", lambda *args, **options: Scored(next(speeds)))
    found = serving.serve_in_rounds(["a", "b", "c"], STORYTELLER, [], 2, {})
    assert found["b_over_a"] == {"rounds": 2, "ratio": 1.75, "least": 1.5, "largest": 2.0}
    assert found["c_over_b"]["least"] == 2.0
    assert found["b"] == {"tokens_per_second": 2.5, "tokens_per_second_spread": [2.0, 3.0]}


class Scored:
    def __init__(self, speed):
        self.speed = speed

    def scores(self):
        return {"tokens_per_second": self.speed}


# Tables


def test_the_prefix_cache_is_measured_on_the_same_requests():
    prompts = prefix_cache.shared_prompts(4096, prefix=64, tail=8, count=6)
    shared = prefix_cache.measure_shared(STORYTELLER, prompts, "float32")
    assert (shared["tokens_on"], shared["tokens_off"]) == (5 * 8, 5 * 72)
    assert 0 < shared["median_on_seconds"] < shared["last_off_seconds"]


def test_a_third_of_the_memory_is_short_for_stage_6():
    """What DESIGN asks of the load, and of stage 7: it is counted, so that it holds wherever it is measured."""
    requests, pool = offload.workload(4096)
    counts = {policy: offload.count_without_model(policy) for policy in ("s6", "load", "recompute")}
    assert pool / sum(request.num_tokens for request in requests) == pytest.approx(1 / 3, abs=0.01)
    assert counts["s6"]["preemptions"] >= 10 and counts["recompute"]["computed_twice"] == counts["s6"]["computed_twice"]
    load = counts["load"]
    assert load["computed_twice"] <= counts["s6"]["computed_twice"] / 5
    assert load["computed_twice"] <= offload.BLOCK_SIZE * load["preemptions"]
    assert load["blocks_loaded"] > 0 and counts["recompute"]["blocks_loaded"] == 0


def test_a_prefix_on_the_host_is_loaded_in_each_round(monkeypatch):
    monkeypatch.setattr(offload, "SHAPE_135M", offload.SHAPE_135M.__class__.from_folder(STORYTELLER))
    found = offload.measure_first_token(STORYTELLER, "float32", length=64)
    assert found["least"] <= found["ratio"] <= found["largest"]
    assert min(found["loaded_seconds"], found["computed_seconds"]) > 0


def test_conversations_that_paused_are_found_on_the_host():
    """Each turn's prompt has all that was said; the last token of an answer is computed with the next turn."""
    counts = {policy: offload.count_talks(policy) for policy in ("s6", "load")}
    asked = [turn * 2 * offload.TURN + offload.TURN for turn in range(offload.TURNS)]  # the lengths of a talk's prompts
    for found in counts.values():
        answers = offload.TURNS * (offload.TURN - 1)
        assert found["tokens_computed"] + found["tokens_hit"] == offload.TALKS * (sum(asked) + answers)
    assert counts["load"]["tokens_computed"] < counts["s6"]["tokens_computed"] / 2


def test_the_first_tokens_of_samples_come_a_step_later_at_most():
    for name, length in itertools.product(("s5", "s6", "s7"), samples.PROMPTS):
        one, several = (samples.first_token_steps(name, length, n) for n in (1, samples.N))
        assert several <= one + 1, f"{name}, a prompt of {length}"


def test_scarcity_costs_samples_less_where_their_prompt_is_found():
    room, third = str(samples.PARTS[0]), str(samples.PARTS[1])
    s5, s6 = samples.scarce("s5"), samples.scarce("s6")
    assert s5[room]["preemptions"] == s6[room]["preemptions"] == 0 == s5[room]["computed_twice"]
    assert 0 < s6[third]["computed_twice"] < s5[third]["computed_twice"]


# Questions


def test_the_answers_of_stage_6_are_counted():
    numbers = questions_of_s6.answers(STORYTELLER)
    assert numbers["repeated"] == {"512": 16, "513": 1}
    assert numbers["changed"] == {"first": 0.0, "middle": 0.5, "last": 496 / 512}
    assert numbers["twice"] == {"at_once": 400, "a_step_later": 208, "samples": 201}
    again = {name: found["computed_twice"] for name, found in numbers["preempted"].items()}
    assert again == {"s5": 256, "s6": 0}


def test_a_prompt_that_leaves_the_device_moves_once():
    moved = questions_of_s7.samples_that_leave(STORYTELLER)
    assert moved["shared"] == moved["loaded"] == 12
    assert moved["stored"] < moved["entries"] / 2


# What results.json says is what the engines do

TIMED = re.compile(
    r"(.*_)?(ms|us|seconds|ratio|gain|bandwidth)|.*tokens_per_second|bytes_per_second|.*_over_\w+|cache_at.*"
)
COUNTED = {"predict.s2.at_once.copied_over_moved", "predict.s5.beams.ratio"}  # not timed: the same on any machine
SETTLED = {"measured"}  # how long a table took


def figures(part, path=""):
    """Each number of a part of results.json with its path, and what stands beside it."""
    for name, found in part.items():
        if isinstance(found, dict):
            yield from figures(found, f"{path}{name}.")
        elif isinstance(found, int | float) and not isinstance(found, bool):
            yield f"{path}{name}", name, found, part


def without_spread(told):
    """The paths of figures that were timed, and have no spread beside them."""
    for path, name, found, beside in figures(told):
        if path.split(".")[0] in SETTLED or path in COUNTED or not TIMED.fullmatch(name):
            continue
        both = beside.get(f"{name}_spread") or [beside.get(key) for key in ("least", "largest")]
        if None in both or not both[0] <= found <= both[1]:
            yield path


def test_a_figure_without_its_spread_is_found():
    told = {"a": {"s1_ms": 2.0, "s1_ms_spread": [1.0, 3.0], "b_over_a": 2.0}, "c": {"ratio": 1.0, "least": 2.0}}
    assert list(without_spread(told)) == ["a.b_over_a", "c.ratio"]


def test_every_timed_figure_has_its_spread():
    assert list(without_spread(results.read())) == [], "make measure"


def test_all_was_measured_on_one_machine_in_one_run():
    told = results.read()
    assert {*told["measured"]["tables"]} == {*command.TABLES}, "python -m stages.bench all --resume measures the rest"
    assert told["machine"].startswith(told["measured"]["machine"])
    assert sum(table["seconds"] for table in told["measured"]["tables"].values()) < 20 * 60


def test_counts_of_serving_are_current():
    """Of steps and tokens: no model is needed, and no clock. (A vocabulary only gives the prompts their tokens.)"""
    told = results.read()["serving"]
    for pool, row in ((serving.SMALL_POOL, told["s4"]), (serving.ROOMY_POOL, told["peers"]["s4"])):
        engine = without_model("s4", model=str(STORYTELLER), kv_cache_tokens=pool)
        serve("s4", engine, mixed_workload(4096))
        runner = engine.model_runner
        assert (runner.num_steps, runner.num_tokens) == (row["steps"], row["tokens_computed"])


@pytest.mark.skipif("samples" not in results.read(), reason="not measured yet")
def test_counts_of_samples_are_current():
    assert json.loads(json.dumps(samples.measure(command.parse([])))) == {"samples": results.read()["samples"]}


@pytest.mark.skipif("offload" not in results.read(), reason="not measured yet")
@pytest.mark.parametrize("policy", ["s6", "load", "recompute"])
def test_counts_of_offload_are_current(policy):
    told = results.read()["offload"]["pools"][policy]
    counts = offload.count_without_model(policy)
    assert {key: told[key] for key in counts} == counts


# The command


def test_the_command_measures_the_scoreboard_unless_it_is_told_otherwise():
    assert command.parse([]).tables == ["scoreboard", "run"]
    asked = command.parse(["offload", "decode", "--dtype", "float32"])
    assert asked.tables == ["decode", "offload"] and asked.dtype == "float32", "in an order in which each finds its own"
    assert command.parse(["--predict"]).tables == ["s1", "s2", "s3", "s4", "s5", "s6", "s7"]
    assert command.parse(["--predict", "s1", "s3"]).tables == ["s1", "s3"]
    assert command.parse(["all"]).tables == command.parse(["--resume"]).tables == list(command.TABLES)


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["scorebord"], "no table 'scorebord': there are all, decode, scoreboard, run, peers"),
        (["--predict", "s9"], "no questions of s9: there are those of s1, s2"),
        (["decode", "--resume"], "--resume goes on with all tables: name none"),
    ],
)
def test_what_is_not_there_is_named(argv, told, capsys):
    with pytest.raises(SystemExit):
        command.parse(argv)
    assert told in capsys.readouterr().err


@pytest.fixture
def small(monkeypatch, tmp_path):
    """Two tables that take no time, and a results.json of their own."""
    path = tmp_path / "results.json"
    monkeypatch.setattr(results, "RESULTS", path)
    for function in (results.read, results.write, results.begin):
        monkeypatch.setattr(function, "__defaults__", (path,))
    monkeypatch.setattr(results.save, "__defaults__", (path,))
    made = {"a": lambda args: {"a": {"gain": 1}}, "s1": lambda args: {"predict": {"s1": {"answers": [], "n": 2}}}}
    monkeypatch.setattr(command, "TABLES", made)
    return path


def test_each_table_is_saved_as_soon_as_it_is_measured(small, monkeypatch, capsys):
    def stopped(args):
        raise KeyboardInterrupt

    small.write_text(json.dumps({"predict": {"s2": {"n": 7}}}))
    monkeypatch.setitem(command.TABLES, "s1", stopped)
    with pytest.raises(KeyboardInterrupt):
        command.main(["all"])
    told = results.read()
    assert told["a"] == {"gain": 1} and list(told["measured"]["tables"]) == ["a"]
    monkeypatch.setitem(command.TABLES, "a", stopped)
    monkeypatch.setitem(command.TABLES, "s1", lambda args: {"predict": {"s1": {"answers": [], "n": 2}}})
    assert command.main(["--resume"]) == 0
    told = results.read()
    assert told["predict"] == {"s1": {"answers": [], "n": 2}, "s2": {"n": 7}}, "a table may write a part"
    assert {*told["measured"]["tables"]} == {"a", "s1"} and told["machine"] == results.machine()
    assert "table 2 of 2, s1" in capsys.readouterr().err, "a progress bar"


def test_figures_of_two_machines_are_not_mixed(small, capsys):
    old = {"a": {"gain": 3}, "measured": {"machine": "a large one", "tables": {"a": {"seconds": 1}}}}
    small.write_text(json.dumps(old))
    assert command.main(["a"]) == 1 and results.read() == old
    assert "measured on a large one, and this is" in capsys.readouterr().err
    assert command.main(["--resume"]) == 1 and results.read() == old
    assert "nothing to go on with: that run was on a large one" in capsys.readouterr().err
    assert command.main(["a", "--no-save"]) == 0 and results.read() == old
    assert command.main(["all"]) == 0 and results.read()["measured"]["machine"] == results.host()


def test_a_key_is_a_path(small):
    small.write_text('{"a": {"b": {"16": 2.5}}}')
    assert results.value("a.b.16", small) == 2.5
    with pytest.raises(KeyError, match=r"results\.json has no a\.c: python -m stages\.bench measures it"):
        results.value("a.c", small)


def test_the_processor_is_named_where_the_system_names_it(tmp_path):
    (tmp_path / "cpuinfo").write_text("processor : 0\nmodel name\t: A Chip 9\n")
    assert results.processor(tmp_path / "cpuinfo") == "A Chip 9" and results.processor(tmp_path / "none")
