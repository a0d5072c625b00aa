"""Scripts written for vLLM. test_scripts.py runs them with the changes that users would make. pytest skips them."""

collect_ignore_glob = ["*.py"]
