"""LLM, called as vLLM scripts call it: generate(), chat(), beam_search() and the other methods."""

import functools
import io
import threading
import warnings

import numpy as np
import pytest
import torch
from tqdm import tqdm

from .. import (
    LLM,
    BeamSearchOutput,
    BeamSearchParams,
    EngineArgs,
    LLMEngine,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
)
from ..checkpoints.tokenizer import load_tokenizer
from ..engine.sequence import Sequence
from .testing.checkpoints import write_checkpoint
from .testing.engines import OPTIONS

PROMPT = [3, 17, 4, 29, 8, 15, 40, 22, 9, 31]
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}fox:{% endif %}"
)


@pytest.fixture(scope="module")
def llm(checkpoint) -> LLM:
    return LLM(checkpoint, block_size=4, seed=3, **OPTIONS)


def greedy(max_tokens: int = 4, **params) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, **params)


def token_ids(outputs) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


# generate()


def test_all_forms_of_a_prompt_give_the_same_output(llm):
    forms = [PROMPT, tuple(PROMPT), np.array(PROMPT), torch.tensor(PROMPT), {"prompt_token_ids": PROMPT}]
    assert len({*map(tuple, token_ids(llm.generate(forms, greedy())))}) == 1
    assert token_ids(llm.generate(np.array(PROMPT), greedy())) == token_ids(llm.generate(forms[:1], greedy()))
    texts = llm.generate(["the fox", {"prompt": "the fox"}], greedy())
    assert (
        texts[0].prompt == texts[1].prompt == "the fox" and texts[0].outputs[0].text == texts[1].outputs[0].text != ""
    )


def test_text_given_with_token_ids_is_shown_as_the_prompt(llm):
    [output] = llm.generate({"prompt": "what it says", "prompt_token_ids": PROMPT}, greedy())
    assert (output.prompt, output.prompt_token_ids) == ("what it says", PROMPT)


def test_invalid_prompt_is_an_error_before_anything_is_computed(llm):
    num_steps = llm.llm_engine.executor.num_steps
    with pytest.raises(ValueError, match="prompt 1: field 'multi_modal_data' is unsupported"):
        llm.generate(["the fox", {"prompt": "the fox", "multi_modal_data": {"image": object()}}], greedy())
    with pytest.raises(ValueError, match=r"sampling_params .* 2 prompts, got 1"):
        llm.generate(["the fox", "the rabbit"], [greedy()])
    assert llm.llm_engine.executor.num_steps == num_steps and not llm.llm_engine.has_unfinished_requests()


def test_failed_requests_are_reported_in_a_warning(llm):
    with pytest.warns(
        UserWarning, match=r"2 of 3 requests were not served: request \d+: the prompt is empty"
    ) as caught:
        outputs = llm.generate(["the fox", "", [5] * 100], greedy())
    assert caught[0].filename == __file__
    assert [output.outputs[0].finish_reason for output in outputs] == ["length", "error", "error"]
    assert outputs[1].error.startswith("the prompt is empty") and isinstance(outputs[1], RequestOutput)


@pytest.mark.parametrize(
    "argument",
    [{"lora_request": "an adapter"}, {"priority": 1}, {"priority": [0, 2]}, {"mm_processor_kwargs": {"a": 1}}],
    ids=str,
)
def test_unsupported_arguments_are_refused(llm, argument):
    [name] = argument
    for call in (llm.generate, llm.chat):
        with pytest.raises(ValueError, match=f"{name} is unsupported"):
            call([{"role": "user", "content": "a"}] if call == llm.chat else "a", greedy(), **argument)
    llm.generate("a", greedy(1), lora_request=[None], priority=[0], mm_processor_kwargs={})


def test_special_tokens_can_be_left_out(llm):
    with_bos, without = (
        llm.generate("the fox", greedy(), tokenization_kwargs={"add_special_tokens": each})[0].prompt_token_ids
        for each in (True, False)
    )
    assert with_bos == [1, *without]
    with pytest.raises(ValueError, match=r"tokenization_kwargs\['truncate_prompt_tokens'\] is unsupported"):
        llm.generate("the fox", greedy(), tokenization_kwargs={"truncate_prompt_tokens": 3})


