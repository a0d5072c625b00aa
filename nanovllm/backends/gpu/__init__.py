"""The fast path on a GPU: kernels in Triton, and decode steps as CUDA graphs. The engine runs without them.

How a kernel is written, in reading order:

plain.py           each kernel in plain torch: what it computes
split.py           how the work is split among programs
decode.py          attention of one query a row, the context split among programs; Triton is explained here
tile.py            a tile of keys added to a softmax under way
prefill.py         attention of whole prompts, or chunks of them
rope_write.py      norm of heads, rotation, and the write of keys and values to the pool
norm.py activation.py gemv.py
likeliest.py       the likeliest token of each row of logits, and its log-probability

How they make up a step:

ops.py             kernels, or their plain twins, as one table
linear.py          a linear layer of few rows: gemv or the library's matmul, as each was timed
layers.py          the model with four matmuls a layer, and five kernels between them
attention.py       the attention backend: any mixture of prompts, chunks and decodes
fields.py          numbers of several types in one copy to the device
inputs.py          inputs of a decode step at fixed addresses, prepared while the step before runs
graphs.py          CUDA graphs, for a few numbers of rows
decodes.py         decode steps as graphs, with their inputs and outputs
trial.py           a first launch of every kernel, so that no request waits for the compiler
sampler.py         sampling on the device, with one copy to the host a step
backend.py         the Backend that takes the one path or the other
choice.py          which of them an engine uses, and why

The kernel files import triton, so import them only where it is installed.
"""
