"""The tokenizer of a folder."""

from pathlib import Path

from .hf_tokenizer import HFTokenizer
from .sentencepiece_file import SentencepieceFile
from .tokenizer_backend import TokenizerFile, add_tokens
from .tokenizer_config import TokenizerConfig


def load_tokenizer(folder: str | Path) -> HFTokenizer | None:
    """Read tokenizer.json, or else tokenizer.model. None if the folder has neither: it serves token ids only.

    tokenizer.json wins, as in transformers: it alone says how text is cut and how added tokens match. Raises
    ValueError, naming file and entry, for a file that cannot be read.
    """
    folder = Path(folder)
    file: TokenizerFile | SentencepieceFile
    if (folder / "tokenizer.json").exists():
        file = TokenizerFile(folder / "tokenizer.json")
    elif (folder / "tokenizer.model").exists():
        file = SentencepieceFile(folder / "tokenizer.model")
    else:
        return None
    config = TokenizerConfig.from_folder(folder, file)
    return HFTokenizer(add_tokens(file.build(config), config), config)
