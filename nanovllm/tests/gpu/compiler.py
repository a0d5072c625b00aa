"""Triton's compiler without a GPU: what kernels need on a GPU, and which variants of them requests launch.

    python -m nanovllm.tests.gpu.compiler resources 90 bfloat16 8 4 128 16

compiles all kernels for compute capability 9.0, with 8 KV heads, 4 query heads each, head_dim 128 and blocks of 16.
Instead of running, each launch is compiled to machine code. If that fits, it prints a line of JSON: {"kernel":
"attend_split", "shared": 72192, "registers": 128, "stack": 0, "wide_loads": 50, "in_flight": 3, "waits": true,
"prefetches": false, "bits": null}. "shared" is shared memory in bytes, "stack" is what didn't fit into a thread's
registers, in bytes, "wide_loads" counts instructions that read 16 bytes of the GPU's memory per thread, "in_flight" is
how many loads for later tiles may run while a program computes, "waits" says whether the kernel starts early and waits
for its inputs, and "prefetches" whether it reads weights ahead while it waits. "bits" is the size of a weight's number.

    python -m nanovllm.tests.gpu.compiler products 89 float16

does so for gemm() alone, with a weight in each format.

    python -m nanovllm.tests.gpu.compiler prefill page

writes the table of prefill attention in docs/gpu.md: what an H100 could reach with the compiled code, on paper. Without
`page`, it prints the table.

    python -m nanovllm.tests.gpu.compiler variants CHECKPOINT bfloat16 8

serves requests with engines of 8 rows, and prints each kernel variant that requests launch but the engine's start did
not, because such a request would wait for the compiler. Kernels only record their launches; their plain versions
compute the results.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import OutOfResources
from triton.runtime.jit import JITFunction

from ...backends.gpu import early_start
from ...backends.gpu.backend import TritonBackend
from ...backends.gpu.inputs import SAMPLING_FIELDS, allocate_fields, field_views, sampling_params
from ...backends.gpu.ops import PLAIN, Ops, triton_ops
from ...backends.gpu.plain import NormBefore, PrefillMetadata
from ...backends.gpu.tiles import (
    MAX_SPLITS,
    PREFILL_ROWS,
    ROW_TILES,
    DecodeWorkspace,
    SamplingWorkspace,
)
from ...llm import LLM
from ...quantization import Format, QuantizedLinear
from ...requests.sampling_params import SamplingParams
from ..testing.engines import model_runner
from .pools import KernelShape, as_stored, decodes_of

# KiB of shared memory for a program: T4; A100; RTX 3090; L4 and RTX 4090; H100 and H200; RTX 5090
SHARED_MEMORY = {75: 64, 80: 163, 86: 99, 89: 99, 90: 227, 120: 99}
WIDE_LOAD = r"ld\.global\S*\.v4\.b32|cp\.async\.cg\.shared\.global"
OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")
POINTERS = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.float8_e4m3fn: "*fp8e4nv",
}


class Variant(NamedTuple):
    """Everything that a kernel's machine code depends on. Launches of equal variants share it."""

    signature: dict[str, str]  # each argument's type
    constants: dict[str, Any]
    attributes: dict[tuple[int], list[list[Any]]]  # by argument index: whether 16 divides it
    options: dict[str, int | bool]


def variant_of(kernel: JITFunction, arguments: tuple[Any, ...], named: dict[str, Any]) -> Variant:
    """Return the variant that Triton would compile for a launch."""
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
    return Variant(signature, constants, attributes, options)


# Resources


