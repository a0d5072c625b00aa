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
    tokenizer = HFTokenizer(add_tokens(file.build(config), config), config)
    try_out(tokenizer, file.path)
    return tokenizer


def try_out(tokenizer: HFTokenizer, path: Path) -> None:
    """Raise ValueError if the file is read, but no text goes through its parts."""
    try:
        tokenizer.decode([*tokenizer.anchor, *tokenizer.encode("a b")])
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of the library is no Exception
        raise ValueError(f"{path}: its parts do not fit together: {error}") from None
