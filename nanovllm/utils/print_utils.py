"""vLLM's module `vllm.utils.print_utils`."""

from ..missing_names import import_or_raise


def print_embeddings(embeds: list[float], prefix: str = "Embeddings") -> None:
    """Print the first numbers of an embedding, and its size."""
    first = ", ".join(map(str, embeds[:4]))
    print(f"{prefix}: [{first}{', ...' if len(embeds) > 4 else ''}] (size={len(embeds)})")


__all__ = ["print_embeddings"]
__getattr__ = import_or_raise(__name__)
