"""The course's figures: the harness takes turns, engines without a model count right, and results.json is current."""

import itertools
import json
import re
from functools import partial

import pytest

pytest.importorskip("torch")

from nanovllm.bench.harness import median_scores, medians, take_turns, timed
from nanovllm.bench.workload import Task, mixed_tasks
from stages.bench import beams, offload, results, samples, serving
from stages.bench import tables as command
from stages.bench.engines import PACKAGES, WITHOUT_SCHEDULER, by_sample, stage, without_model
from stages.bench.models import STORYTELLER
from stages.bench.predict import s6 as predict_s6
from stages.bench.predict import s7 as predict_s7
from stages.bench.racing import Racer, computed_twice, race, sampling_params, serve
from stages.bench.steady import Quiet
from stages.bench.workloads import even_prompt
from tests.fake_peer import write_fake_peer

each_stage = pytest.mark.parametrize("name", PACKAGES)
SMALL = {"dtype": "float32", "kv_cache_tokens": 1024}


# The harness


def test_each_round_makes_every_call_once_in_random_order():
    calls = []
    rounds = take_turns({name: partial(lambda name: calls.append(name) or len(calls), name) for name in "abcd"}, 8)
    orders = ["".join(calls[i : i + 4]) for i in range(0, len(calls), 4)]
    assert len(rounds) == 8 and len(orders) == 9, "the first warms up"
    assert all({*order} == {*"abcd"} for order in orders) and len({*orders}) > 2
    assert rounds[0] == {name: 5 + orders[1].index(name) for name in "abcd"}


def test_rounds_end_when_time_is_up_but_not_before_the_minimum():
    assert len(take_turns({"a": lambda: 1.0}, 50, least_rounds=3, seconds=0.0)) == 3
    assert len(take_turns({"a": lambda: 1.0}, 5, least_rounds=3, seconds=1000.0)) == 5
    assert len(take_turns({"a": lambda: 1.0}, 5, seconds=0.0)) == 5, "all of them, without a least number"


def test_scores_that_differ_have_a_spread():
    rounds = [{"a": {"steps": 3, "seconds": seconds}} for seconds in (2.0, 1.0, 4.0)]
    assert median_scores(rounds) == {"a": {"steps": 3, "seconds": 2.0, "seconds_spread": [1.0, 4.0]}}


def test_each_call_is_timed():
    clock = itertools.count()
    rounds = take_turns({name: timed(lambda: next(clock)) for name in "ab"}, 2)
    assert {*medians(rounds)} == {"a", "b"} and min(medians(rounds).values()) > 0 and next(clock) == 6


# The engine without a model


@each_stage
def test_stage_runs_without_a_model(name):
    engine = without_model(name, lambda seq: seq.num_tokens, model=str(STORYTELLER), kv_cache_tokens=1024)
    prompt, params = even_prompt(5), sampling_params(name, Task([], 3))
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
def test_samples_continue_differently(name):
    engine = without_model(name, by_sample, model=str(STORYTELLER), kv_cache_tokens=256)
    engine.add_request("0", even_prompt(20), sampling_params(name, Task([], 2, n=3)))
    outputs = []
    while engine.has_unfinished_requests():
        outputs = engine.step() or outputs
    assert [sample.token_ids for sample in outputs[0].outputs] == [[3, 3], [4, 4], [5, 5]]


@pytest.mark.parametrize("name", [pytest.param("s4", marks=pytest.mark.full), "s7"])
def test_counts_without_a_model_are_those_with_one(name):
    requests = [request._replace(num_output_tokens=30) for request in mixed_tasks(4096, 4, high=40)]
    options = {"kv_cache_tokens": 160, "max_num_batched_tokens": 32} | (
        {"offload_policy": "load"} if name == "s7" else {}
    )
    racer = Racer(name, stage(name).LLM(STORYTELLER, dtype="float32", **options), requests)
    race({name: racer})
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


