"""Whether an output goes round in circles."""

from .params import RepetitionDetectionParams


def has_repetition(token_ids: list[int], params: RepetitionDetectionParams) -> bool:
    """Whether `token_ids` end in min_count times the same pattern of an allowed size.

    >>> params = RepetitionDetectionParams(max_pattern_size=2, min_count=3)
    >>> has_repetition([9, 4, 5, 4, 5, 4, 5], params), has_repetition([4, 5, 4, 5], params)
    (True, False)
    """
    for size in range(max(1, params.min_pattern_size), params.max_pattern_size + 1):
        end = token_ids[-size * params.min_count :]
        if len(end) == size * params.min_count and end == end[:size] * params.min_count:
            return True
    return False
