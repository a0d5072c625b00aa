"""The fast paths on a CPU: kernels in Python, which Numba compiles. The engine runs without them.

How a kernel is written, in reading order:

vectors.py         sixteen numbers at a time, whatever type they are stored in; pointers
dot.py             one stored row times several rows of x; blocks.py: what is kept in registers meanwhile
matmul.py          many rows of x times a packed weight; pairs.py: what the processor multiplies at a time
linear.py norm.py rotary.py activation.py exp.py
attention.py       keys and values are read where they lie
team.py            workers that share a step, and never wait for one that the system has given no core

A step of few rows, at most 64 sequences that decode:

few_rows.py        the weights and buffers of a model, as addresses
decode_step.py     all layers in one call; phases.py has the phases of a layer, step_parts.py the tuples

A step of many rows, and prompts:

many_rows.py       swaps submodules of the model
packed.py          linear layers whose weights are packed
layers.py          a layer: four packed linear layers, and four calls between them
step_attention.py  rotation, the write to the pool and attention in one call; plan.py: the jobs of a step
sampler.py         the likeliest token of each row

Around them:

backend.py         the Backend that takes the one path or the other
choice.py          whether an engine uses kernels, and why
entries.py         the compiled functions; compiling.py, compiler.py, cache.py: who compiles them, when, and where
threads.py         Numba's threads, the same as torch's
"""