def compile_launch(
    capability: int, kernel: JITFunction, *arguments: Any, grid: Any, warmup: bool, **named: Any
) -> None:
    """Replace kernel[grid](...): compile the kernel and print what it needs, or raise OutOfResources as a GPU would."""
    signature, constants, attributes, options = variant_of(kernel, arguments, named)
    source, target = ASTSource(kernel, signature, constants, attributes), GPUTarget("cuda", capability, 32)
    compiled = triton.compile(source, target=target, options=options)
    if compiled.metadata.shared > (limit := SHARED_MEMORY[capability] << 10):
        raise OutOfResources(compiled.metadata.shared, limit, "shared memory")
    registers, stack = count_registers(compiled.asm["cubin"])
    result = {"kernel": kernel.__name__, "shared": compiled.metadata.shared, "registers": registers, "stack": stack}
    result["wide_loads"] = len(re.findall(WIDE_LOAD, compiled.asm["ptx"]))
    waits = re.findall(r"ttg\.async_wait .*num = (\d+)", compiled.asm["ttgir"])
    result["in_flight"] = max(map(int, waits), default=0)
    result["waits"] = "griddepcontrol.wait" in compiled.asm["ptx"]
    result["prefetches"] = "prefetch.global.L2" in compiled.asm["ptx"].partition("griddepcontrol.wait")[0]
    result["bits"] = constants.get("BITS")
    print(json.dumps(result), flush=True)


