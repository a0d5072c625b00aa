"""How a step is computed: torch/ (plain operations), cpu/ (Numba) and gpu/ (Triton, CUDA graphs).

torch/backend.py has the interface of the three, choice.py chooses one when an engine starts. Start in torch/.
"""
