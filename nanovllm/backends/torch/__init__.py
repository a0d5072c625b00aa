"""A step in plain torch, on any device.

The engine runs with this folder alone, and every faster backend is compared with it. Start reading in model_runner.py.
"""
