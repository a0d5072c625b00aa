"""The engine: stage 7 grown up, one class per concept.

Start reading at llm_engine.py: a step is schedule (scheduler.py), launch (executor.py) and update.
"""
