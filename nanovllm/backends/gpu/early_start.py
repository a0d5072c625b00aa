"""Programmatic dependent launch: a kernel starts while the one before it still runs, and waits before it reads.

Without it, a kernel starts only after all programs of the one before it have ended and their writes are visible. A
decode step has hundreds of kernels, and those of a small model end soon after they have started.

    kernel 1    ....................|
    kernel 2               start, wait |...................|       the wait ends when kernel 1 is over
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
EARLY = {"launch_pdl": True} if IS_EARLY else {}  # options of each launch


@triton.jit
def start_next_and_wait():
    """Let the next kernel start once all programs of this one have, and wait for the results of the one before.

    Before it calls this, a kernel writes nothing, and reads only what no other kernel of a step writes, such as
    weights.
    """
    if IS_EARLY:
        gdc_launch_dependents()
        gdc_wait()
