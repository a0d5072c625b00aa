"""A step in plain PyTorch, on any device.

The engine runs with this folder alone, and the faster backends are tested against it. Start reading in model_runner.py.
"""
