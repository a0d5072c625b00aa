"""The fast path on a GPU: kernels in Triton, and CUDA graphs of decode steps. The engine runs without them.

Kernels, in reading order:

plain.py              each operation in plain torch: what a kernel computes
ops.py                the operations as one table; how work is split among programs
early_start.py        a kernel starts before the one ahead of it has ended
attention_kernels.py  decode with a split context, then prefill; explains Triton
layer_kernels.py      the rest of a layer: norm, activation, rotation and the write to the pool, gemv
sampling_kernels.py   one token for each row of logits, by any sampling parameters

The steps built from them:

attention.py          the attention backend, for any mixture of prefills and decodes
model.py              a layer as four matmuls and five kernels; gemv or the library's matmul, whichever is faster
inputs.py             a decode step's inputs at fixed addresses, prepared while the previous step runs
graphs.py             decode steps as CUDA graphs
sampler.py            what the host does for it: parameters there, tokens back, one copy each
backend.py            the Backend that ties these together, and the choice to use it

early_start.py and the three files of kernels import triton, so import them only where it is installed.
"""
