"""Tensor parallelism: one model on several ranks. Start with rank_group.py, then layers.py.

followers.py starts and stops the other ranks. cleanup_dist_env_and_memory() is here because scripts import it from
vLLM's package of the same name.
"""

import gc

import torch


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Free the memory of engines that the script has deleted. `shutdown_ray` has no effect: no engine uses Ray."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
