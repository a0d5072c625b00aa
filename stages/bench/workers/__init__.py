"""Programs that run in other engines' processes, with those engines' interpreters. They never import nanovllm.

worker.py is the process: it reads jobs and writes results. Each engine has a module with the functions that load it.
"""
