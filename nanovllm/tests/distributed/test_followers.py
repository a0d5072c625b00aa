"""Followers without an engine: the messages they get, how they end, and what is left."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from ...distributed import followers as module
from ...distributed.followers import Followers
from ..testing.jobs import Unreadable, note, sleep
from .test_processes import followers as pids_of_followers
from .test_processes import is_alive


@pytest.fixture(autouse=True)
def five_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(5)
    yield
    torch.set_num_threads(before)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def start(num_ranks: int) -> tuple[Followers, list[int]]:
    """Return followers and their process ids."""
    before = pids_of_followers()
    followers = Followers(num_ranks)
    wait_until(lambda: len({*pids_of_followers()} - {*before}) == num_ranks - 1)
    return followers, [pid for pid in pids_of_followers() if pid not in before]


def is_refused(followers: Followers) -> bool:
    """Return whether a message to followers that have died is an error. One may still fit into a dying pipe."""
    try:
        followers.send(b"c")
    except OSError:
        return True
    return False


def test_followers_get_every_message_until_one_of_them_fails(tmp_path):
    """The others are killed then, and the error of the first is known. It takes seconds to start two processes."""
    followers, pids = start(3)
    folder, files = Path(followers.store_path).parent, [tmp_path / "one", tmp_path / "two"]
    assert torch.get_num_threads() == 1, "three ranks share five threads"
    followers.run([partial(note, path) for path in files])
    for message in (b"a", b"b"):
        followers.send(message)
    wait_until(lambda: all(path.exists() and path.read_bytes() == b"1 threads\na\nb\n" for path in files))
    assert not followers.any_died
    followers.send(b"two")
    assert followers.death() == "rank 2 has ended: ValueError: no memory" and followers.any_died
    wait_until(lambda: not any(map(is_alive, pids)))
    wait_until(lambda: is_refused(followers))
    followers.end()
    assert torch.get_num_threads() == 5 and not folder.exists()


@pytest.mark.full
def test_follower_that_cannot_start_is_an_error_and_one_that_never_ends_is_killed(monkeypatch):
    monkeypatch.setattr(module, "EXIT_TIMEOUT", 0.1)
    followers, pids = start(3)
    with pytest.raises(ChildProcessError, match=r"rank 2 has ended: ValueError: invalid literal .* 'no number'"):
        followers.run([sleep, Unreadable()])
    assert followers.any_died
    followers.end()
    assert not any(map(is_alive, pids))


@pytest.mark.full
def test_followers_that_end_when_they_are_asked_have_not_died(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "EXIT_TIMEOUT", 60.0)
    followers, pids = start(2)
    followers.run([partial(note, tmp_path / "one")])
    followers.end()
    assert not any(map(is_alive, pids)) and not followers.any_died
    assert (tmp_path / "one").read_bytes() == b"2 threads\nasked to exit\n"


@pytest.mark.parametrize(("code", "end"), [("raise SystemExit(7)", "exit status 7"), ("raise_signal(9)", "signal 9")])
def test_status_of_a_follower_that_is_still_ending_is_awaited(code, end, monkeypatch):
    monkeypatch.setattr(module, "DEATH_TIMEOUT", 60.0)
    process = subprocess.Popen([sys.executable, "-c", f"from signal import raise_signal\n{code}"])
    assert module.describe_exit(2, b"", process) == f"rank 2 has ended: {end}"
