"""What ranks agree on: errors of a step, the plan of a step, and the loads of a tier."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ...async_llm import AsyncLLM
from ...distributed.rank_group import RankError, RankGroup
from ...engine.kv_cache import BlockCopy
from ...engine.observer import Observer
from ...options.engine_args import EngineArgs
from ...tiers.agreed_tier import AgreedTier
from ..testing.engines import answer, model_runner, params, run_to_the_end
from ..testing.pools import make_cache
from ..testing.ranks import engine_on, on_ranks
from ..testing.tiers import SlowHostTier

PROMPTS = [[1, 5, 9], [1, 300, 301], list(range(3, 15))]


@pytest.mark.parametrize("module", ["model.layers.1.mlp.down_proj", "model.layers.0.self_attn.rotate", "lm_head"])
def test_error_on_one_rank_fails_the_step_on_all(checkpoint, module):
    """The step fails once, so its sequences run one by one, and none of them is lost."""

    def serve(ranks: RankGroup) -> tuple[list[list[int]], list[str]]:
        engine, raised = engine_on(ranks, checkpoint), list[str]()
        errors = [RuntimeError("no memory")] if ranks.rank == ranks.world_size - 1 else []

        class Listener:
            def on_raise(self, batch: object, error: Exception) -> None:
                raised.append(str(error))

        def fail(*_: object) -> None:
            if engine.executor.num_steps == 3 and errors:
                raise errors.pop()

        engine.observers.append(Listener())
        model_runner(engine).model.get_submodule(module).register_forward_pre_hook(fail)
        for i, prompt in enumerate(PROMPTS):
            engine.add_request(str(i), prompt, params(8))
        ended = run_to_the_end(engine)
        return [answer(ended[str(i)]) for i in range(3)], raised

    expected, _ = serve(RankGroup())
    (first, first_raised), (second, second_raised) = on_ranks(2, serve)
    assert first == second == expected
    assert first_raised == ["rank 1: RuntimeError: no memory"] and second_raised == ["no memory"]


def test_ranks_with_different_requests_end(checkpoint):
    def serve(ranks: RankGroup) -> str:
        engine = engine_on(ranks, checkpoint)
        engine.add_request("a", [1, 5 + ranks.rank], params(8))
        with pytest.raises(RankError) as caught:
            engine.step()
        with pytest.raises(RankError):
            engine.step()
        return str(caught.value)

    assert on_ranks(2, serve) == ["the ranks were not given the same requests in the same order"] * 2


def test_rank_that_leaves_ends_the_others(checkpoint):
    def serve(ranks: RankGroup) -> str | None:
        engine = engine_on(ranks, checkpoint)
        if ranks.rank == 1:
            return None
        engine.add_request("a", [1, 5], params(8))
        with pytest.raises(RankError) as caught:
            engine.step()
        return str(caught.value)

    assert "another rank has ended" in str(on_ranks(2, serve)[0])


class LossyTier(SlowHostTier):
    """A tier whose loads arrive late, or not at all, as `chance()` decides."""

    chance: Callable[[], float]

    def collect(self, wait: bool = False) -> tuple[list[int], list[int]]:
        """Lose one block in ten."""
        finished, _ = super().collect(wait)
        lost = [block for block in finished if self.chance() < 0.1]
        return [block for block in finished if block not in lost], lost


@pytest.mark.parametrize("seed", range(3))
def test_load_arrives_on_all_ranks_at_once_or_is_lost_on_all(seed):
    """Each rank's loads arrive at times of its own. All ranks get the same answers, and none gets garbage."""

    def history(ranks: RankGroup) -> list[Any]:
        rng, own = random.Random(seed), random.Random(f"{seed} {ranks.rank}")
        cache = make_cache(12, num_layers=1)
        tier = LossyTier(cache.blocks, 12, Observer())
        tier.arrives, tier.chance = lambda: own.random() < 0.3, own.random
        agreed, answers, on_the_way, num_lost = AgreedTier(tier, ranks), list[Any](), list[int](), 0
        for block in range(12):
            cache.blocks[block] = block + ranks.rank / 2
            agreed.store(block, bytes([block]))
        for _ in range(80):
            free = [block for block in range(12) if block not in on_the_way]
            targets = rng.sample(free, min(len(free), rng.choice([0, 0, 1, 3])))
            if targets:
                sources = agreed.hold([bytes([block]) for block in targets])
                agreed.load([BlockCopy(*pair) for pair in zip(sources, targets, strict=True)])
                on_the_way += targets
            answers.append([agreed.has_arrived([block]) for block in range(12)])
            is_waiting = rng.random() < 0.1
            arrived, lost = agreed.collect(wait=is_waiting)
            on_the_way = [block for block in on_the_way if block not in arrived + lost]
            assert not (is_waiting and on_the_way)
            agreed.check_integrity()
            assert sorted(agreed.arriving()) == sorted(on_the_way)
            for block in arrived:
                assert (cache.blocks[block] == block + ranks.rank / 2).all(), "it was not here yet"
            answers.append((arrived, lost))
            num_lost += len(lost)
        assert num_lost > 0
        return answers

    first, second = on_ranks(2, history)
    assert first == second and any(not all(each) for each in first[::2])


def test_load_arrives_while_others_run_and_nothing_waits_for_it():
    """One rank's load arrives at the third question, the other's at once."""

    def rounds(ranks: RankGroup) -> int:
        questions = iter([False] * 2 * ranks.rank)
        cache = make_cache(2, num_layers=1)
        tier = SlowHostTier(cache.blocks, 2, Observer())
        agreed = AgreedTier(tier, ranks)
        agreed.store(0, b"a")
        tier.arrives = lambda: next(questions, True)
        agreed.load([BlockCopy(*agreed.hold([b"a"]), 1)])
        for number in range(10):  # steps of other sequences
            if agreed.has_arrived([1]):
                assert agreed.collect() == ([1], [])
                return number
            assert agreed.collect() == ([], [])
        raise AssertionError("it never arrives")

    first, second = on_ranks(2, rounds)
    assert first == second > 0


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"tensor_parallel_size": 3}, "tensor_parallel_size must divide num_attention_heads, 4, got 3"),
        (
            {"tensor_parallel_size": 2, "quantization": "int8"},
            "must be 1 with quantization 'int8', got 2",
        ),
        ({"tensor_parallel_size": 2, "distributed_executor_backend": "ray"}, "must be one of mp, external_launcher"),
        ({"tensor_parallel_size": 2, "distributed_executor_backend": "external_launcher"}, "must be 'mp' for AsyncLLM"),
    ],
)
def test_unsupported_combination_is_one_clear_error(checkpoint: Path, options, error):
    with pytest.raises(ValueError, match=error):
        AsyncLLM(EngineArgs(checkpoint, device="cpu", **options))
