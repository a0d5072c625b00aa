"""Random histories of the engine with faults, as many as you like: python -m nanovllm.tests.soak --steps 100000.

plans.py holds a history as data, script.py the model. history.py plays a plan and checks all invariants after each
step, and run.py plays many plans. The stages have a soak of their own without faults: python -m tests.soak.
"""