@pytest.mark.full
def test_racers_serve_everything_on_clocks_of_their_own():
    requests = [r._replace(num_output_tokens=r.num_output_tokens // 8) for r in mixed_tasks(4096, 3)]
    racers = {name: Racer(name, stage(name).LLM(STORYTELLER, **SMALL), requests) for name in ("s3", "s4")}
    race(racers)
    num_tokens = sum(request.num_output_tokens for request in requests)
    for racer in racers.values():
        scores = racer.scores()
        assert scores["tokens_per_second"] == pytest.approx(num_tokens / scores["seconds"])
        assert 0 < scores["first_token_seconds"] < scores["seconds"]
        assert scores["steps"] >= max(request.num_output_tokens for request in requests)
        assert scores["tokens_computed"] == sum(request.num_tokens - 1 for request in requests)


def test_unfinished_racer_has_no_score():
    racer = Racer("s5", stage("s5").LLM(STORYTELLER, **SMALL), [Task(even_prompt(9), 60, n=2)])
    assert racer.next_slice() > 0
    with pytest.raises(AssertionError, match="of 120 tokens"):
        racer.scores()


def test_speeds_are_compared_with_the_previous_stage():
    rounds = [
        {name: {"tokens_per_second": speed} for name, speed in zip("abc", speeds, strict=True)} for speeds in SPEEDS
    ]
    result = serving.compare(rounds)
    assert result["b_over_a"] == {"rounds": 2, "ratio": 1.75, "ratio_spread": [1.5, 2.0]}
    assert result["c_over_b"]["ratio_spread"][0] == 2.0
    assert result["b"] == {"tokens_per_second": 2.5, "tokens_per_second_spread": [2.0, 3.0]}


SPEEDS = (1.0, 2.0, 5.0), (2.0, 3.0, 6.0)


def test_transformers_serves_in_its_own_process(monkeypatch, tmp_path):
    fake = write_fake_peer(tmp_path)
    monkeypatch.setattr(serving, "TRANSFORMERS", serving.TRANSFORMERS._replace(python=fake))
    tasks = [Task([5, 6], 3), Task([7], 5)]
    scores = serving.serve_by_peer("transformers", STORYTELLER, tasks, "float32")
    assert scores == [{"tokens_per_second": 8 / 1.5, "seconds": 1.5, "steps": 5}] * serving.NUM_ROUNDS
    monkeypatch.setattr(serving, "serve_once", lambda names, *rest: {names[0]: {"steps": 4}})
    monkeypatch.setattr(serving, "TRANSFORMERS", serving.TRANSFORMERS._replace(python="no/python"))
    peers = serving.measure_peers("s4", STORYTELLER, tasks, "float32")
    assert peers["s4"] == {"steps": 4} and "no/python" in peers["generate"]["error"]


# Tables


def test_prefix_cache_is_measured_on_the_same_requests():
    prompts = serving.shared_prompts(4096, prefix=64, tail=8, count=6)
    shared = serving.measure_shared(STORYTELLER, prompts, "float32")
    assert (shared["tokens_on"], shared["tokens_off"]) == (5 * 8, 5 * 72)
    assert 0 < shared["median_on_seconds"] < shared["last_off_seconds"]


def test_stage_7_computes_few_tokens_twice_with_a_third_of_the_memory():
    requests, pool = offload.workload(4096)
    counts = {policy: offload.count_without_model(policy) for policy in ("s6", "load", "recompute")}
    assert pool / sum(request.num_tokens for request in requests) == pytest.approx(1 / 3, abs=0.01)
    assert counts["s6"]["preemptions"] >= 10 and counts["recompute"]["computed_twice"] == counts["s6"]["computed_twice"]
    load = counts["load"]
    assert load["computed_twice"] <= counts["s6"]["computed_twice"] / 5
    assert load["computed_twice"] <= offload.BLOCK_SIZE * load["preemptions"]
    assert load["blocks_loaded"] > 0 and counts["recompute"]["blocks_loaded"] == 0


@pytest.mark.full
def test_prefix_on_the_host_is_loaded_in_each_round():
    result = offload.measure_first_token(STORYTELLER, "float32", length=64)
    least, largest = result["ratio_spread"]
    assert least <= result["ratio"] <= largest and result["turns"] in (10, 20)
    assert min(result["loaded_seconds"], result["computed_seconds"]) > 0


def test_paused_conversations_are_found_on_the_host():
    """Each turn's prompt is the whole conversation; the last token of an answer is computed with the next turn."""
    counts = {policy: offload.count_conversations(policy) for policy in ("s6", "load")}
    prompts = [turn * 2 * offload.TURN + offload.TURN for turn in range(offload.TURNS)]  # lengths
    for result in counts.values():
        answers = offload.TURNS * (offload.TURN - 1)
        assert result["tokens_computed"] + result["tokens_hit"] == offload.CONVERSATIONS * (sum(prompts) + answers)
    assert counts["load"]["tokens_computed"] < counts["s6"]["tokens_computed"] / 2


@pytest.mark.full
def test_first_tokens_of_samples_come_at_most_a_step_later():
    for name, length in itertools.product(("s5", "s6", "s7"), (200, 208, 209)):
        one, several = (steps_to_first_tokens(name, length, n) for n in (1, 4))
        assert several <= one + 1, f"{name}, a prompt of {length}"


def steps_to_first_tokens(name, num_prompt_tokens, n):
    engine = samples.engine_without_model(name, pool=8192)
    engine.add_request("0", even_prompt(num_prompt_tokens), sampling_params(name, Task([], 2, n)))
    while not (outputs := engine.step()) or not all(sample.token_ids for sample in outputs[0].outputs):
        pass
    return engine.model_runner.num_steps


@pytest.mark.full
def test_scarcity_costs_samples_less_if_their_prompt_is_cached():
    room, third = str(samples.PARTS[0]), str(samples.PARTS[1])
    s5, s6 = samples.scarce("s5"), samples.scarce("s6")
    assert s5[room]["preemptions"] == s6[room]["preemptions"] == 0 == s5[room]["computed_twice"]
    assert 0 < s6[third]["computed_twice"] < s5[third]["computed_twice"]


# Questions


def test_numbers_of_stage_6_are_counted():
    numbers = predict_s6.measure(STORYTELLER)
    assert numbers["repeated"] == {"512": 16, "513": 1}
    assert numbers["changed"] == {"first": 0.0, "middle": 0.5, "last": 496 / 512}
    assert numbers["twice"] == {"at_once": 400, "a_step_later": 208, "samples": 201}
    again = {name: result["computed_twice"] for name, result in numbers["preempted"].items()}
    assert again == {"s5": 256, "s6": 0}


def test_shared_prompt_that_leaves_the_device_moves_once():
    moved = predict_s7.samples_that_leave(STORYTELLER)
    assert moved["shared"] == moved["loaded"] == 12
    assert moved["stored"] < moved["entries"] / 2


# results.json

TIMED = re.compile(
    r"(.*_)?(ms|us|seconds|ratio|gain|bandwidth)|.*tokens_per_second|bytes_per_second|.*_over_\w+|cache_at.*"
)
COUNTED = {"predict.s2.at_once.copied_over_moved"}  # not timed: the same on any machine
SINGLE = {"measured"}  # the duration of each table


def figures(part, path=""):
    """Yield each number of a part of results.json with its path, its name, and the dict that holds it."""
    for name, result in part.items():
        if isinstance(result, dict):
            yield from figures(result, f"{path}{name}.")
        elif isinstance(result, int | float) and not isinstance(result, bool):
            yield f"{path}{name}", name, result, part


def without_spread(part):
    """Yield the paths of timed figures without a spread."""
    for path, name, value, beside in figures(part):
        if path.split(".")[0] in SINGLE or path in COUNTED or not TIMED.fullmatch(name):
            continue
        spread = beside.get(f"{name}_spread")
        if spread is None or not spread[0] <= value <= spread[1]:
            yield path


def test_figure_without_a_spread_is_detected():
    result = {"a": {"s1_ms": 2.0, "s1_ms_spread": [1.0, 3.0], "b_over_a": 2.0}}
    result["c"] = {"ratio": 1.0, "ratio_spread": [2.0, 3.0]}
    assert list(without_spread(result)) == ["a.b_over_a", "c.ratio"]


def test_every_timed_figure_has_its_spread():
    assert list(without_spread(results.read())) == [], "make measure"


def test_all_figures_come_from_one_machine_and_one_run():
    result = results.read()
    assert {*result["measured"]["tables"]} == {*command.TABLES}, "python -m stages.bench all --resume measures the rest"
    assert result["machine"].startswith(result["measured"]["machine"])
    assert sum(table["seconds"] for table in result["measured"]["tables"].values()) < 75 * 60


def test_counts_of_serving_are_current():
    """Steps and tokens need no model and no clock. The vocabulary has no influence on them."""
    result = results.read()["serving"]
    for pool, row in ((serving.SMALL_POOL, result["s4"]), (serving.ROOMY_POOL, result["peers"]["s4"])):
        engine = without_model("s4", model=str(STORYTELLER), kv_cache_tokens=pool)
        serve("s4", engine, mixed_tasks(4096))
        runner = engine.model_runner
        assert (runner.num_steps, runner.num_tokens) == (row["steps"], row["tokens_computed"])


@pytest.mark.full
def test_counts_of_beams_are_current():
    """Their tokens come from the model, but no machine chooses others."""
    counts, result = beams.counted(), results.read()["beams"]
    texts = counts.pop("texts")
    for way in ("alone", "samples", "beams"):
        assert texts[way]["repeated"] == result["texts"][way]["repeated"]
        assert texts[way]["logprob"] == pytest.approx(result["texts"][way]["logprob"], abs=0.02)
    for name, ways in counts.items():
        for way in ("alone", "requests", "samples", "beams"):
            assert {key: result[name][way][key] for key in ways[way]} == ways[way]


@pytest.mark.skipif("samples" not in results.read(), reason="not measured yet")
def test_counts_of_samples_are_current():
    assert json.loads(json.dumps(samples.measure(command.parse([])))) == {"samples": results.read()["samples"]}


@pytest.mark.skipif("offload" not in results.read(), reason="not measured yet")
@pytest.mark.parametrize("policy", ["s6", "load", "recompute"])
def test_counts_of_offload_are_current(policy):
    result = results.read()["offload"]["pools"][policy]
    counts = offload.count_without_model(policy)
    assert {key: result[key] for key in counts} == counts


# The command


def test_command_measures_the_scoreboard_by_default():
    assert command.parse([]).tables == ["scoreboard", "run"]
    args = command.parse(["offload", "decode", "--dtype", "float32"])
    assert args.tables == ["decode", "offload"] and args.dtype == "float32", (
        "in an order in which each table finds what it needs"
    )
    assert command.parse(["s3", "s1"]).tables == ["s1", "s3"]
    assert command.parse(["all"]).tables == command.parse(["--resume"]).tables == list(command.TABLES)


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["scorebord"], "TABLE must be one of all, decode, scoreboard, run, peers"),
        (
            ["s9"],
            "offload, drafts, kernel, two_engines, two_ranks, claims, s1, s2, s3, s4, s5, s6, s7, got s9",
        ),
        (["decode", "--resume"], "--resume measures all tables"),
    ],
)
def test_invalid_table_is_named(argv, expected, capsys):
    with pytest.raises(SystemExit):
        command.parse(argv)
    assert expected in capsys.readouterr().err