def test_refused_prompt_is_in_its_output(llm):
    both = {"prompt": "what it says", "prompt_token_ids": [9999]}
    conversation = [{"role": "user", "content": "the fox " * 100}]
    with pytest.warns(UserWarning, match="were not served"):
        [served, refused] = llm.generate([[5], both], greedy())
        [too_long] = llm.chat(conversation, greedy(), chat_template=TEMPLATE)
    assert not served.error and (refused.prompt, refused.prompt_token_ids) == ("what it says", [9999])
    assert too_long.prompt.startswith("user: the fox") and len(too_long.prompt_token_ids) > llm.max_model_len


def test_generate_returns_only_final_outputs(llm):
    params = greedy(5, output_kind=RequestOutputKind.DELTA)
    [output] = llm.generate(PROMPT, params)
    assert len(output.outputs[0].token_ids) == 5 and params.output_kind is RequestOutputKind.DELTA
    assert [len(output.outputs[0].token_ids) for output in llm.stream(PROMPT, params)] == [1] * 5


def test_prompt_token_ids_argument_was_removed_as_in_vllm(llm):
    with pytest.raises(TypeError, match="prompt_token_ids"):
        llm.generate(prompt_token_ids=[PROMPT], sampling_params=greedy())


def test_progress_bar_shows_requests_and_tokens(llm):
    screen = io.StringIO()
    params = [greedy(4), SamplingParams(n=2, max_tokens=3, ignore_eos=True)]
    llm.generate([PROMPT, PROMPT], params, use_tqdm=functools.partial(tqdm, file=screen, mininterval=0))
    last = screen.getvalue().strip().split("\r")[-1]
    assert "Processed prompts: 100%" in last and "3/3" in last
    assert "est. speed input:" in last and "output:" in last and "0.00 toks/s" not in last


def test_no_bar_is_shown_without_a_terminal(llm, capsys):
    llm.generate(PROMPT, greedy(1))
    llm.generate(PROMPT, greedy(1), use_tqdm=False)
    assert capsys.readouterr() == ("", "")


def test_request_that_cannot_be_decoded_ends_the_call_with_its_error(llm, monkeypatch):
    """Decoding raises in a step, and again during the abort. The next call works."""
    completion = Sequence.completion

    def decoded(seq):
        if seq.prompt_token_ids == PROMPT:
            raise RuntimeError("no text")
        return completion(seq)

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="no text"):
        patch.setattr(Sequence, "completion", decoded)
        [*llm.stream([PROMPT, PROMPT, [5, 6]], greedy())]
    assert not llm.llm_engine.has_unfinished_requests() and llm.stats().blocks_running == 0
    assert len(token_ids(llm.generate([PROMPT, [5, 6]], greedy()))) == 2


def test_interrupt_leaves_nothing_behind(llm):
    class Bar(tqdm):
        def update(self, count):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        llm.generate([PROMPT, PROMPT[:5]], [greedy(2), greedy(30)], use_tqdm=functools.partial(Bar, file=io.StringIO()))
    assert not llm.llm_engine.has_unfinished_requests() and llm.stats().blocks_running == 0
    assert len(token_ids(llm.generate(PROMPT, greedy()))[0]) == 4


# chat()


def test_template_turns_a_conversation_into_a_prompt(llm):
    messages = [{"role": "rabbit", "content": "who sat in the wood?"}]
    [output] = llm.chat(messages, greedy(), chat_template=TEMPLATE)
    assert output.prompt == "rabbit: who sat in the wood?\nfox:"
    [plain] = llm.generate(output.prompt, greedy(), tokenization_kwargs={"add_special_tokens": False})
    assert output.prompt_token_ids == plain.prompt_token_ids and token_ids([output]) == token_ids([plain])
    assert 1 not in output.prompt_token_ids, "the template writes BOS"
    [goes_on] = llm.chat(
        messages, greedy(), chat_template=TEMPLATE, add_generation_prompt=False, continue_final_message=True
    )
    assert goes_on.prompt == "rabbit: who sat in the wood?"


def test_lone_surrogate_is_an_error(llm):
    with pytest.raises(ValueError, match=r"the prompt is not valid Unicode: '\\ud83d' at index 6"):
        llm.chat([{"role": "fox", "content": "a\ud83d"}], greedy(), chat_template=TEMPLATE)


