"""Requests on which the typical mistakes of an exercise show, by stage. tests/exercises has the mistakes.

The page's own requests run in a large pool, and give many mistakes no chance: no prompt is larger than the pool, no
text repeats itself, and on a CPU a load has arrived when it returns. `make play` serves these requests, too. Each group
says which mistakes it is for. A text that an animal tells begins with a block of its own, and then goes on like the
others, so the prompts hit nothing of each other.
"""

from notebooks.page.record import Request, Workload

STORY = (
    "Near the castle of the King lay a great dark forest, and under an old tree in the forest was a well. When the day "
    "was warm, the youngest daughter went out and sat down by the side of the cool water. When she was tired of "
    "sitting there, she took a golden ball, threw it up in the air and caught it again. One day the ball did not fall "
    "into her little hand, but on the ground, and it rolled straight into the water."
)
MOON = "She looked at the moon and"
SNOW = "It was snowing, and the"


def told_by(who: str) -> str:
    """Return a prompt of 105 tokens, whose second one is the animal."""
    return f"The {who} told a story. {STORY}"


CONTIGUOUS = Workload(
    (
        # both fit exactly; a stop string ends within a token
        Request("A", told_by("bear"), 8, num_tokens=40),
        Request("B", told_by("wolf"), 8, stop="hunts", num_tokens=40),
    ),
    num_blocks=12,
)
STATIC = Workload(
    (
        # the first token of a block, in a prompt: it has its block already
        Request("A", told_by("bear"), 8, num_tokens=9),
        Request("B", told_by("wolf"), 8, num_tokens=17),
    )
)
SCHEDULED = Workload(
    (
        # alone, A needs the watermark, and then outgrows the pool; B is larger than the pool, and C comes behind it
        Request("A", told_by("bear"), 10, num_tokens=92),
        Request("B", told_by("wolf"), 4, num_tokens=100, after=1),
        Request("C", told_by("fox"), 4, num_tokens=10, after=1),
    ),
    num_blocks=12,
    max_num_seqs=4,
    options={"watermark": 0.1},
)
SAMPLED = Workload(
    (
        # two tokens of a prompt are left after the first step
        Request("A", told_by("bear"), 3, num_tokens=26, n=2),
        # the last token of a prompt begins a block
        Request("B", told_by("wolf"), 3, num_tokens=17, n=2, after=5),
        # a sample needs a copy, and C has just taken the last block
        Request("C", told_by("fox"), 10, num_tokens=23, after=9),
        Request("D", told_by("goose"), 6, num_tokens=30, n=2, after=10),
        # samples are preempted, and a request that came after them
        Request("E", told_by("bear"), 16, num_tokens=20, n=3, after=30),
        Request("F", told_by("wolf"), 8, num_tokens=10, after=30),
    ),
    num_blocks=8,
    max_num_seqs=4,
)
CACHED = Workload(
    (
        # equal tokens in blocks with different prefixes
        Request("A", "and on " * 20, 2, num_tokens=24),
        # token ids whose digits, written one after the other, are the same
        Request("B", "He saw that creature in the wood by the sea.", 2, after=2),
        Request("C", "He saw rough door in the wood by the sea.", 2, after=4),
        # E hits the block that was used least recently, needs the whole pool, and waits for D
        Request("D", SNOW, 4, num_tokens=6, after=6),
        Request("E", "and on and on and on and " + STORY, 4, num_tokens=90, after=7),
        # what B has cached is evicted
        Request("F", "He saw that creature in the wood by the sea.", 2, after=17),
        # the next turn of a conversation
        Request("G", told_by("frog"), 8, num_tokens=12, after=19),
        Request("H", "", 2, follows="G", after=27),
        # two equal prompts in a step; L evicts the end of what J has cached, and K goes on behind it
        Request("J", told_by("fox"), 14, num_tokens=12, after=29),
        Request("K", told_by("fox"), 30, num_tokens=12, after=29),
        Request("L", told_by("wolf"), 8, num_tokens=33, after=43),
        Request("M", "", 2, follows="K", after=59),
        # all blocks of a prompt are cached
        Request("N", "", 2, follows="K", num_tokens=16, after=62),
        # a prompt is aborted, and two of its blocks are not cached
        Request("O", told_by("bear"), 4, num_tokens=40, after=64, aborted_after=65),
        Request("P", told_by("goose"), 2, num_tokens=12, after=65),
    ),
    num_blocks=12,
    max_num_seqs=4,
)
OFFLOADED = Workload(
    (
        # B drives A out. C loads A's blocks alone, from a host that is full; D hits them, which are on both tiers now
        Request("A", told_by("bear"), 2, num_tokens=40),
        Request("B", told_by("wolf"), 1, num_tokens=90, after=3),
        Request("C", told_by("bear"), 2, num_tokens=72, after=7),
        Request("D", told_by("bear"), 1, num_tokens=40, after=11),
        # F hits blocks on both tiers, needs the whole device, and waits for E
        Request("E", MOON, 3, num_tokens=6, after=12),
        Request("F", told_by("wolf"), 1, num_tokens=90, after=13),
        # the samples of G wait for a load, and the second one needs a block, but H has all of them
        Request("G", "", 4, follows="E", num_tokens=9, n=2, after=19),
        Request("H", told_by("fox"), 2, num_tokens=74, after=19),
        # K drives J out. M waits for its load between L and N, which decode
        Request("J", told_by("goose"), 1, num_tokens=26, after=29),
        Request("K", told_by("king"), 1, num_tokens=90, after=31),
        Request("L", SNOW, 10, num_tokens=6, after=35),
        Request("M", told_by("goose"), 3, num_tokens=26, after=36),
        Request("N", MOON, 6, num_tokens=6, after=36),
        # Q drives O out, not P. R is preempted during its load; then Q, alone, needs the block that the load holds
        Request("O", told_by("frog"), 1, num_tokens=9, after=49),
        Request("P", told_by("queen"), 1, num_tokens=17, after=50),
        Request("Q", told_by("duck"), 14, num_tokens=79, after=51),
        Request("R", told_by("frog"), 2, num_tokens=9, after=55),
    ),
    num_blocks=12,
    num_host_blocks=8,
    max_num_seqs=4,
    load_steps=12,
)

TRAPS = {"s1": CONTIGUOUS, "s2": STATIC, "s4": SCHEDULED, "s5": SAMPLED, "s6": CACHED, "s7": OFFLOADED}
