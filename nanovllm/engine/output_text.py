"""When an output ends: stop strings, which are cut from its text, and repetitions."""

from functools import lru_cache

import numpy as np

from ..checkpoints.stream_decoder import StreamDecoder
from ..requests.sampling_params import RepetitionDetectionParams


class StopStrings:
    """An automaton that finds strings in a growing text and reads each character once, by Aho and Corasick (1975).

    A state stands for the longest suffix of the text that is a prefix of one of the strings:

        stops "The End", "ends":   0 -T- 1 -h- 2 -e- 3 ...      after "The en", the state is that of "en"
                                     -e- 8 -n- 9 ...

    `ends` has, for each state, the lowest index of a string that ends there, or the number of strings if none does.
    `held_back` has the length of the longest suffix that more characters could turn into one of the strings.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._children: list[dict[str, int]] = [{}]
        self.ends, parents, depths = [len(stops)], [(0, "")], [0]
        for index, stop in enumerate(stops):
            state = 0
            for char in stop:
                if char not in self._children[state]:
                    self._children[state][char] = len(self._children)
                    self._children.append({})
                    self.ends.append(len(stops))
                    parents.append((state, char))
                    depths.append(depths[state] + 1)
                state = self._children[state][char]
            self.ends[state] = min(self.ends[state], index)
        self._fallbacks, self.held_back = [0] * len(depths), depths  # the state of the longest shorter suffix
        for state in sorted(range(1, len(depths)), key=depths.__getitem__):
            parent, char = parents[state]
            fallback = self._fallbacks[state] = self.read(self._fallbacks[parent], char) if parent else 0
            self.ends[state] = min(self.ends[state], self.ends[fallback])
            if not self._children[state]:  # a complete string, and the prefix of no other one
                self.held_back[state] = self.held_back[fallback]

    def read(self, state: int, char: str) -> int:
        """Return the state after one more character, in constant time (averaged over a text)."""
        while char not in self._children[state] and state:
            state = self._fallbacks[state]
        return self._children[state].get(char, 0)


automaton_of = lru_cache(maxsize=64)(StopStrings)  # all samples of a request share one


class OutputText:
    """The text of an output as it grows, cut at the first stop string.

    Stop strings may straddle tokens, and text that a user has seen is never taken back, so an ending that may become a
    stop string is held back. Stop strings within the first min_tokens tokens do not count. With stop strings, push each
    token by itself; without them, several may come together.
    """

    def __init__(
        self, decoder: StreamDecoder | None, stop: tuple[str, ...] = (), keep_stop: bool = False, min_tokens: int = 0
    ) -> None:
        self._decoder, self._stop = decoder, stop
        self._automaton, self._state = automaton_of(stop), 0
        self._keep_stop, self._min_tokens, self._num_tokens = keep_stop, min_tokens, 0
        self.pieces: list[str] = []  # of the text that may be shown
        self._held_back = ""
        self.stop_string: str | None = None  # the stop string that ended the text

    def push(self, token_ids: list[int]) -> bool:
        """Add tokens. Return True if they complete a stop string."""
        if not self._decoder:
            return False
        self._num_tokens += len(token_ids)
        piece = self._decoder.push(token_ids)
        if self._stop:
            return self._add(piece)
        self.pieces.append(piece)
        return False

    def close(self) -> None:
        """Show the text that was held back, because no tokens will follow."""
        if self._decoder:
            self._add(self._decoder.flush())
        self.pieces.append(self._held_back)
        self._held_back, self._decoder = "", None

    def _add(self, piece: str) -> bool:
        text = self._held_back + piece
        for end, char in enumerate(piece, len(self._held_back) + 1):
            self._state = self._automaton.read(self._state, char)
            index = self._automaton.ends[self._state]
            if index < len(self._stop) and self._num_tokens > self._min_tokens:
                self.stop_string = self._stop[index]
                start = end - len(self.stop_string)
                self.pieces.append(text[: end if self._keep_stop else start])
                self._held_back, self._decoder = "", None
                return True
        num_shown = len(text) - self._automaton.held_back[self._state]
        self.pieces.append(text[:num_shown])
        self._held_back = text[num_shown:]
        return False


class RepetitionDetector:
    """A detector of patterns that an output repeats at its end, min_count times or more.

    For each token, numpy makes one pass over the pattern sizes that fit in the output so far, of which there are at
    most len(output). However large the parameters are, this is less work than attention does for the same token.

    >>> detector = RepetitionDetector(RepetitionDetectionParams(max_pattern_size=2, min_count=3))
    >>> [detector.push(token_id) for token_id in (9, 4, 5, 4, 5, 4, 5)]
    [False, False, False, False, False, False, True]
    """

    def __init__(self, params: RepetitionDetectionParams) -> None:
        self._min_size, self._max_size = max(1, params.min_pattern_size), params.max_pattern_size
        self._min_count = params.min_count
        self._token_ids = np.empty(64, dtype=np.int64)  # [capacity], filled from its end: the newest token comes first
        # [capacity], by size - 1: how many tokens in a row, up to the newest, equal the token `size` places earlier
        self._runs = np.zeros(64, dtype=np.int64)
        self._num_tokens = 0

    def push(self, token_id: int) -> bool:
        """Add a token. Return True if the output ends in a repetition now."""
        capacity, size = len(self._runs), min(self._max_size, self._num_tokens)  # size: largest to compare
        if self._num_tokens == capacity:
            self._token_ids = np.concatenate([np.empty_like(self._token_ids), self._token_ids])
            self._runs, capacity = np.concatenate([self._runs, np.zeros_like(self._runs)]), 2 * capacity
        start = capacity - self._num_tokens
        runs = self._runs[:size]
        runs += 1
        runs *= self._token_ids[start : start + size] == token_id
        self._token_ids[start - 1] = token_id
        self._num_tokens += 1
        largest = min(self._max_size, self._num_tokens // self._min_count)  # that fits min_count times
        if largest < self._min_size:
            return False
        sizes = np.arange(self._min_size, largest + 1)
        return bool((self._runs[sizes - 1] >= sizes * (self._min_count - 1)).any())
