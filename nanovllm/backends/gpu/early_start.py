"""Programmatic dependent launch: a kernel starts while the previous one still runs, and then waits for its results.

Otherwise, a kernel starts only after all programs of the previous one have ended and their writes are visible. A
decode step launches hundreds of kernels, and in a small model each of them runs only briefly.

    kernel 1    ....................|
    kernel 2               start, wait |...................|       the wait ends when kernel 1 has ended
    kernel 3                                      start, wait |....

Programmatic dependent launch requires a Hopper GPU or newer (compute capability 9.0), and is tried before any kernel
uses it.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ...log import logger


@triton.jit
def probe(number):
    gdc_launch_dependents()
    gdc_wait()
    tl.store(number, 1)


def can_start_early() -> bool:
    """Return whether kernels can start early: on all GPUs or none, because compiled kernels don't depend on the GPU.

    Triton's interpreter and AMD's GPUs can't. If the current GPU should be able to and fails, log why.
    """
    gpus = range(0 if triton.knobs.runtime.interpret or torch.version.hip else torch.cuda.device_count())
    if not gpus or any(torch.cuda.get_device_capability(i) < (9, 0) for i in gpus):
        return False
    try:
        number = torch.zeros(1, dtype=torch.int32, device=torch.cuda.current_device())
        for _ in range(2):  # the second may start before the first one ends
            probe[(1,)](number, launch_pdl=True)
        return number.item() == 1
    except Exception as error:
        logger.warning("kernels start one after the other: %s: %s", type(error).__name__, error)
        return False


CAN_START_EARLY = tl.constexpr(can_start_early())
PREFETCH = tl.constexpr("prefetch.global.L2 [$1]; mov.u32 $0, 0;")  # returns a number because it has to
EARLY_START_OPTIONS = {"launch_pdl": True} if CAN_START_EARLY else {}  # launch options of every kernel


@triton.jit
def prefetch(weight, runs, first, STEP: tl.constexpr, length, is_output):
    """Start to read up to 16 lines of 128 bytes for each output into the GPU's cache, if kernels start early.

    weight, a pointer; runs, pointers to where outputs have `length` numbers each; first, of an output's first line, and
    STEP from one line to the next, in numbers of a run. runs, first and is_output are [HEIGHT, 1].
    """
    if CAN_START_EARLY:
        at = first + STEP * tl.arange(0, 16)[None, :]
        pointers = tl.where(is_output & (at < length), runs + at, weight)  # [HEIGHT, 16]
        tl.inline_asm_elementwise(PREFETCH, "=r,l", [pointers], tl.int32, is_pure=False, pack=1)


@triton.jit
def start_next_and_wait():
    """Let the next kernel start once all programs of this one have made this call, and wait for the previous kernel.

    Before this call, a kernel must write nothing, and may read only data that no kernel of a step writes, such as
    weights.
    """
    if CAN_START_EARLY:
        gdc_launch_dependents()
        gdc_wait()
