"""Sampling on the device: one copy sends the parameters, and the host waits only once per step, for the results."""

import math

import numpy as np
import torch
from torch import Tensor

from ...requests.tokens import SamplingRow, StepOutput
from ..torch.sampler import RowParams, invalid_logits_message, row_params
from .inputs import SAMPLING_FIELDS, allocate_fields, field_views, sampling_params


class Sampling:
    """Tokens that the device is sampling. `results` is float32 [num_rows, 2], from sample_rows()."""

    def __init__(self, results: Tensor) -> None:
        self._copy = results.to("cpu", non_blocking=True, copy=True)  # into pinned memory
        self._copied = torch.cuda.current_stream(results.device).record_event() if results.is_cuda else None

    def read(self) -> StepOutput:
        """Wait for the copy, but not for later steps, and return the tokens.

        Raise FloatingPointError, with the row's number, if a log-probability is not finite.
        """
        if self._copied is not None:
            self._copied.synchronize()
        results = self._copy.numpy()
        logprobs: list[float] = results[:, 1].tolist()
        if not math.isfinite(sum(logprobs)):
            row = next(row for row, logprob in enumerate(logprobs) if not math.isfinite(logprob))
            raise FloatingPointError(invalid_logits_message(row))
        return StepOutput(results[:, 0].astype(np.int64).tolist(), logprobs)


def params_on_device(rows: list[SamplingRow], device: torch.device) -> RowParams:
    """Return the rows' parameters on the device, sent by one asynchronous copy."""
    host = allocate_fields(SAMPLING_FIELDS, len(rows), torch.device("cpu"), is_pinned=device.type == "cuda")
    fields = field_views(host, SAMPLING_FIELDS)
    for name, column in row_params(rows, torch.device("cpu"))._asdict().items():
        fields[name].copy_(column.squeeze(1))
    return sampling_params(field_views(host.to(device, non_blocking=True), SAMPLING_FIELDS), len(rows))
