"""Programmatic dependent launch: a kernel starts while the previous one still runs, and then waits for its results.

Otherwise, a kernel starts only after all programs of the previous one have ended and their writes are visible. A
decode step launches hundreds of kernels, and in a small model each of them runs only briefly.

    kernel 1    ....................|
    kernel 2               start, wait |...................|       the wait ends when kernel 1 has ended
    kernel 3                                      start, wait |....

Programmatic dependent launch requires a Hopper GPU or newer (compute capability 9.0).
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

GPUS = range(0 if triton.knobs.runtime.interpret else torch.cuda.device_count())
# Enabled for all GPUs or none. Older GPUs and Triton's interpreter cannot run these instructions.
CAN_START_EARLY = tl.constexpr(bool(GPUS) and all(torch.cuda.get_device_capability(i) >= (9, 0) for i in GPUS))
EARLY_START_OPTIONS = {"launch_pdl": True} if CAN_START_EARLY else {}  # launch options of every kernel


@triton.jit
def start_next_and_wait():
    """Let the next kernel start once all programs of this one have made this call, and wait for the previous kernel.

    Before this call, a kernel must write nothing, and may read only data that no kernel of a step writes, such as
    weights.
    """
    if CAN_START_EARLY:
        gdc_launch_dependents()
        gdc_wait()
