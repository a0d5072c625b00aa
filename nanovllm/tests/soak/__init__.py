"""Random histories of the engine with faults, as many as you like: python -m nanovllm.tests.soak --steps 100000

plans.py is a history as data, script.py the model, history.py plays a plan and checks what must hold after each step;
run.py plays many.
The stages have a soak of their own, without faults: python -m tests.soak
"""
