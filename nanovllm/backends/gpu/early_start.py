"""Programmatic dependent launch: a kernel starts while the previous one still runs, and waits for its results.

Without it, a kernel starts only after all programs of the previous one have ended and their writes are visible. A
decode step launches hundreds of kernels, and in a small model each of them runs only briefly.

    kernel 1    ....................|
    kernel 2               start, wait |...................|       the wait ends when kernel 1 has ended
    kernel 3                                      start, wait |....

It requires a Hopper GPU or newer (compute capability 9.0).
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

DEVICES = range(0 if triton.knobs.runtime.interpret else torch.cuda.device_count())
# Enabled for all GPUs or none: older GPUs cannot run these instructions, and neither can the interpreter.
IS_EARLY = tl.constexpr(bool(DEVICES) and all(torch.cuda.get_device_capability(i) >= (9, 0) for i in DEVICES))
EARLY = {"launch_pdl": True} if IS_EARLY else {}  # launch options of every kernel


@triton.jit
def start_next_and_wait():
    """Let the next kernel start once all programs of this one have called this, and wait for the previous kernel.

    Before this call, a kernel must write nothing, and may read only data that no kernel of a step writes, such as
    weights.
    """
    if IS_EARLY:
        gdc_launch_dependents()
        gdc_wait()
