"""stages/bench/steady.py: turns go on until rounds agree, and nothing is measured beside other work.

No test looks at a clock or at the machine's processes: both are scripted.
"""

import os
from itertools import count

import pytest

from nanovllm.bench.harness import ratios, with_spreads
from stages.bench import steady
from stages.bench.steady import BusyMachineError, Quiet, until_steady, work_of_others
from stages.tools.prose import figures


def test_range_that_is_not_steady_is_one_that_prose_prints():
    assert steady.STEADY == figures.WIDE


@pytest.mark.parametrize(("slow", "turns", "is_steady"), [(0, 5, True), (1, 20, True), (3, 40, True), (4, 40, False)])
def test_turns_are_doubled_until_the_rounds_agree(slow, turns, is_steady):
    """The first turns take twice as long. The median of a round that is long enough doesn't see them."""
    numbers = count()
    calls = {"a": lambda: 2.0 if next(numbers) < slow else 1.0}
    rounds, num_turns = until_steady(calls, with_spreads, least=5, most=40, warm_ups=0)
    assert len(rounds) == steady.NUM_ROUNDS and num_turns == turns == next(numbers)
    assert steady.is_steady(with_spreads(rounds)) == is_steady


def test_only_the_scores_have_to_be_steady():
    """The machine is half as fast in every second turn, for both calls: their ratio is steady."""
    turns = {"a": count(), "b": count()}
    calls = {"a": lambda: 3.0 * (1 + next(turns["a"]) % 2), "b": lambda: 2.0 * (1 + next(turns["b"]) % 2)}
    rounds, num_turns = until_steady(calls, lambda rounds: ratios(rounds, {"gain": ("a", "b")}), least=5, most=40)
    assert num_turns == 5 and ratios(rounds, {"gain": ("a", "b")}) == {"gain": 1.5, "gain_spread": [1.5, 1.5]}
    assert not steady.is_steady(with_spreads(rounds))


def test_results_with_several_numbers_have_the_median_of_each():
    rounds = steady.in_rounds([{"a": {"ms": float(number), "steps": 3}} for number in range(10)])
    assert rounds[0] == {"a": {"ms": 0.5, "steps": 3}} and rounds[4] == {"a": {"ms": 8.5, "steps": 3}}


# A quiet machine


class Machine:
    """A machine with a clock, on which others use some cores: one entry per look, and the last one from then on."""

    def __init__(self, *cores):
        self.seconds, self.cores, self.used, self.slept = 0.0, [*cores], 0.0, 0

    def pass_by(self, seconds):
        self.seconds += seconds
        self.used += seconds * (self.cores.pop(0) if len(self.cores) > 1 else self.cores[0])

    def sleep(self, seconds):
        self.slept += 1
        self.pass_by(seconds)

    def quiet(self):
        return Quiet(lambda: self.used, lambda: self.seconds, self.sleep)

    def measure(self, **options):
        """Measure a table that takes 20 seconds, and return how often it was measured."""
        calls = []
        result = self.quiet().measure("s1", lambda: (calls.append(1), self.pass_by(20), len(calls))[-1], **options)
        assert result == len(calls), "the last result"
        return result


def test_quiet_machine_is_measured_at_once():
    machine = Machine(0.3)
    assert machine.measure() == 1 and machine.slept == 1


def test_measurement_waits_for_other_work(capsys):
    machine = Machine(1.5, 0.8, 0.1)
    assert machine.measure() == 1 and machine.slept == 3
    said = capsys.readouterr().err
    assert "s1 waits: other processes use 1.50 cores, and 0.3 is allowed" in said and said.count("waits") == 1


def test_machine_that_stays_busy_fails_by_name_after_ten_minutes():
    machine = Machine(0.31)
    with pytest.raises(BusyMachineError, match=r"s1 was not measured: after 10 minutes, .* 0\.31 cores"):
        machine.measure()
    assert machine.slept == machine.seconds == 600


def test_measurement_beside_other_work_is_made_again(capsys):
    """Others begin after the look: the table itself notices them."""
    assert Machine(0.0, 2.0, 0.0, 0.2, 9.0).measure() == 2
    assert "s1: other processes used 2.00 cores meanwhile (try 1 of 3)" in capsys.readouterr().err


@pytest.mark.parametrize("tries", [1, 3])
def test_measurement_that_is_never_alone_fails_by_name(tries):
    machine = Machine(*[0.0, 2.0] * tries, 0.0)
    with pytest.raises(BusyMachineError, match="s1 was not measured: each time"):
        machine.measure(tries=tries)
    assert machine.slept == tries


def test_system_that_reports_no_work_is_trusted_and_named(capsys):
    assert Quiet(lambda: None).measure("s1", lambda: 4) == 4
    assert "s1: this system doesn't report other processes' work" in capsys.readouterr().err


def processes(folder, total, lines):
    """Write what Linux has in /proc: all ticks of user, nice, system, idle, iowait, irq, softirq and steal."""
    folder.mkdir(exist_ok=True)
    (folder / "stat").write_text(f"cpu  {' '.join(map(str, total))} 7 7\ncpu0 1 1 1 1 1 1 1 1 1 1\n")
    for pid, (name, parent, *ticks) in lines.items():
        (folder / str(pid)).mkdir(exist_ok=True)
        line = f"{pid} ({name}) S {parent} 1 1 0 -1 4194560 1 2 3 4 {' '.join(map(str, ticks))} 20 0 1 0 99"
        (folder / str(pid) / "stat").write_text(line)


def test_work_of_others_is_all_but_our_processes_and_those_that_they_started(tmp_path):
    second = os.sysconf("SC_CLK_TCK")
    lines = {  # name, parent, user, system, and user and system of children that have ended
        1: ("init", 0, 50, 50, 900, 900),
        40: ("python", 1, 30, 20, 6, 4),  # this process
        41: ("peer worker", 40, 100, 0, 0, 0),
        42: ("a (strange) name", 41, 0, 200, 10, 0),
        50: ("make", 1, 300, 0, 0, 0),
    }
    processes(tmp_path / "proc", (1000, 100, 200, 99999, 8888, 10, 20, 30), lines)
    (tmp_path / "proc" / "60").mkdir()  # it ends while it is read
    work = work_of_others(tmp_path / "proc", own=40)
    assert work * second == pytest.approx(1000 + 100 + 200 + 10 + 20 + 30 - (60 + 100 + 210))
    assert work_of_others(tmp_path / "nothing") is None
