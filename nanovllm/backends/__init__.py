"""The ways to compute a step: torch/ (plain operations), cpu/ (Numba) or gpu/ (Triton and CUDA graphs).

torch/backend.py defines the interface that all three implement, and choice.py picks one when an engine starts. Start
reading in torch/.
"""
