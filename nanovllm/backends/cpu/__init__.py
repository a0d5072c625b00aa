"""The fast paths on a CPU: kernels in Python, which Numba compiles. The engine runs without any of them.

gpu/ has those of a GPU, in Triton.

How a kernel is written, in reading order:

vectors.py         sixteen numbers at a time, whatever type they are stored in; pointers
dot.py             one stored row times several rows of x; blocks.py: what is kept in registers meanwhile
matmul.py          many rows of x times a packed weight; pairs.py: what the processor multiplies at a time
linear.py norm.py rotary.py activation.py exp.py
attention.py       keys and values are read where they lie
team.py            workers that share a step, and never wait for one that the system has given no core

A step of few rows, at most 64 sequences that decode:

few_rows.py        a model's weights and room, as addresses
decode_step.py     all layers in one call; phases.py has the phases of a layer, step_parts.py the tuples

A step of many rows, and prompts:

many_rows.py       what is swapped into the model
packed.py          linear layers whose weights are packed
layers.py          a layer: four packed linear layers, and four calls between them
step_attention.py  the attention backend: rotation, the write to the pool and attention in one call
sampler.py         the likeliest token of each row

Around them:

runner.py          the ModelRunner that takes the one path or the other
choice.py          what an engine computes with, and why; options.py: attention_backend and enforce_eager
entries.py         what is compiled; compiling.py, compiler.py, cache.py: by whom, when, and where it is kept
threads.py         Numba's threads, the same as torch's
"""
