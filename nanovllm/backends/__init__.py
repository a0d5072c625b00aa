"""Three ways to compute a step: torch/ (plain PyTorch), cpu/ (Numba kernels) and gpu/ (Triton kernels, CUDA graphs).

torch/backend.py defines the interface that all three implement, and choice.py picks one when an engine starts. Start
reading in torch/.
"""