def test_several_conversations_in_one_call(llm):
    one, two = [{"role": "a", "content": "b"}], [{"role": "c", "content": [{"type": "text", "text": "d"}]}]
    outputs = llm.chat([one, two], [greedy(2), greedy(3)], use_tqdm=False, chat_template=TEMPLATE)
    assert [output.prompt for output in outputs] == ["a: b\nfox:", "c: d\nfox:"]
    assert [len(ids) for ids in token_ids(outputs)] == [2, 3]


def test_template_comes_from_the_call_or_the_llm(checkpoint, tmp_path):
    (tmp_path / "a.jinja").write_text("file: {{ messages[0].content }}")
    messages = [{"role": "a", "content": "b"}]
    llm = LLM(checkpoint, chat_template=tmp_path / "a.jinja", **OPTIONS)
    assert llm.chat(messages, greedy(1))[0].prompt == "file: b"
    assert (
        llm.chat(messages, greedy(1), chat_template="call{{ x }}", chat_template_kwargs={"x": 1})[0].prompt == "call1"
    )
    with pytest.raises(ValueError, match="cannot be read"):
        LLM(checkpoint, chat_template="missing.jinja", **OPTIONS)
    with pytest.raises(ValueError, match="no chat template"):
        LLM(checkpoint, **OPTIONS).chat(messages, greedy(1))


# beam_search()


def test_beams_are_in_outputs_and_in_vllms_sequences(llm):
    params = BeamSearchParams(beam_width=3, max_tokens=4)
    outputs = llm.beam_search(["the fox", {"prompt_token_ids": PROMPT}], params)
    for output in outputs:
        assert isinstance(output, BeamSearchOutput) and isinstance(output, RequestOutput)
        assert len(output.sequences) == len(output.outputs) == 3
        for sequence, beam in zip(output.sequences, output.outputs, strict=True):
            assert sequence.tokens == [*output.prompt_token_ids, *beam.token_ids]
            assert sequence.cum_logprob == pytest.approx(beam.cumulative_logprob, abs=1e-4)
            chosen = [place[token_id] for place, token_id in zip(sequence.logprobs, beam.token_ids, strict=True)]
            assert sum(each.logprob for each in chosen) == pytest.approx(sequence.cum_logprob, abs=1e-4)
            assert all(len(place) == 6 for place in sequence.logprobs), "2 * beam_width"
            assert sequence.text == llm.get_tokenizer().decode(sequence.tokens, skip_special_tokens=True)
            assert sequence.finish_reason is sequence.stop_reason is sequence.lora_request is None
    assert outputs[0].prompt == "the fox" and outputs[0].sequences[0].text.startswith("the fox")
    assert llm.stats().blocks_running == 0


def test_beams_that_end_early_have_the_logprobs_of_their_tokens(llm, tmp_path):
    """Twenty tokens end a text, so each beam considers many candidates. One of them ends the best beam."""
    params = BeamSearchParams(beam_width=2, max_tokens=4)
    likely = llm.beam_search([PROMPT], params)[0].sequences[0].tokens[-1]
    other = LLM(write_checkpoint(tmp_path, eos_token_id=[likely, *range(3, 22)]), **OPTIONS)
    [output] = other.beam_search([PROMPT], BeamSearchParams(beam_width=2, max_tokens=12, length_penalty=0.0))
    lengths = [len(sequence.tokens) - len(PROMPT) for sequence in output.sequences]
    assert min(lengths) < 12 and [len(sequence.logprobs) for sequence in output.sequences] == lengths


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"tools": 5}, "tools must be a list, got int"),
        ({"chat_template": 5}, "chat_template must be a string, got int"),
        ({"chat_template_kwargs": 5}, "chat_template_kwargs must be a dictionary with string keys, got 5"),
        ({"chat_template_kwargs": {5: 1}}, "chat_template_kwargs must be a dictionary with string keys, got {5: 1}"),
        ({"chat_template_kwargs": {"messages": []}}, "must not contain messages"),
        ({"tokenization_kwargs": 5}, "tokenization_kwargs must be a dictionary with string keys, got 5"),
    ],
    ids=str,
)
def test_invalid_conversations_are_refused(llm, wrong, reason):
    with pytest.raises(ValueError) as caught:
        llm.chat([{"role": "user", "content": "hello"}], greedy(), **{"chat_template": TEMPLATE} | wrong)
    assert reason in str(caught.value)