def cuobjdump(cubin: bytes, option: str) -> str:
    """Return what cuobjdump prints about machine code. It comes with Triton."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.cubin")
        file.write_bytes(cubin)
        command = [triton.knobs.nvidia.cuobjdump.path, option, file]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def count_registers(cubin: bytes) -> tuple[int, int]:
    """Return a thread's registers, and the bytes that didn't fit into them."""
    usage = cuobjdump(cubin, "-res-usage")
    return int(re.search(r"REG:(\d+)", usage)[1]), int(re.search(r"STACK:(\d+)", usage)[1])


def launch_all(shape: KernelShape) -> None:
    """Launch every kernel, for 4 rows where it takes any number. For a pool in 8 bits, launch those that use it."""
    ops, dtype, num_heads, head_dim = triton_ops(), shape.dtype, shape.num_kv_heads * shape.group, shape.head_dim
    pool = torch.empty(3, 2, 2, shape.block_size, shape.num_kv_heads, head_dim, dtype=dtype)
    blocks = as_stored(pool, shape.kv_cache_dtype)
    qkv = torch.empty(4, num_heads + 2 * shape.num_kv_heads, head_dim, dtype=dtype)
    q, out = torch.empty(2, 4, num_heads, head_dim, dtype=dtype)
    tables, lengths = torch.zeros(4, 8, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    starts, tiles = torch.zeros(5, dtype=torch.int32), torch.zeros(3, 2, dtype=torch.int32)
    angles, weight = torch.empty(100, head_dim, dtype=dtype), torch.empty(head_dim, dtype=dtype)
    x, numbers = torch.empty(4, 4096, dtype=dtype), torch.zeros(4, dtype=torch.int64)
    for num_splits in (1, 33, MAX_SPLITS):
        workspace = DecodeWorkspace(4, num_heads, head_dim, num_splits, "cpu")
        ops.paged_decode(q, blocks, 1, decodes_of(tables, lengths, workspace), out)
    for rows in PREFILL_ROWS[: 1 if dtype == torch.float32 else 2]:
        with suppress(OutOfResources):  # an engine takes the rows that fit
            ops.paged_prefill(q, blocks, 1, PrefillMetadata(tables, starts, lengths, tiles, rows), out)
    for norm in (weight, None):
        ops.rotate_and_write(qkv, angles, angles, numbers, numbers, blocks, 1, norm, norm, 1e-5, q)
    if shape.kv_cache_dtype != "auto":
        return
    ops.embed(numbers, numbers, torch.empty(100, 4096, dtype=dtype), x)
    for residual in (x, None):
        ops.add_rms_norm(x, residual, x[0], 1e-5, x)
    ops.gemv(x[:1], torch.empty(6144, 4096, dtype=dtype), None, torch.empty(1, 6144, dtype=dtype))
    norm = NormBefore(x[:1], x[:1], x[0], 1e-5)
    ops.gemv(x[:1], torch.empty(6144, 4096, dtype=dtype), None, torch.empty(1, 6144, dtype=dtype), norm)
    ops.gated_gemv(x[:1], torch.empty(6144, 4096, dtype=dtype), None, torch.empty(1, 3072, dtype=dtype), norm)
    down = torch.empty(4096, 11_008, dtype=dtype)
    ops.gemv(down[:1], down, None, torch.empty(1, 4096, dtype=dtype))
    ops.gated_gemv(x[:1], torch.empty(6144, 4096, dtype=dtype), None, torch.empty(1, 3072, dtype=dtype))
    ops.silu_and_mul(x, x.view(8, 2048)[:4])
    for outputs in (1024, 2048, 6144):
        layer = torch.nn.Linear(4096, outputs, bias=False, dtype=dtype)
        for rows in ROW_TILES[1:]:  # gemv() multiplies one row
            ops.gemm(x.new_empty(rows, 4096), layer, x.new_empty(rows, outputs))
    launch_products(ops, dtype, (Format.INT8, Format.INT5, Format.INT4_HALVES_K, Format.INT5_K, Format.INT6_K))
    logits = torch.empty(4, 151_936, dtype=dtype)
    params = sampling_params(field_views(allocate_fields(SAMPLING_FIELDS, 4, "cpu"), SAMPLING_FIELDS), 4)
    ops.sample_rows(logits, params, SamplingWorkspace(*logits.shape, "cpu"), numbers, torch.empty(4, 2))


def launch_products(ops: Ops, dtype: torch.dtype, formats: Iterable[Format], tiles: Sequence[int] = ROW_TILES) -> None:
    """Launch gemm() for weights in these formats, and for these numbers of rows."""
    for format in formats:
        linear = torch.nn.Linear(4096, 6144, bias=False, device="meta")
        layer = QuantizedLinear(linear, format).to_empty(device="cpu")
        for rows in tiles:
            ops.gemm(torch.empty(rows, 4096, dtype=dtype), layer, torch.empty(rows, 6144, dtype=dtype))


def compile_for(capability: str) -> None:
    """Let each launch compile its kernel for a GPU."""
    early_start.CAN_START_EARLY = triton.language.constexpr(int(capability) >= 90)
    JITFunction.run = lambda *arguments, **named: compile_launch(int(capability), *arguments, **named)


def print_resources(capability: str, dtype: str, *rest: str) -> None:
    sizes, kv_cache_dtype = rest[:4], rest[4:]  # the latter may be missing
    compile_for(capability)
    launch_all(KernelShape(*map(int, sizes), getattr(torch, dtype), *kv_cache_dtype))


def print_products(capability: str, dtype: str) -> None:
    """Print the resources of gemm() for each format, with as many rows as a program takes."""
    compile_for(capability)
    launch_products(triton_ops(), getattr(torch, dtype), Format, ROW_TILES[-1:])


# Prefill on paper

PAGE = Path(__file__).resolve().parents[2] / "docs" / "gpu.md"
PREFILL_BLOCK = re.compile(r"(?<=<!-- figures: prefill -->\n).*?(?=<!-- /figures -->)", re.DOTALL)
HEAD_DIMS = 64, 128
GROUP = 4  # query heads per KV head
# Of an H100: multiprocessors, their clock, and what each does in a cycle
NUM_SMS, CLOCK, OPERATIONS, EXPONENTIALS, INSTRUCTIONS = 132, 1.83e9, 4096, 16, 4
REGISTERS, SM_SHARED_MEMORY, RESERVED = 65_536, 228 << 10, 1 << 10  # of a multiprocessor; the last one, by a program
CACHE_SPEED = 5.5e12  # bytes per second from the L2 cache: an assumption, which the table names


def loops_of(code: str) -> list[list[str]]:
    """Return the instructions of each loop of a kernel, in the order of their ends.

    >>> loops_of("/*0000*/ MOV R1 ; /*0010*/ IADD3 R2 ; /*0020*/ @P0 BRA 0x10 ; /*0030*/ EXIT ;")
    [['IADD3 R2', '@P0 BRA 0x10']]
    """
    code = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;", code)
    instructions = {int(address, 16): text for address, text in code}
    loops = []
    for end, text in instructions.items():
        jump = re.search(r"\bBRA\b.*?0x([0-9a-f]+)", text)
        if jump and (start := int(jump[1], 16)) < end:
            loops.append([each for address, each in instructions.items() if start <= address <= end])
    return loops


class PrefillCode(NamedTuple):
    """attend_queries as compiled for an H100."""

    head_dim: int
    rows: int  # of a program
    tile: int  # keys at a time
    num_warps: int
    num_stages: int
    registers: int
    shared: int  # bytes
    num_instructions: int  # of the loop over tiles without a mask, per warp

    @property
    def programs(self) -> int:
        """Return how many programs fit into a multiprocessor."""
        threads = 32 * self.num_warps
        by_registers = REGISTERS // (-(-self.registers // 8) * 8 * threads)
        return min(by_registers, SM_SHARED_MEMORY // (self.shared + RESERVED))

    def line(self) -> str:
        """Return the table's line. Cycles are of a multiprocessor, per tile."""
        scores = self.rows * self.tile
        products = 4 * scores * self.head_dim / OPERATIONS
        others = max(scores / EXPONENTIALS, self.num_instructions * self.num_warps / INSTRUCTIONS)
        per_byte = 4 * scores * self.head_dim / (2 * self.tile * self.head_dim * 2)  # keys and values have 2 bytes each
        by_cache = per_byte * CACHE_SPEED / (NUM_SMS * CLOCK * OPERATIONS)
        alone, overlapped = products / (products + others), min(1.0, products / others, by_cache)
        cells = [self.head_dim, self.rows, self.tile, self.num_warps, self.num_stages, self.registers]
        cells += [f"{self.shared / 1024:.0f}", self.programs, f"{per_byte:.0f}", f"{products:.0f}", f"{others:.0f}"]
        return f"| {' | '.join(map(str, cells))} | {min(alone, by_cache):.0%} to {overlapped:.0%} |\n"


