"""The fast path on a GPU: Triton kernels, and CUDA graphs of decode steps. The engine also runs without them.

Kernels, in reading order:

plain.py              each operation in plain PyTorch: what each kernel computes
ops.py                the operations as one table
tiles.py              how work is divided among programs, and the memory for partial results
early_start.py        lets a kernel start before the previous one has ended
attention_kernels.py  decode with split contexts, then prefill; introduces Triton
layer_kernels.py      the rest of a layer: norm, activation, rotation with the write to the pool, gemv
sampling_kernels.py   one token for each row of logits, with any sampling parameters

The steps built from them:

attention.py          the attention backend, for any mix of prefills and decodes
capture.py            records the launches of a step as a CUDA graph
model.py              a layer as four matmuls and five kernels; picks gemv or the library's matmul, whichever is faster
inputs.py             a decode step's inputs at fixed addresses, prepared while the previous step runs
graphs.py             decode steps as CUDA graphs
sampler.py            the host's part of sampling: one copy sends the parameters, another returns the tokens
backend.py            the Backend that ties these together, and the choice of whether to use it

early_start.py and the three files of kernels import triton, so import them only where it is installed.
"""
