"""Every notebook runs, is committed with what it showed, drives and draws and defines nothing, types no measurement."""

import ast
import doctest
import re
import resource
import shutil
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")
pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")
pytest.importorskip("matplotlib")

import torch  # noqa: E402

from notebooks import __main__ as command  # noqa: E402
from notebooks import allocators, attending, measure, pictures, pictures_s2, pictures_s3, roofline, traffic  # noqa: E402
from stages import s1_contiguous_cache as s1  # noqa: E402
from stages import s2_block_manager as s2  # noqa: E402
from stages.s1_contiguous_cache.slot_manager import SlotManager  # noqa: E402
from stages.s2_block_manager.block_manager import BlockManager  # noqa: E402
from stages.s2_block_manager.block_pool import BlockPool  # noqa: E402
from stages.s2_block_manager.kv_cache import PoolReport  # noqa: E402
from stages.s2_block_manager.llama import ModelConfig  # noqa: E402

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "notebooks"
PATHS = sorted(FOLDER.glob("*.ipynb"))
DEFINES = {
    "s1_contiguous_cache": {"attend", "next_token"},  # stage zero: a model without a cache
    # policies: who is admitted, who makes room
    "s4_continuous_batching": {"Thresholds", "NeverPreempts", "held", "schedule", "_may_admit", "_make_room"},
}
MAX_BYTES, MAX_LINES = 300_000, 30
MAX_SECONDS = 120  # a minute where the figures were measured; another machine may take twice as long

# What a cell of prose may say in figures: what somebody else claims, and what is so by definition.
CLAIMED = {
    "s1_contiguous_cache": ("34%", "41%", "20-38%", "60%", "87.5%", "80 GB", "256 MB", "40%"),
    "s2_block_manager": (
        *("3 / 6 /\n12 / 24%", "43.75 / 46.88 / 48.44 /\n49.22%", "96%", "0.39%", "48 GB", "5-15%", "50%", "91%"),
        *("8.39 MB", "5.24 MB", "2.10 MB", "8.26 MB", "833,000 operations/s", "267x", "7x", "1-10 us"),
    ),
    "s3_paged_attention": ("4%", "1,198 tok/s", "15-30%", "2-4x"),
    "s4_continuous_batching": ("1%", "95%", "80%", "4%", "2-4 times", "30%", "96%", "3 times"),
    "s5_cow_sampling": ("1.6 us", "43%", "50-80%", "64 KB", "960 KB"),
    "s6_prefix_caching": ("92%", "78%", "65%", "55%", "5%", "50-80%"),
    "s7_cpu_offload": ("46.8 ms", "1,024 ms", "22x", "2-5x", "0.73 ms", "5.24 MB"),
}
MEASUREMENT = re.compile(
    r"\d[\d.,]*\s*(?:%|ms\b|µs\b|us\b|s\b|seconds?\b|minutes?\b|times\b|x\b|×|KB\b|MB\b|GB\b|[kMG]iB\b|"
    r"(?:tok(?:en)?s?|operations?|requests?)\s*(?:/|a|per)\s*s(?:econd)?\b)"
)

each_notebook = pytest.mark.parametrize("path", PATHS, ids=[path.stem for path in PATHS])


def read(path):
    return nbformat.read(path, as_version=4)


def outputs(notebook):
    return [output for cell in notebook.cells for output in cell.get("outputs", [])]


def code_cells(path):
    return [cell for cell in read(path).cells if cell.cell_type == "code"]


def prose(path):
    return "\n".join(cell.source for cell in read(path).cells if cell.cell_type == "markdown")


def test_every_stage_has_a_notebook():
    stages = {path.parent.name for path in (ROOT / "stages").glob("s*_*/__main__.py")}
    assert stages == {path.stem for path in PATHS}


