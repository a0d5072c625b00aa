"""The fast path on a GPU: Triton kernels, and CUDA graphs of decode steps. The engine also runs without them.

Kernels, in reading order:

plain.py              each operation in plain PyTorch: what each kernel computes
ops.py                a table of these operations, filled with plain functions or with kernels
tiles.py              how work is divided among programs, and the memory for partial results
early_start.py        lets a kernel start before the previous one has ended
attention_kernels.py  decode with split contexts, then prefill; introduces Triton
layer_kernels.py      the rest of a step: embedding, norm, activation, rotation with the write to the pool, and gemv,
                      a linear layer for one row
gemm_kernels.py       a linear layer for several rows, whose weight may have 8 to 4 bits
sampling_kernels.py   one token for each row of logits, with any sampling parameters

The steps built from them:

attention.py          the attention backend, for any mix of prefills and decodes
capture.py            records the launches of a step as a CUDA graph
model.py              a layer as four matmuls and five kernels; times kernels and torch's matmul to pick the faster one
inputs.py             a decode step's inputs at fixed addresses, prepared while the previous step runs
graphs.py             decode steps as CUDA graphs
sampler.py            the host's part of sampling: one copy sends the parameters, another returns the tokens
backend.py            the Backend that ties these together, and the choice between it and plain operations

early_start.py and the four *_kernels.py files import triton, so import them only where triton is installed.
"""
