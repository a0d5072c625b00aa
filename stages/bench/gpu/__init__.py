"""Measurements on a GPU: `python -m stages.bench.gpu`, or `make gpu`, in nine parts of at most nine minutes.

Claims are numbered as in claims.ipynb. Parts 1 to 5 need torch, safetensors, sentencepiece, transformers, tqdm and
pytest, the others the whole package. With `--device cpu --tiny` a part runs in a second, on a tiny model, to test it.
"""