def test_invalid_arguments_of_other_calls_are_refused(checkpoint):
    with pytest.raises(ValueError, match="chat_template must be a template or the name of a file, got 5"):
        LLM(checkpoint, chat_template=5, **OPTIONS)
    engine = LLMEngine.from_engine_args(EngineArgs(checkpoint, **OPTIONS))
    for params in (5, {}, [greedy()]):
        with pytest.raises(ValueError, match=f"sampling_params must be SamplingParams, got {type(params).__name__}"):
            engine.add_request("a", PROMPT, params)
    with pytest.raises(ValueError, match="tokenization_kwargs must be a dictionary with string keys, got 5"):
        engine.add_request("a", "the fox", greedy(), tokenization_kwargs=5)
    assert not engine.has_unfinished_requests()


def test_invalid_beam_searches_are_refused(llm):
    with pytest.warns(UserWarning, match="1 of 2 requests were not served") as caught:
        outputs = llm.beam_search([[9999], PROMPT], BeamSearchParams(beam_width=2, max_tokens=2))
    assert caught[0].filename == __file__
    assert outputs[0].error and outputs[0].sequences == [] and len(outputs[1].sequences) == 2
    for name in ("temperature", "include_stop_str_in_output", "structured_outputs", "watermarking"):
        with pytest.raises(ValueError, match=f"{name} is unsupported"):
            BeamSearchParams(2, **{name: 1})
    with pytest.raises(ValueError, match="lora_request is unsupported"):
        llm.beam_search([PROMPT], BeamSearchParams(2), lora_request=object())


# Other methods


def test_get_tokenizer(llm, checkpoint):
    tokenizer = llm.get_tokenizer()
    assert tokenizer.decode(tokenizer.encode("the fox", add_special_tokens=False)) == "the fox"
    without = LLM(checkpoint, skip_tokenizer_init=True, **OPTIONS)
    [output] = without.generate([PROMPT], greedy())
    assert output.outputs[0].text == "" and len(output.outputs[0].token_ids) == 4
    with pytest.raises(ValueError, match="the checkpoint has no tokenizer"):
        without.get_tokenizer()


def test_tokenizer_from_another_folder(llm, checkpoint, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "tokenizer.model").write_bytes((checkpoint / "tokenizer.model").read_bytes())
    (other / "tokenizer_config.json").write_text('{"add_bos_token": false}')
    [output] = LLM(checkpoint, tokenizer=other, **OPTIONS).generate("the fox", greedy())
    assert output.prompt_token_ids == load_tokenizer(other).encode("the fox")
    assert output.prompt_token_ids[0] != 1 == llm.generate("the fox", greedy())[0].prompt_token_ids[0]
    with pytest.raises(ValueError, match=r"has no tokenizer\.json and no tokenizer\.model"):
        LLM(checkpoint, tokenizer=tmp_path, **OPTIONS)


