"""The fast path on a GPU: kernels in Triton, and decode steps as CUDA graphs. The engine runs without any of them.

How a kernel is written, in reading order:

plain.py           each kernel in plain torch: what it computes
split.py           how the work is split among programs
decode.py          attention of one query a row, the context split among programs; Triton is explained here
tile.py            a tile of keys added to a softmax under way
prefill.py         attention of whole prompts, or chunks of them
rope_write.py      norm of heads, rotation, and the write of keys and values to the pool
norm.py activation.py gemv.py

The kernel files import triton, so import them only where it is installed.
"""
