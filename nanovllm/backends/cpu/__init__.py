"""The fast path on a CPU: kernels in Python, compiled by Numba. The engine runs without them.

Each kernel has a twin in plain PyTorch, which tests compare it with: ../../tests/cpu/plain.py.

Kernels, in reading order:

vectors.py      sixteen numbers at a time, whatever type they are stored in; pointers; exp
blocks.py       several vectors at a time, kept in registers
dot.py          some rows times some rows: the inner loop of linear layers and of scores
matmul.py       linear layers, whose weights are packed in place
elementwise.py  the rest of a layer: RMSNorm, rotary embedding, SiLU
attention.py    attention to keys and values that are read in place
likeliest.py    the likeliest token of each row
team.py         workers that share a step, and never wait for one that isn't running

The step built from them:

step.py         a step of any sequences: all layers in one call
runner.py       its caller: packs the weights, and plans each step
backend.py      the Backend that uses it, and the choice to do so
compiler.py     compiling the kernels, once per machine
"""
