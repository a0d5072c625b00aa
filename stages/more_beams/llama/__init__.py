"""The model: Llama and its close relatives. This folder is the same, byte for byte, in every stage.

    hidden = model(input_ids, positions, attend)

The caller passes the function `attend`, because the model does not know where keys and values are kept.
"""

from .config import ModelConfig
from .model import Attend, LlamaForCausalLM
from .tokenizer import StreamDecoder, Tokenizer
from .weights import load_model

__all__ = ["Attend", "LlamaForCausalLM", "ModelConfig", "StreamDecoder", "Tokenizer", "load_model"]
