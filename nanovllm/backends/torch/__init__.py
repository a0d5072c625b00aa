"""A step in plain torch, on any device. The engine runs with this folder alone; faster backends are compared with it.

Start reading in model_runner.py.
"""