def prefill_table() -> str:
    """Compile attend_queries for an H100, and return the table."""
    codes: list[PrefillCode] = []

    def record(kernel: JITFunction, *arguments: Any, grid: Any, warmup: bool, **named: Any) -> None:
        signature, constants, attributes, options = variant_of(kernel, arguments, named)
        target = GPUTarget("cuda", 90, 32)
        compiled = triton.compile(ASTSource(kernel, signature, constants, attributes), target=target, options=options)
        cubin = compiled.asm["cubin"]
        registers, stack = count_registers(cubin)
        assert stack == 0 and compiled.metadata.shared <= SHARED_MEMORY[90] << 10, (stack, compiled.metadata.shared)
        loops = [loop for loop in loops_of(cuobjdump(cubin, "-sass")) if any("HGMMA" in each for each in loop)]
        assert len(loops) == 2, "one for the tiles without a mask, and one for the others"
        sizes = constants["HEAD_DIM"], constants["ROWS"], constants["TILE"], named["num_warps"], named["num_stages"]
        codes.append(PrefillCode(*sizes, registers, compiled.metadata.shared, min(map(len, loops))))

    early_start.CAN_START_EARLY = triton.language.constexpr(True)
    JITFunction.run = record
    for head_dim in HEAD_DIMS:
        q = torch.empty(4, 8 * GROUP, head_dim, dtype=torch.bfloat16)
        blocks = torch.empty(3, 2, 2, 16, 8, head_dim, dtype=torch.bfloat16)
        numbers, tables, tiles = (torch.zeros(*size, dtype=torch.int32) for size in ((4,), (4, 8), (3, 2)))
        for rows in PREFILL_ROWS:
            triton_ops().paged_prefill(q, blocks, 1, PrefillMetadata(tables, numbers, numbers, tiles, rows), q)
    names = "head_dim", "rows", "keys", "warps", "stages", "registers", "KiB", "programs", "operations a byte"
    head = [*names, "tensor cores", "the rest", "of the peak"]
    lines = [f"| {' | '.join(head)} |\n{'|---' * len(head)}|\n", *(code.line() for code in codes)]
    made = f"triton {triton.__version__} for compute capability 9.0, in bfloat16, with {GROUP} query heads per KV head"
    cache = f"The L2 cache is assumed to deliver {CACHE_SPEED / 1e12:g} TB/s."
    return f"{''.join(lines)}\nCompiled by {made}. {cache}\n"


