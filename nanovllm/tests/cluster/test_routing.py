"""PrefixRouter: random requests and loads, with a model of its table, and the limits on load and memory."""

import random

import pytest

from ...cluster.routing import LeastQueue, PrefixRouter, RoundRobin

IDLE = {"a": 0, "b": 0, "c": 0}


def chain(*names: str) -> list[bytes]:
    """Return hashes of blocks, each of which names all blocks before it.

    >>> chain("x", "y")
    [b'x', b'x/y']
    """
    return ["/".join(names[: end + 1]).encode() for end in range(len(names))]


@pytest.mark.parametrize("seed", range(4))
def test_random_requests_go_where_the_longest_prefix_is(seed):
    rng = random.Random(seed)
    router, sent = PrefixRouter(min_share=0.3, max_lead=3, max_ratio=1.5), {}
    loads = {name: 0 for name in "abcd"}
    for _ in range(600):
        if rng.random() < 0.05:  # a replica comes or goes
            name = rng.choice("abcdef")
            loads.pop(name) if name in loads and len(loads) > 1 else loads.setdefault(name, 0)
        hashes = chain(*rng.choices("xyz", k=rng.randint(0, 6)))
        limit = 1.5 * min(loads.values()) + 3
        allowed = [name for name in loads if loads[name] <= limit]
        depths = {name: sum(name in sent.get(each, ()) for each in hashes) for name in allowed}
        best = max(depths.values())
        if best and best >= 0.3 * len(hashes):
            allowed = [name for name in allowed if depths[name] == best]
        chosen = router.choose(hashes, loads)
        assert chosen in allowed and loads[chosen] == min(loads[name] for name in allowed)
        for each in hashes:
            sent.setdefault(each, set()).add(chosen)
        loads[chosen] += 1
        for name in loads:
            loads[name] = max(0, loads[name] - rng.randint(0, 1))


def test_idle_replicas_share_the_prefixes():
    router = PrefixRouter()
    chosen = {name: router.choose(chain(name, "1"), IDLE) for name in "stuvwx"}
    assert sorted(chosen.values()) == ["a", "a", "b", "b", "c", "c"]
    assert all(router.choose(chain(name, "2"), IDLE) == replica for name, replica in chosen.items())


def test_hot_prefix_gets_a_second_replica_and_stays_on_both():
    router, hot = PrefixRouter(max_lead=2, max_ratio=1.0), chain("hot", "1")
    loads, chosen = dict(IDLE), []
    for _ in range(5):
        chosen.append(router.choose(hot, loads))
        loads[chosen[-1]] += 1
    assert chosen[:3] == ["a"] * 3 and len({*chosen}) == 2
    assert {router.choose(hot, {"a": 0, "b": 1, "c": 0}), router.choose(hot, {"a": 1, "b": 0, "c": 0})} == {*chosen}


def test_table_forgets_the_ends_of_the_oldest_prompts():
    router = PrefixRouter(max_blocks=4)
    first = router.choose(chain("x", "y", "z"), IDLE)
    second = router.choose(chain("p", "q"), IDLE)  # takes the place of x/y/z
    assert first != second
    assert router.choose(chain("x", "y"), IDLE) == first
    for name in "stuv":
        router.choose(chain(name), {second: 0})
    assert router.choose(chain("x", "y"), IDLE) != second, "it has the most blocks, and the table no longer has x"


def test_baselines():
    assert [RoundRobin().choose([], IDLE)] == ["b"]
    router = RoundRobin()
    assert len({router.choose(chain("x"), IDLE) for _ in range(3)}) == 3
    assert LeastQueue().choose(chain("x"), {"a": 2, "b": 1, "c": 3}) == "b"
