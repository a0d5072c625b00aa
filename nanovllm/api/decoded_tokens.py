"""The text of each token that is told beside another, by itself."""

from ..llama import Tokenizer
from ..llama.stream_decoder import REPLACEMENT
from ..backends.torch.logprobs import Logprob

MAX_BEFORE = 4  # tokens: a character has 4 bytes at most


def with_decoded_tokens(place: dict[int, Logprob], before: list[int], tokenizer: Tokenizer) -> dict[int, Logprob]:
    """`place` with decoded_token. `before` are the last tokens before it, up to MAX_BEFORE."""
    return {
        token_id: entry._replace(decoded_token=decoded_token(token_id, before, tokenizer))
        for token_id, entry in place.items()
    }


def decoded_token(token_id: int, before: list[int], tokenizer: Tokenizer) -> str:
    """The text of a token, with its leading space. A byte has that of the character that it completes, else none."""
    for count in range(len(before) + 1):
        earlier = tokenizer.anchor + before[len(before) - count :]
        text = tokenizer.decode([*earlier, token_id])
        if not text.endswith(REPLACEMENT):
            return text[len(tokenizer.decode(earlier).rstrip(REPLACEMENT)) :]
    return ""
