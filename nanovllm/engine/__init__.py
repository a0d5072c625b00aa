"""The engine: stage 7's scheduler, block manager and tiers, grown up.

Start with llm_engine.py, whose step() is three calls: schedule, run, update. Nothing here imports a backend's kernels.
"""