@pytest.fixture
def small(monkeypatch, tmp_path):
    """Measure two tables that take no time, with a results.json of their own."""
    path = tmp_path / "results.json"
    monkeypatch.setattr(results, "RESULTS", path)
    for function in (results.read, results.write, results.begin):
        monkeypatch.setattr(function, "__defaults__", (path,))
    monkeypatch.setattr(results.save, "__defaults__", (path,))
    made = {"a": lambda args: {"a": {"gain": 1}}, "s1": lambda args: {"predict": {"s1": {"n": 2}}}}
    monkeypatch.setattr(command, "TABLES", made)
    monkeypatch.setattr(command, "Quiet", partial(Quiet, lambda: None))  # does not look
    return path


def test_each_table_is_saved_as_soon_as_it_is_measured(small, monkeypatch, capsys):
    def stopped(args):
        raise KeyboardInterrupt

    small.write_text(json.dumps({"predict": {"s2": {"n": 7}}}))
    monkeypatch.setitem(command.TABLES, "s1", stopped)
    with pytest.raises(KeyboardInterrupt):
        command.main(["all"])
    result = results.read()
    assert result["a"] == {"gain": 1} and list(result["measured"]["tables"]) == ["a"]
    monkeypatch.setitem(command.TABLES, "a", stopped)
    monkeypatch.setitem(command.TABLES, "s1", lambda args: {"predict": {"s1": {"n": 2}}})
    assert command.main(["--resume"]) == 0
    result = results.read()
    assert result["predict"] == {"s1": {"n": 2}, "s2": {"n": 7}}, "a table may write a part of a key"
    assert {*result["measured"]["tables"]} == {"a", "s1"} and result["machine"] == results.machine()
    assert "tables:" in capsys.readouterr().err, "a progress bar"