def test_dummy_weights_need_no_file(checkpoint, tmp_path):
    (tmp_path / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    options = dict(load_format="dummy", skip_tokenizer_init=True, **OPTIONS)
    made = [token_ids(LLM(tmp_path, **options).generate([PROMPT], greedy(8))) for _ in range(2)]
    assert made[0] == made[1] and len(made[0][0]) == 8
    model = LLM(tmp_path, **options).llm_engine.executor.model
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert 0.01 < model.model.layers[0].mlp.down_proj.weight.std() < 0.03
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        LLM(tmp_path, skip_tokenizer_init=True, **OPTIONS)


def test_cache_can_be_reset(llm):
    prompt = [*range(40, 60)]
    assert [llm.generate(prompt, greedy(1))[0].num_cached_tokens for _ in range(2)] == [0, 16]
    assert llm.reset_prefix_cache() is True
    assert llm.generate(prompt, greedy(1))[0].num_cached_tokens == 0
    stream = llm.stream(prompt, greedy(8))
    next(stream)
    assert llm.reset_prefix_cache() is False
    assert llm.reset_prefix_cache(reset_running_requests=True) is True
    assert len([*stream][-1].outputs[0].token_ids) == 8


def test_llm_from_engine_args(llm, checkpoint):
    made = LLM.from_engine_args(EngineArgs(str(checkpoint), block_size=4, seed=3, **OPTIONS))
    assert made.config == llm.config
    assert token_ids(made.generate(PROMPT, greedy())) == token_ids(llm.generate(PROMPT, greedy()))


def test_llm_belongs_to_the_first_thread_that_uses_it(llm):
    llm.generate("a", greedy())
    errors = []

    def use() -> None:
        engine = llm.llm_engine
        for call in (
            lambda: llm.generate("a", greedy()),
            lambda: llm.stream("a", greedy()),
            lambda: llm.chat([{"role": "a"}], greedy(), chat_template=TEMPLATE),
            lambda: llm.beam_search("a", BeamSearchParams(2)),
            lambda: llm.reset_prefix_cache(),
            lambda: engine.add_request("0", "a", greedy()),
            lambda: engine.abort_request("0"),
            lambda: engine.step(),
        ):
            with pytest.raises(RuntimeError) as caught:
                call()
            errors.append(str(caught.value))

    thread = threading.Thread(target=use, name="another")
    thread.start()
    thread.join()
    owner = threading.current_thread().name
    message = f"the engine belongs to thread {owner!r}, but thread 'another' called it: use AsyncLLM"
    assert len(errors) == 8 and all(error.startswith(message) for error in errors)


def test_thread_that_builds_an_engine_can_leave_it_to_another(llm, checkpoint):
    built, outputs = LLM(checkpoint, block_size=4, seed=3, **OPTIONS), []
    thread = threading.Thread(target=lambda: outputs.extend(built.generate([PROMPT, "a"], greedy())), name="first")
    thread.start()
    thread.join()
    assert token_ids(outputs) == token_ids(llm.generate([PROMPT, "a"], greedy()))
    with pytest.raises(RuntimeError, match="the engine belongs to thread 'first'"):
        built.generate("a", greedy())
    assert built.stats().generation_tokens == 8, "any thread may ask"


# LLMEngine on its own


def make_engine(checkpoint, **options):
    return LLMEngine.from_engine_args(EngineArgs(str(checkpoint), block_size=4, **OPTIONS, **options))


def test_script_can_step_the_engine(llm, checkpoint):
    engine, finished = make_engine(checkpoint), {}
    assert engine.add_request("one", {"prompt_token_ids": PROMPT}, greedy()) == "one"
    engine.add_request("two", "the fox", greedy(), prompt_text="not shown")
    engine.add_request("three", np.array(PROMPT), greedy(6), prompt_text="shown")
    assert engine.get_num_unfinished_requests() == 3
    while engine.has_unfinished_requests():
        finished |= {output.request_id: output for output in engine.step() if output.finished}
    assert token_ids([finished["one"]]) == token_ids(llm.generate(PROMPT, greedy()))
    assert finished["two"].prompt == "the fox", "a text is the prompt itself"
    assert finished["three"].prompt == "shown" and len(finished["three"].outputs[0].token_ids) == 6


def test_abort_one_request_or_several(checkpoint):
    engine = make_engine(checkpoint)
    for name in "abcd":
        engine.add_request(name, PROMPT, greedy(20))
    engine.step()
    assert engine.abort_request("a").outputs[0].finish_reason == "abort"
    assert [output.request_id for output in engine.abort_request(["b", "nobody", "c"])] == ["b", "c"]
    assert engine.abort_request("a") is None and engine.get_num_unfinished_requests() == 1
    engine.abort_request(["d"])
    engine.kv_cache_manager.check_integrity()
    assert engine.stats().blocks_running == 0 and not engine.requests


@pytest.mark.parametrize(
    "name", ["arrival_time", "lora_request", "trace_headers", "priority", "session_id", "kv_hints"]
)
def test_engine_refuses_unsupported_arguments(checkpoint, name):
    engine = make_engine(checkpoint)
    with pytest.raises(ValueError, match=f"{name} is unsupported"):
        engine.add_request("0", PROMPT, greedy(), **{name: 5})
    with pytest.raises(ValueError, match="request_id must be a string, got 0"):
        engine.add_request(0, PROMPT, greedy())
    assert not engine.has_unfinished_requests()


def test_ordinary_use_gives_no_warnings(checkpoint):
    with warnings.catch_warnings(action="error"):
        LLM(checkpoint, **OPTIONS).generate(PROMPT, greedy(1))
