"""This branch's gain, counted in steps: a right guess is a token without a step of its own."""

from importlib import import_module

from ..llm import LLM
from ..sampling import SamplingParams
from . import gain
from .gain import MAX_TOKENS, PROMPT, write_repetitive_checkpoint


def test_the_same_tokens_take_fewer_steps(tmp_path):
    folder, steps, said = write_repetitive_checkpoint(tmp_path), {}, {}
    for num_guesses in (0, 4):
        llm = LLM(folder, num_speculative_tokens=num_guesses, prompt_lookup_max=1)
        outputs = llm.generate([PROMPT], SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True))
        said[num_guesses] = outputs[0].outputs[0].token_ids
        steps[num_guesses] = llm.model_runner.num_steps
    assert said[4] == said[0]
    assert steps[0] == MAX_TOKENS and steps[4] == MAX_TOKENS - llm.llm_engine.num_accepted_tokens
    assert 2 * steps[4] <= steps[0]


def test_the_gain_in_figures(tmp_path):
    assert gain.now(import_module("..", __package__), tmp_path) == {
        f"steps for {MAX_TOKENS} tokens of a text that repeats itself": 15
    }
