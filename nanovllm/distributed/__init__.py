"""Tensor parallelism: one model on several ranks. Start with rank_group.py, then layers.py.

followers.py starts and ends the other ranks, and agreed_tier.py keeps their tiers together. vLLM's package of this name
also has a function that cleans up after a script.
"""

import gc

import torch


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Free the memory of engines that the script has deleted. There is no Ray to shut down."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
