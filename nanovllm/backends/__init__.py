"""How a step is computed: torch/ (plain operations), cpu/ (Numba) and gpu/ (Triton).

An engine chooses one when it starts. Start reading in torch/.
"""
