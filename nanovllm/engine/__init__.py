"""The core: it schedules requests and manages the memory of their keys and values.

Start with core.py, then read scheduler.py and block_manager.py. Stage 7 is the same engine in its minimal form.
"""
