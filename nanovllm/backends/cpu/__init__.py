"""The fast path on a CPU: kernels in Python, compiled by Numba. The engine runs without them.

Each kernel has a twin in plain PyTorch, which tests compare it with: ../../tests/cpu/plain.py.

Kernels, in reading order:

vectors.py         sixteen numbers at a time, whatever type they are stored in; pointers; exp
blocks.py          several vectors at a time, kept in registers
dot.py             some rows times some rows: the inner loop of linear layers and of scores
matmul.py          linear layers, whose weights are packed in place
elementwise.py     the rest of a layer: RMSNorm, rotary embedding, SiLU
attention.py       attention to keys and values that are read in place
team.py            workers that share a step, and never wait for one that isn't running

The steps built from them:

decode_step.py     a decode step of at most 64 sequences: all layers in one call
step_attention.py  the attention backend for all other steps
model.py           the model for all other steps: four packed linear layers and four compiled calls per layer
sampler.py         greedy sampling
backend.py         the Backend that ties these together, and the choice to use it
compiler.py        compiling the kernels, once per machine
threads.py         Numba's threads, the same as PyTorch's
"""
