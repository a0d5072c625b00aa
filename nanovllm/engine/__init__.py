"""The core: it schedules requests and manages the memory of their keys and values.

Start with core.py, then read scheduler.py and block_manager.py.

stages/s7_cpu_offload is a minimal version of this engine.
"""
