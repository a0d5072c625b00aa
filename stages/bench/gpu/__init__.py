"""What a GPU shows: `python -m stages.bench.gpu`, or `make gpu`. Each part takes at most nine minutes.

    checks.py     1: the tests marked gpu
    steps.py      2: decode steps of stages 1, 2 and 3, by batch and context; claim 10
    copies.py     3: copies between host and device, pinned and pageable, and beside computing; claim 17
    roofline.py   4: steps of 1 to 256 sequences under the roofs of this device; claim 19
    claims.py     5: claims 5, 13 and 16
    common.py     the device, a clock for it, and what a part writes

Claims are numbered as in claims.ipynb. It needs torch, safetensors, sentencepiece and tqdm (transformers brings it);
part 1 also pytest and transformers. With `--device cpu --tiny` every part runs in a second, on a tiny model: a test of
the parts themselves.
"""
