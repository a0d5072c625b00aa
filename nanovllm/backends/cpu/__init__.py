"""The CPU backend: kernels written in Python and compiled by Numba. The engine can run without them.

Tests compare each kernel with its plain PyTorch version in ../../tests/cpu/plain.py.

Kernels, in reading order:

vectors.py         vectors of sixteen numbers, loaded from any storage type; pointers; exp
blocks.py          blocks of vectors, kept in registers
dot.py             dot products of rows: the inner loop of linear layers and of attention scores
matmul.py          linear layers, whose weights are packed in place
quantized.py       linear layers with weights in 8 or 4 bits
elementwise.py     the rest of a layer: RMSNorm, rotary embedding, SiLU
attention.py       paged attention, which reads keys and values in place
int8_attention.py  the same for keys and values in int8
likeliest.py       the likeliest token of each row
team.py            workers that share a step, and never wait for a thread that isn't running
step.py            a whole step: all layers in one call, for any mix of sequences; on ranks, half a layer in a call

Python around them, which needs no Numba:

layout.py          what both sides agree on: the numbers of a step, and the memory that they point to
runner.py          StepRunner, which packs the weights, plans each step and runs it
threads.py         helpers, the threads that take part in a step
machine_code.py    the compiled step as a function
backend.py         NumbaBackend, and CpuChoice, which decides whether to use it
compiler.py        the compiler of the kernels, which runs once per machine
"""
