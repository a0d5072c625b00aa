"""The scripts here are vLLM's users': test_scripts.py runs them, changed as their users would. pytest imports none."""

collect_ignore_glob = ["*.py"]
