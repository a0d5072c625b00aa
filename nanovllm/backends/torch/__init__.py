"""The plain PyTorch backend, for any device.

The engine can run without the faster backends, which are tested against this one. Start reading in model_runner.py.
"""
