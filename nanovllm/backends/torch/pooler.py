"""The pooler, which turns the hidden states of the prompts' last tokens into embeddings."""

import torch
from torch import Tensor
from torch.nn.functional import normalize

from ...requests.pooling_params import PoolingParams
from ...requests.tokens import PoolerOutput


def pool(hidden: Tensor, params: list[PoolingParams]) -> list[PoolerOutput]:
    """Return an embedding for each row of `hidden` [num_prompts, hidden_size], as vLLM's pooling of type "LAST" does.

    Raise FloatingPointError if a number in `hidden` is NaN or infinite.

    >>> from nanovllm import PoolingParams
    >>> pool(torch.tensor([[3.0, 4.0]]), [PoolingParams()])[0].embedding == torch.tensor([0.6, 0.8]).tolist()
    True
    """
    assert len(hidden) == len(params), (hidden.shape, len(params))
    if not hidden.isfinite().all():
        raise FloatingPointError("the hidden state of the prompt's last token is NaN or infinite")
    is_raw = torch.tensor([each.use_activation is False for each in params], device=hidden.device)  # [num_prompts]
    embeddings = torch.where(is_raw.unsqueeze(1), hidden.float(), normalize(hidden.float(), dim=-1))
    return [PoolerOutput(embedding) for embedding in embeddings.tolist()]
