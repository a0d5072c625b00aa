"""OutputText: the text of an output, and where its parameters end it."""

from ..engine.sequence import OutputText as CoreOutputText
from ..engine.sequence import longest_beginning
from ..llama import StreamDecoder
from .params import SamplingParams


class OutputText(CoreOutputText):
    """As core's. The stop string may stay in the text, and none counts that is complete within min_tokens tokens."""

    def __init__(self, decoder: StreamDecoder | None, params: SamplingParams) -> None:
        super().__init__(decoder, tuple(params.stop))
        self._keeps_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self._waiting: list[int] = []  # tokens that nobody has asked the text of yet
        self.stop_string: str | None = None  # that ended the text

    def push(self, token_id: int) -> bool:
        """Without stop strings nothing depends on the text: it is made when somebody looks, of all tokens at once."""
        self._num_tokens += 1
        if self._stop:
            return super().push(token_id)
        self._waiting.append(token_id)
        return False

    def close(self) -> None:
        self._catch_up()
        super().close()

    @property
    def shown(self) -> str:
        self._catch_up()
        return self._shown

    @shown.setter
    def shown(self, text: str) -> None:
        self._shown = text

    def _catch_up(self) -> None:
        token_ids, self._waiting = self._waiting, []
        if token_ids and self._decoder:
            self._add(self._decoder.push(*token_ids))

    def _add(self, piece: str) -> bool:
        text, found = self._held_back + piece, []
        for stop in self._stop if self._num_tokens > self._min_tokens else ():
            first = max(0, len(self._held_back) - len(stop) + 1)  # one that ended before did not count
            if (start := text.find(stop, first)) >= 0:
                found.append((start + len(stop), start, stop))
        if found:
            end, start, self.stop_string = min(found, key=lambda match: match[0])  # of several the first in the list
            cut = end if self._keeps_stop else start
            self.shown, self._held_back, self._decoder = self.shown + text[:cut], "", None
            return True
        keep = len(text) - longest_beginning(text, self._stop)
        self.shown, self._held_back = self.shown + text[:keep], text[keep:]
        return False
