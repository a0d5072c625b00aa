"""Engines on many machines, and vLLM's name for the cleanup of a script: cleanup_dist_env_and_memory().

routing.py chooses a replica for a request, ray_data.py serves batches, ray_serve.py serves OpenAI's API.
"""

import gc
import sys

import torch

from ..missing_names import import_or_raise


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Free the memory of engines that the script has deleted. With `shutdown_ray`, disconnect from Ray."""
    if shutdown_ray and (ray := sys.modules.get("ray")):
        ray.shutdown()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


__all__ = ["cleanup_dist_env_and_memory"]
__getattr__ = import_or_raise(__name__)
