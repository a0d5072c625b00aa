"""Measurements on a GPU: `python -m stages.bench.gpu`, or `make gpu`, in parts of at most nine minutes.

__main__.py gives each part a process, parts.py and engine.py have the parts, checklist.py has part 0, and common.py the
reports. Claims are numbered as in claims.ipynb. Parts 1 to 5 need torch, safetensors, sentencepiece, transformers, tqdm
and pytest; the others need the package too, without pydantic. With `--device cpu --tiny` a part runs in seconds, on a
tiny model, to test it.
"""
