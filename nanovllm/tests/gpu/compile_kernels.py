"""Compile for an H200 what the kernels' callers launch, without a GPU.

    python -m nanovllm.tests.gpu.compile_kernels bfloat16 8 4 128 16

for 8 KV heads, 4 query heads each, head_dim 128, blocks of 16. Each launch is compiled to machine code in place of a
run. A line of JSON for each: {"kernel": "attend_split", "shared": 72192, "registers": 128, "stack": 0, "wide_loads":
50}, where shared memory is in bytes, stack is what did not fit into the registers of a thread, in bytes, and wide loads
are instructions that read 16 bytes of the GPU's memory for a thread.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from ...backends.gpu.activation import silu_and_mul
from ...backends.gpu.decode import paged_decode
from ...backends.gpu.gemv import gated_gemv, gemv
from ...backends.gpu.likeliest import find_likeliest
from ...backends.gpu.norm import add_rms_norm
from ...backends.gpu.prefill import paged_prefill
from ...backends.gpu.rope_write import rotate_and_write
from ...backends.gpu.split import MAX_GEMV_ROWS, MAX_SPLITS, DecodeRoom, LikeliestRoom
from .pools import Shape

H200 = GPUTarget("cuda", 90, 32)
WIDE_LOAD = r"ld\.global\S*\.v4\.b32|cp\.async\.cg\.shared\.global"
OPTIONS = ("num_warps", "num_stages")
POINTERS = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


class Form(NamedTuple):
    """What a kernel is compiled for: launches of equal forms share their machine code."""

    signature: dict[str, str]  # each argument's type
    constants: dict[str, Any]
    attributes: dict[tuple[int], list[list[Any]]]  # by the argument's number: what 16 divides
    options: dict[str, int]


def form_of(kernel: JITFunction, arguments: tuple[Any, ...], named: dict[str, Any]) -> Form:
    """What Triton finds out about arguments at a launch."""
    options = {name: named[name] for name in OPTIONS if name in named}
    values = dict(zip(kernel.arg_names, arguments, strict=False)) | named
    signature, constants, attributes = {}, {}, {}
    for i, parameter in enumerate(kernel.params):
        value = values[parameter.name]
        is_special = not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (is_special and type(value) is int and value == 1):
            signature[parameter.name], constants[parameter.name] = "constexpr", value
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        else:
            is_pointer = isinstance(value, Tensor)
            signature[parameter.name] = POINTERS[value.dtype] if is_pointer else "i32" if value < 2**31 else "i64"
            if is_special and (value.data_ptr() if is_pointer else value) % 16 == 0:
                attributes[(i,)] = [["tt.divisibility", 16]]
    return Form(signature, constants, attributes, options)


def compile_launch(kernel: JITFunction, *arguments: Any, grid: Any, warmup: bool, **named: Any) -> None:
    """In place of kernel[grid](...)."""
    signature, constants, attributes, options = form_of(kernel, arguments, named)
    compiled = triton.compile(ASTSource(kernel, signature, constants, attributes), target=H200, options=options)
    registers, stack = count_registers(compiled.asm["cubin"])
    told = {"kernel": kernel.__name__, "shared": compiled.metadata.shared, "registers": registers, "stack": stack}
    told["wide_loads"] = len(re.findall(WIDE_LOAD, compiled.asm["ptx"]))
    print(json.dumps(told), flush=True)


def count_registers(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread, and bytes that did not fit. cuobjdump comes with Triton."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.cubin")
        file.write_bytes(cubin)
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return int(re.search(r"REG:(\d+)", usage)[1]), int(re.search(r"STACK:(\d+)", usage)[1])


def launch_all(shape: Shape) -> None:
    """Every kernel, as for 4 rows."""
    dtype, num_heads, head_dim = shape.dtype, shape.num_kv_heads * shape.group, shape.head_dim
    blocks = torch.empty(3, 2, 2, shape.block_size, shape.num_kv_heads, head_dim, dtype=dtype)
    qkv = torch.empty(4, num_heads + 2 * shape.num_kv_heads, head_dim, dtype=dtype)
    q, out = torch.empty(2, 4, num_heads, head_dim, dtype=dtype)
    tables, lengths = torch.zeros(4, 8, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    starts, tiles = torch.zeros(5, dtype=torch.int32), torch.zeros(3, 2, dtype=torch.int32)
    angles, weight = torch.empty(100, head_dim, dtype=dtype), torch.empty(head_dim, dtype=dtype)
    x, numbers = torch.empty(4, 4096, dtype=dtype), torch.zeros(4, dtype=torch.int64)
    for num_splits in (1, 33, MAX_SPLITS):
        room = DecodeRoom(4, num_heads, head_dim, num_splits, "cpu")
        paged_decode(q, blocks, 1, tables, lengths, room, out)
    paged_prefill(q, blocks, 1, tables, starts, lengths, tiles, out)
    for norm in (weight, None):
        rotate_and_write(qkv, angles, angles, numbers, numbers, blocks, 1, norm, norm, 1e-5, q)
    for residual in (x, None):
        add_rms_norm(x, residual, x[0], 1e-5, x)
    for rows in range(1, MAX_GEMV_ROWS + 1):
        gemv(x[:rows], torch.empty(6144, 4096, dtype=dtype), None, torch.empty(rows, 6144, dtype=dtype))
    gated_gemv(x[:1], torch.empty(6144, 4096, dtype=dtype), None, torch.empty(1, 3072, dtype=dtype))
    silu_and_mul(x, x.view(8, 2048)[:4])
    logits = torch.empty(4, 151_936, dtype=dtype)
    find_likeliest(logits, LikeliestRoom(4, 151_936, "cpu"), torch.empty(4, 3))


if __name__ == "__main__":
    JITFunction.run = compile_launch
    num_kv_heads, group, head_dim, block_size = map(int, sys.argv[2:])
    launch_all(Shape(num_kv_heads, group, head_dim, block_size, getattr(torch, sys.argv[1])))