def test_table_beside_other_work_is_not_saved(small, capsys):
    """Nothing is kept with --no-save, so nobody looks."""
    clock, used = itertools.count(), itertools.count()
    quiet = Quiet(lambda: float(next(used)), lambda: next(clock), lambda seconds: None)
    assert command.main(["a", "--no-save"], quiet) == 0 and next(used) == 0
    assert command.main(["all"], quiet) == 1
    assert "a was not measured: after 10 minutes, other processes use" in capsys.readouterr().err
    assert results.read()["measured"]["tables"] == {} and "a" not in results.read()


def test_claims_name_their_own_machine_and_are_saved_on_any(small):
    before = {"machine": "other, float32", "measured": {"machine": "other", "tables": {"a": {"seconds": 1}}}, "a": {}}
    results.write(before)
    assert results.save("claims", {"claims": {"machine": results.host(), "own": {}}}, 1.0)
    assert results.read() == before | {"claims": {"machine": results.host(), "own": {}}}
    assert not results.save("a", {"a": {"gain": 1}}, 1.0) and results.read()["a"] == {}


def test_figures_of_two_machines_are_not_mixed(small, capsys):
    old = {"a": {"gain": 3}, "measured": {"machine": "a large one", "tables": {"a": {"seconds": 1}}}}
    small.write_text(json.dumps(old))
    assert command.main(["a"]) == 1 and results.read() == old
    assert "measured on a large one, but this is" in capsys.readouterr().err
    assert command.main(["--resume"]) == 1 and results.read() == old
    assert "nothing to resume: that run was on a large one" in capsys.readouterr().err
    assert command.main(["a", "--no-save"]) == 0 and results.read() == old
    assert command.main(["all"]) == 0 and results.read()["measured"]["machine"] == results.host()


def test_key_is_a_path(small):
    small.write_text('{"a": {"b": {"16": 2.5}}}')
    assert results.value("a.b.16", small) == 2.5
    with pytest.raises(KeyError, match=r"results\.json has no a\.c: python -m stages\.bench measures it"):
        results.value("a.c", small)


def test_processor_name_is_read_if_the_system_reports_one(tmp_path):
    (tmp_path / "cpuinfo").write_text("processor : 0\nmodel name\t: A Chip 9\n")
    assert results.processor(tmp_path / "cpuinfo") == "A Chip 9" and results.processor(tmp_path / "none")