def seconds_of_children() -> float:
    """Of the processor, by processes that this one has started and that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


@pytest.mark.full
@each_notebook
def test_runs_top_to_bottom(path, tmp_path):
    """A copy, from the root of the repository: the committed outputs stay as they are.

    Its time is the processor's: what else the machine does meanwhile, other tests first of all, does not count.
    """
    copy = shutil.copy(path, tmp_path)
    notebook, start = read(copy), seconds_of_children()
    command.execute(notebook, cwd=ROOT)
    seconds = seconds_of_children() - start
    assert seconds > 1, "the notebook's process was not seen"
    assert not [output for output in outputs(notebook) if output.output_type == "error"]
    assert seconds < MAX_SECONDS, f"{path.name} took {seconds:.0f} s, {MAX_SECONDS} are allowed"
    shown, committed = (
        [sorted(output.data) for output in outputs(which) if output.output_type == "display_data"]
        for which in (notebook, read(path))
    )
    assert shown == committed, "the committed outputs are of another version"


@pytest.mark.full
@each_notebook
def test_starts_in_its_own_folder(path):
    """`make notebooks` and jupyter run it there; its first cell finds the repository."""
    notebook = read(path)
    first = next(i for i, cell in enumerate(notebook.cells) if cell.cell_type == "code")
    notebook.cells = notebook.cells[: first + 1]
    command.execute(notebook, cwd=FOLDER)
    assert not [output for output in outputs(notebook) if output.output_type == "error"]


@each_notebook
def test_is_committed_with_outputs(path):
    cells = code_cells(path)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1)), "not run top to bottom"
    assert {output.output_type for output in outputs(read(path))} == {"display_data"}
    assert path.stat().st_size < MAX_BYTES, f"{path.stat().st_size:,} bytes, {MAX_BYTES:,} are allowed"


@each_notebook
def test_pictures_are_static(path):
    kinds = {kind for output in outputs(read(path)) for kind in output.data}
    assert kinds <= {"text/plain", "text/markdown", "image/svg+xml", "image/png"}
    svgs = ["".join(o.data["image/svg+xml"]) for o in outputs(read(path)) if "image/svg+xml" in o.data]
    assert svgs and all(svg.startswith("<svg") and "<title>" in svg for svg in svgs)
    assert not [svg for svg in svgs if re.search(r"<script|<style|<metadata|dc:date", svg)]


@each_notebook
def test_says_nothing_of_the_machine(path):
    notebook = read(path)
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    assert not [cell for cell in notebook.cells if cell.metadata]
    text = path.read_text(encoding="utf-8")
    assert str(Path.home()) not in text and str(ROOT) not in text


@each_notebook
def test_defines_no_engine_logic(path):
    tree = ast.parse("\n".join(cell.source for cell in code_cells(path)))
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    assert {node.name for node in ast.walk(tree) if isinstance(node, kinds)} == DEFINES.get(path.stem, set())


@each_notebook
def test_cells_are_short(path):
    long = [cell.source.splitlines()[0] for cell in code_cells(path) if len(cell.source.splitlines()) > MAX_LINES]
    assert not long, f"cells of more than {MAX_LINES} lines begin with {long}"


@each_notebook
def test_prose_has_no_measurement(path):
    """A figure that was measured is said by the cell that measured it."""
    text = prose(path)
    for claimed in CLAIMED.get(path.stem, ()):
        assert claimed in text, f"{claimed!r} is not there any more: take it off the list"
        text = text.replace(claimed, "")
    assert not MEASUREMENT.findall(text)


@each_notebook
def test_asks_before_it_answers(path):
    assert len(re.findall(r"\*\*Predict:\*\*", prose(path))) >= 3


def test_measurements_are_recognised():
    for text in ("3.4 ms", "12%", "40 times", "1,234 tokens/s", "2 seconds", "1.5x", "30 tok/s", "20 KB"):
        assert MEASUREMENT.search(f"it took {text}, we saw"), text
    for text in ("1,024 slots", "token 16", "stage 4", "8 tokens in one step", "8,192 slots", "part 3"):
        assert not MEASUREMENT.search(f"of {text}, we saw"), text


def test_one_picture_is_the_same_bytes_every_time():
    def draw():
        fig, (ax,) = pictures.figure("A finding", height=2.0)
        pictures.lines(ax, [pictures.Line([1, 2, 3], [1.0, 4.0, 9.0], "squares")], x="n", y="n²")
        return pictures.svg(fig)

    pictures.style()
    assert draw() == draw()
    assert draw().startswith("<svg") and "<title>A finding</title>" in draw()


@pytest.mark.full
def test_readme_picture_is_current_small_and_has_a_background(tmp_path):
    svg = (FOLDER / "pool.svg").read_text(encoding="utf-8")
    assert len(svg.encode()) < 30_000
    assert re.search(r"<path[^>]*fill: #ffffff", svg), "on a dark page the text needs a light ground"
    command.write_readme_picture(tmp_path / "pool.svg")
    made = (tmp_path / "pool.svg").read_text(encoding="utf-8")
    assert re.findall(r"<text[^>]*>([^<]*)", made) == re.findall(r"<text[^>]*>([^<]*)", svg)


class Piece:
    """A pool of four slots in which one sequence holds a piece."""

    def __init__(self, *pieces):
        self.num_slots, self.pieces = 4, pieces


def test_tracks_follow_a_holder_and_tell_the_next_one_apart():
    reports = {1: Piece((0, 2, 1)), 2: Piece((0, 2, 2)), 3: Piece((0, 2, 1), (2, 2, 1)), 4: Piece()}
    assert sorted(pictures.tracks(reports)) == [(0, 2, 1, [1, 2]), (0, 2, 3, [1]), (2, 2, 3, [1])]


def test_holes_are_what_no_piece_covers():
    assert pictures.holes_of(Piece((1, 1, 0), (2, 1, 0))) == [(0, 1), (3, 1)]
    assert pictures.holes_of(Piece()) == [(0, 4)]
    assert pictures.holes_of(Piece((0, 4, 4))) == []


def test_claims_after_the_third_are_folded(monkeypatch):
    shown = []
    monkeypatch.setattr(pictures, "display", shown.append)
    pictures.claims_table([pictures.Claim(f"claim {i}", "a text", "a|b", "holds") for i in range(5)])
    head, folded = shown[0].data.split("<details>")
    assert head.count("claim ") == 4  # the heading's "claim |", and three rows
    assert "<summary>2 more</summary>" in folded and "claim 4" in folded and r"a\|b" in folded


class Counter:
    """A manager that counts slots: a sequence holds as many as it may come to have."""

    def __init__(self, num_slots):
        self.num_slots, self.held, self.appended = num_slots, 0, 0

    def can_allocate(self, seq):
        return self.held + seq.size <= self.num_slots

    def allocate(self, seq):
        self.held += seq.size

    def append_slot(self, seq):
        self.appended += 1
        assert seq.num_tokens <= seq.size

    def free(self, seq):
        self.held -= seq.size

    def report(self):
        return self.held


class Seq:
    def __init__(self, num_prompt_tokens, num_output_tokens):
        self.token_ids = [1] * num_prompt_tokens
        self.size = num_prompt_tokens + num_output_tokens
        self.num_computed_tokens = 0

    @property
    def num_tokens(self):
        return len(self.token_ids)


def test_replay_admits_in_order_and_stops_when_nobody_waits():
    manager = Counter(8)
    moments = traffic.replay(manager, [(Seq(2, 3), 3), (Seq(2, 4), 4), (Seq(1, 1), 1)], num_steps=10)
    assert [moment.report for moment in moments] == [5, 5, 5]  # the second needs 6: it waits, and so does the third
    assert {moment.waiting.size for moment in moments} == {6}
    assert manager.held == 8  # after three steps the first has ended, and the others are in


def test_churn_frees_what_it_allocated():
    manager = Counter(10)
    fits = list(traffic.churn(manager, (Seq(1, 3) for _ in range(9)), [0, 0, 0, 1, 1, 0], seed=0))
    assert fits == [True, True, False, True, True, True]
    assert manager.held == 4


def test_requests_ask_for_what_they_need_or_more():
    for request in traffic.requests(200, seed=0, longest=512):
        assert 1 <= request.num_output_tokens <= request.max_tokens
        assert request.num_prompt_tokens + request.max_tokens <= 512


def sequences(*sizes, stage=s2, max_tokens=4):
    """A sequence for each number of prompt tokens."""
    config = ModelConfig(64, 8, 8, 1, 1, 1, 8)
    made = [traffic.Request(size, max_tokens, max_tokens) for size in sizes]
    return [seq for seq, _ in traffic.arrivals(stage, config, made, longest=64)]


def test_a_promise_is_in_whole_blocks_and_counts_the_others():
    manager = BlockManager(4, block_size=4)
    first, same, larger = sequences(1, 4, 5)
    manager.allocate(first)  # of 5 tokens it may come to have: 2 blocks
    assert traffic.can_promise(manager, same)
    assert not traffic.can_promise(manager, larger)


def test_replay_asks_who_is_admitted():
    asked = []
    moments = traffic.replay(
        Counter(8), [(Seq(1, 2), 2), (Seq(1, 2), 2)], 10, lambda *pair: asked.append(pair) or False
    )
    assert [moment.report for moment in moments] == [0] * 10 and len(asked) == 10


def test_pieces_are_moved_together_when_enough_is_free():
    manager, compacting = SlotManager(16, "request", max_model_len=16), allocators.Compacting()
    a, b, c, d = sequences(2, 2, 2, 6, stage=s1)  # 6, 6, 6 and 10 slots
    for seq in (a, b):
        assert compacting(manager, seq)
        manager.allocate(seq)
        seq.num_computed_tokens = 3
    assert not compacting(manager, c), "4 slots are free"
    manager.free(a)
    assert not manager.can_allocate(d) and compacting(manager, d)
    assert b.slots.start == 0 and compacting.moved == [3]
    manager.check_integrity()


def test_first_in_first_out_is_the_other_order():
    for pool, expected in ((BlockPool(3), [0]), (allocators.FirstInFirstOut(3), [1])):
        pool.free_blocks(pool.get_new_blocks(1))
        assert pool.get_new_blocks(1) == expected and pool.num_free_blocks == 2


def test_texts_in_blocks_waste_their_last_block():
    report = allocators.in_blocks(sequences(1, 4, 5), block_size=4)
    assert (report.held, report.used, report.num_blocks) == (16, 10, 4)


def test_a_pool_in_blocks_is_drawn_as_pieces():
    report = PoolReport(4, block_size=4, promised=0, tables=(((3, 0), 5), ((1,), 4)))
    assert pictures_s2.as_pieces(report) == (16, ((0, 4, 1), (4, 4, 4), (12, 4, 4)))


def test_a_sequence_is_followed_while_it_grows_by_one_slot_a_step():
    tables = [(((1,), 3), ((0,), 1)), (((1,), 4), ((0,), 1)), (((1, 2), 5),)]
    steps = list(pictures_s2.follow([PoolReport(4, 4, 0, step) for step in tables]))
    assert [[holder.number for holder in step] for step in steps] == [[0, 1], [0, 2], [0]]
    assert steps[2][0].slots.tolist() == [4, 5, 6, 7, 8, 9, 10, 11]
    assert pictures_s2.square(steps[1], 256, followed=0, tiles=True).shape == (16, 256, 3)


def test_a_stopwatch_and_a_count_of_tensors():
    manager = BlockManager(4, block_size=4)
    watch = measure.Stopwatch(manager, "allocate", "free")
    (seq,) = sequences(3)
    manager.allocate(seq)
    assert watch.calls == {"allocate": 1, "free": 0} and watch.seconds["allocate"] > 0
    given = torch.zeros(4)
    with measure.Allocations() as made:
        given.add_(1), given[1:], given + given
    assert made.sizes == [16]  # in place and views make none


def test_milliseconds_calls_each_once_a_round():
    calls = []
    times = measure.milliseconds({name: lambda name=name: calls.append(name) for name in "ab"}, rounds=2)
    assert calls == ["a", "b"] * 3
    assert set(times) == {"a", "b"} and all(value >= 0 for value in times.values())


def test_a_shuffled_round_still_calls_each_once():
    calls = []
    measure.milliseconds({name: lambda name=name: calls.append(name) for name in "abcdef"}, rounds=3, shuffle=True)
    rounds = ["".join(calls[i : i + 6]) for i in range(0, 24, 6)]
    assert {"".join(sorted(each)) for each in rounds} == {"abcdef"} and len(set(rounds)) > 1


def test_peak_bytes_are_those_held_at_one_moment():
    one, two = (measure.peak_bytes(lambda n=n: [torch.ones(1024) for _ in range(n)]) for n in (1, 2))
    in_turn = measure.peak_bytes(lambda: [torch.ones(1024).sum().item() for _ in range(8)])
    assert 4096 <= one < 4608 and 8192 <= two < 8704 and 4096 <= in_turn < 4608


def test_operations_are_counted():
    x = torch.ones(4)
    with measure.Operations() as done:
        (x + x) * x
    assert done.count == 2


def test_a_recorder_asks_an_attention_again():
    class Runner:
        def _attention(self, layer, q, k, v):
            return q + layer

    class Engine:
        model_runner = Runner()

    recorder = attending.Recorder(Engine)
    q, k, v = torch.rand(3, 4, 2), torch.rand(3, 2, 2), torch.rand(3, 2, 2)
    assert Engine.model_runner._attention(1, q, k, v).equal(q + 1) and recorder.asked == [(q, k, v)]
    looks = attending.looks_back(recorder.asked)
    assert set(looks) == {(0, head) for head in range(4)}
    assert looks[0, 3][0].equal(q[None, None, -1, 3:4].transpose(2, 3).reshape(1, 1, 1, 2))
    assert looks[0, 3][1].equal(k[:, 1][None, None]) and looks[0, 3][2].shape == (1, 1, 3, 2)
    recorder.leave()
    assert Engine.model_runner._attention(0, q, k, v).equal(q) and len(recorder.asked) == 1


def test_the_work_of_a_step_by_hand():
    """One layer, hidden 4, one head of 4, MLP of 8, vocabulary of 10: 4 x 16 + 3 x 32 weights, and 40 of the head."""
    model = ModelConfig(10, 4, 8, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1, head_dim=4)
    decode = roofline.work(model, [(1, 5), (1, 3)], itemsize=4)
    assert decode.operations == 2 * 2 * 160 + 4 * 4 * (5 + 3) + 2 * 2 * 40
    assert decode.num_bytes == 4 * (160 + 2 * 4 * (5 + 3) + 40)
    prefill = roofline.work(model, [(3, 3)], itemsize=4)
    assert prefill.operations == 3 * 2 * 160 + 4 * 4 * (1 + 2 + 3) + 2 * 40


@pytest.mark.parametrize(
    "module",
    [allocators, measure, pictures, pictures_s2, pictures_s3, roofline, traffic],
    ids=lambda module: module.__name__,
)
def test_examples_in_docstrings(module):
    assert doctest.testmod(module).failed == 0


def test_an_unknown_name_is_one_line(capsys):
    assert command.main(["s99"]) == 2
    assert capsys.readouterr().err == "no notebook begins with s99\n"