def print_prefill(target: str = "screen") -> None:
    if target == "page":
        text = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(PREFILL_BLOCK.sub(lambda _: prefill_table(), text), encoding="utf-8")
    else:
        print(prefill_table(), end="")


# Variants

PROMPTS: list[Any] = [[5, 6, 7] * 4, [5], [8, 9], [4] * 20, [7] * 3]
PARAMS: list[dict[str, Any]] = [
    {},
    {"logit_bias": {7: 5.0}},
    {"temperature": 0.8, "top_k": 5, "seed": 1},
    {"logprobs": 2, "n": 3},
]


class LaunchLog:
    """The variants that kernels have been launched with."""

    def __init__(self) -> None:
        self.variants: dict[str, None] = {}  # in the order of their first launch

    def ops(self) -> Ops:
        return Ops(*(self._both(launch, compute) for launch, compute in zip(triton_ops(), PLAIN, strict=True)))

    def _both(self, launch: Any, compute: Any) -> Any:
        def run(*arguments: Any) -> None:
            launch(*arguments)
            compute(*arguments)

        return run

    def record(self, kernel: JITFunction, *arguments: Any, grid: Any, warmup: bool, **named: Any) -> None:
        """Replace kernel[grid](...)."""
        self.variants[f"{kernel.__name__} {variant_of(kernel, arguments, named)}"] = None


def run_again(step: Any, shares_memory: bool = True) -> Any:
    """Replace a graph with a function that runs the step again."""
    step()
    return step


SECONDS = count(0, -1)


def ever_faster(step: Any) -> float:
    """Replace the timer so that the last candidate, which is the kernel, always wins."""
    step()
    return float(next(SECONDS))


def print_variants(checkpoint: str, dtype: str, max_rows: str) -> None:
    log = LaunchLog()
    JITFunction.run = lambda kernel, *arguments, **named: log.record(kernel, *arguments, **named)
    options: dict[str, Any] = {"dtype": dtype, "attention_backend": "torch", "max_num_seqs": int(max_rows)}
    for has_graphs in (True, False):
        llm = LLM(checkpoint, kv_cache_tokens=512, block_size=4, max_num_batched_tokens=8, **options)
        engine, runner = llm.llm_engine, model_runner(llm.llm_engine)
        parts = runner.model, engine.kv_cache, engine.max_model_len
        capture = run_again if has_graphs else None
        log.variants.clear()
        runner.backend = TritonBackend(*parts, log.ops(), capture, int(max_rows), ever_faster, progress=False)
        at_start = dict(log.variants)
        for params in PARAMS:
            defaults: dict[str, Any] = {"temperature": 0, "max_tokens": 9, "ignore_eos": True}
            llm.generate(PROMPTS, SamplingParams(**defaults | params))
        assert at_start and runner.num_steps > 0
        for variant in log.variants:
            if variant not in at_start:
                print(variant)


if __name__ == "__main__":
    commands: dict[str, Callable[..., None]] = {"resources": print_resources, "products": print_products}
    commands |= {"prefill": print_prefill, "variants": print_variants}
    commands[sys.argv[1]](*sys.argv[2:])
