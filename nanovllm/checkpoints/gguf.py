"""GGUF, llama.cpp's format: the metadata, the tokenizer and the tensors of a model in one file.

unpack() writes a folder that the loaders understand: config.json, the tokenizer, a table of the tensors and a link to
the GGUF file. GgufTensors reads one tensor at a time through the link. llama.cpp's gguf package knows the types of
tensors and dequantizes them, but its reader takes seconds, because it makes several arrays for each token of the
vocabulary. So HeaderReader reads the metadata and the list of tensors instead.
"""

import json
import math
import mmap
import os
import re
import struct
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from functools import cache
from hashlib import blake2b
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing
from torch import Tensor

from ..llama.config import RopeScaling
from ..llama.model import rope_frequencies
from ..quantization import Format, Integers, rows_at_a_time
from .entries import Entries
from .tokenizer_files import QWEN2_PATTERN, derive_merges, llama_bpe

LINK_NAME, TABLE_NAME = "model.gguf", "model.gguf.json"  # of the folder's link and its table of tensors
FLOAT_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
ROWS_AT_A_TIME = 1024  # rows that are dequantized at a time, so that only one copy of a large tensor is in memory


class Stored(NamedTuple):
    """A tensor in a GGUF file."""

    type: str  # such as "Q4_K"
    offset: int
    num_bytes: int
    shape: list[int]
    num_heads: int = 0  # in a q or k projection whose rows are in the order of llama.cpp's RoPE; 0 for other tensors

    def reordered(self, rows: Tensor) -> Tensor:
        """Return the rows of the tensor, or of its scales, in this engine's order.

        RoPE rotates pairs of numbers: neighbors in llama.cpp, and numbers half a head apart in this engine.
        """
        if not self.num_heads:
            return rows
        return rows.view(self.num_heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


class GgufTensors:
    """The tensors of an unpacked GGUF file, under the names that they have in safetensors."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / LINK_NAME
        self._table = {name: Stored(*row) for name, row in Entries.read(folder / TABLE_NAME).values.items()}

    def keys(self) -> list[str]:
        """Return the names of the tensors."""
        return [*self._table]

    def shapes(self) -> dict[str, list[int]]:
        """Return the shape of each tensor."""
        return {name: stored.shape for name, stored in self._table.items()}

    def get_tensor(self, name: str) -> Tensor:
        """Read a tensor and dequantize it to float32. Raise ValueError if the file has been cut short."""
        stored = self._table[name]
        data = self._read(name)
        if stored.type in FLOAT_TYPES:
            return stored.reordered(torch.from_numpy(data).view(FLOAT_TYPES[stored.type]).view(stored.shape).float())
        from gguf import GGMLQuantizationType, dequantize  # which takes a while

        tensor = torch.empty(stored.shape)
        rows = tensor.view(-1, stored.shape[-1])
        data = data.reshape(len(rows), -1)
        for i in range(0, len(rows), ROWS_AT_A_TIME):
            part = dequantize(data[i : i + ROWS_AT_A_TIME], GGMLQuantizationType[stored.type])
            rows[i : i + ROWS_AT_A_TIME] = torch.from_numpy(part)
        return stored.reordered(tensor)

    def get_slice(self, name: str) -> Tensor:
        """Return the whole tensor, to be sliced in memory."""
        return self.get_tensor(name)

    def format(self, name: str) -> Format | None:
        """Return the Format that represents a tensor exactly, or None. Only matrices have one."""
        stored = self._table[name]
        return EXACT_TYPES[stored.type].format if stored.type in EXACT_TYPES and len(stored.shape) == 2 else None

    def is_quantized(self, name: str) -> bool:
        """Return whether a tensor is stored in integers, whether or not it has a Format."""
        return self._table[name].type not in FLOAT_TYPES

    def integers(self, name: str) -> Iterator[Integers]:
        """Yield a tensor that has a Format, some rows at a time. Raise ValueError if the file has been cut short."""
        stored = self._table[name]
        _, block_bytes, unpack_blocks = EXACT_TYPES[stored.type]
        data = self._read(name).reshape(stored.shape[0], -1)
        per_row = data.shape[1] // block_bytes

        def to_rows(blocks: Any) -> Tensor:
            return stored.reordered(torch.as_tensor(blocks.reshape(-1, per_row * blocks[0].size)))

        each = len(data) if stored.num_heads else rows_at_a_time(stored.shape[1])
        for rows in np.split(data, range(each, len(data), each)):
            yield Integers(*unpack_blocks(rows.reshape(-1, block_bytes))).map(to_rows)

    def _read(self, name: str) -> np.ndarray:
        stored = self._table[name]
        data = np.fromfile(self._path, np.uint8, stored.num_bytes, offset=stored.offset)
        if len(data) < stored.num_bytes:
            raise ValueError(f"{self._path}: tensor {name} has {len(data)} of its {stored.num_bytes} bytes")
        return data


def stored_tensors(folder: Path) -> dict[str, Stored]:
    """Return the tensors of a GGUF file by their names in safetensors. Return {} if the folder has no such file."""
    return {name: Stored(*row) for name, row in Entries.read_if_exists(folder / TABLE_NAME).values.items()}


def tensor_types(folder: Path) -> dict[str, int]:
    """Return the number of tensors of each type, most frequent first. Return {} if the folder has no GGUF file."""
    return dict(Counter(stored.type for stored in stored_tensors(folder).values()).most_common())


def unpack(path: Path, sampling: Mapping[str, float] | None = None) -> Path:
    """Return the folder of a GGUF file in the user's cache. Write the folder if the file is new or has changed.

    `sampling` becomes its generation_config.json, which a GGUF file doesn't have.

    Raise ValueError with one line if the file is damaged or not supported, or if the folder cannot be written.
    """
    if find_spec("gguf") is None:
        raise ValueError(f"{path} is a GGUF file, which needs the gguf package: pip install 'gguf>=0.17'")
    status = path.stat()
    identity = f"{path.resolve()} {status.st_size} {status.st_mtime_ns} {sampling or ''}".encode()
    name = f"{path.stem}-{blake2b(identity + Path(__file__).read_bytes(), digest_size=8).hexdigest()}"
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nanovllm/gguf" / name
    if folder.exists():
        return folder
    files = files_to_write(path)
    if sampling:
        files["generation_config.json"] = json.dumps(sampling)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as parent:
            new_folder = Path(parent, "new")
            new_folder.mkdir()
            for file_name, text in files.items():
                (new_folder / file_name).write_text(text, encoding="utf-8")
            (new_folder / LINK_NAME).symlink_to(path.resolve())
            new_folder.rename(folder)
    except OSError as error:
        if not folder.exists():  # otherwise another process has just written it
            raise ValueError(
                f"{folder.parent} cannot be written ({error.strerror}): set XDG_CACHE_HOME to another folder"
            ) from None
    return folder


def files_to_write(path: Path) -> dict[str, str]:
    """Return the text of each file that unpack() writes for a GGUF file, by file name."""
    metadata, tensors = read_header(path)
    architecture = metadata.text("general.architecture")
    if architecture not in ARCHITECTURES:
        raise metadata.error("general.architecture", f"one of {', '.join(ARCHITECTURES)}")
    if metadata.integer("split.count", 1, minimum=0) > 1:
        raise ValueError(f"{path} is one of several parts: merge them with llama-gguf-split --merge")
    if EMBEDDING not in tensors:
        raise ValueError(f"{path}: tensor {EMBEDDING} is missing")
    config = config_of(metadata, architecture, tensors)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    num_heads = heads if architecture == "llama" else {}  # of the tensors whose rows llama.cpp reorders
    table = {
        safetensors_name(name): stored._replace(num_heads=num_heads.get(name.rpartition(".")[0].rpartition(".")[2], 0))
        for name, stored in tensors.items()
        if name != ROPE_FACTORS
    }
    return {"config.json": json.dumps(config), TABLE_NAME: json.dumps(table), **tokenizer_files(metadata)}


# Types of tensors that a Format represents exactly. ggml's ggml-common.h has their layouts. Each unpack function takes
# blocks, uint8 [num_blocks, block_bytes], and returns the fields of Integers.


MINUS_MINIMA = np.array([1, -1], np.float32)  # GGUF subtracts minima


def unpack_halves(data: np.ndarray) -> np.ndarray:
    """Return the low 4 bits of all bytes, and then their high 4 bits: uint8 [..., n] -> uint8 [..., 2 * n]."""
    return np.concatenate((data & 15, data >> 4), axis=-1)


def unpack_quarters(data: np.ndarray) -> np.ndarray:
    """Return the lowest two bits of bytes, then the next two, and so on: uint8 [..., 4 * n]."""
    return np.concatenate([data >> np.uint8(shift) & 3 for shift in (0, 2, 4, 6)], axis=-1)


def unpack_bits(data: np.ndarray) -> np.ndarray:
    """Return the bits of bytes, from the lowest of the first one on: uint8 [blocks, 8 * n]."""
    return np.unpackbits(data, axis=1, bitorder="little")


def read_float16(data: np.ndarray) -> np.ndarray:
    """Return float16 numbers, each given as two bytes, in float32: uint8 [..., 2 * n] -> float32 [..., n]."""
    return np.ascontiguousarray(data).view(np.float16).astype(np.float32)


def unpack_q8_0(blocks: np.ndarray) -> tuple[np.ndarray, ...]:
    return blocks[:, 2:] ^ 128, read_float16(blocks[:, :2])  # signed bytes, plus 128


def unpack_q5_0(blocks: np.ndarray) -> tuple[np.ndarray, ...]:
    q = unpack_halves(blocks[:, 6:]) | unpack_bits(blocks[:, 2:6]) << 4
    return q + np.uint8(128 - 16), read_float16(blocks[:, :2])


def unpack_q4_0(blocks: np.ndarray) -> tuple[np.ndarray, ...]:
    scales = read_float16(blocks[:, :2])
    return unpack_halves(blocks[:, 2:]), scales, -8 * scales


def unpack_q4_1(blocks: np.ndarray) -> tuple[np.ndarray, ...]:
    return unpack_halves(blocks[:, 4:]), read_float16(blocks[:, :2]), read_float16(blocks[:, 2:4])


def unpack_q5_1(blocks: np.ndarray) -> tuple[np.ndarray, ...]:
    q = unpack_halves(blocks[:, 8:]) | unpack_bits(blocks[:, 4:8]) << 4
    return q, read_float16(blocks[:, :2]), read_float16(blocks[:, 2:4])


def unpack_q2_k(blocks: np.ndarray) -> tuple[np.ndarray, ...]:
    factors = read_float16(blocks[:, 80:]) * MINUS_MINIMA
    return unpack_quarters(blocks[:, 16:80].reshape(-1, 2, 32)), blocks[:, :16] & 15, blocks[:, :16] >> 4, factors


def unpack_q3_k(blocks: np.ndarray) -> tuple[Any, ...]:
    lower = unpack_quarters(blocks[:, 32:96].reshape(-1, 2, 32))  # [blocks, 2, 128]
    upper = np.unpackbits(blocks[:, None, :32], axis=1, bitorder="little")  # [blocks, 8, 32]
    scales = unpack_halves(blocks[:, 96:104]) | unpack_quarters(blocks[:, 104:108]) << 4  # [blocks, 16]
    q = (lower | upper.reshape(lower.shape) << 2) + np.uint8(128 - 4)
    return q, scales.astype(np.int8) - np.int8(32), None, read_float16(blocks[:, 108:])


def unpack_q4_k(blocks: np.ndarray) -> tuple[np.ndarray, ...]:
    # factors [blocks, 2] are for the 6-bit scales and minima, which are packed into a, b and c [blocks, 4]
    factors, (a, b, c) = read_float16(blocks[:, :4]) * MINUS_MINIMA, blocks[:, 4:16].reshape(-1, 3, 4).swapaxes(0, 1)
    scales = np.concatenate((a & 63, (c & 15) | (a >> 2 & 48)), axis=1)  # [blocks, 8]
    minima = np.concatenate((b & 63, (c >> 4) | (b >> 2 & 48)), axis=1)
    return unpack_halves(blocks[:, 16:].reshape(-1, 4, 32)), scales, minima, factors


def unpack_q5_k(blocks: np.ndarray) -> tuple[np.ndarray, ...]:
    q, *params = unpack_q4_k(np.delete(blocks, np.s_[16:48], axis=1))  # the same, but for the fifth bits
    fifth = np.unpackbits(blocks[:, None, 16:48], axis=1, bitorder="little")  # [blocks, 8, 32]
    return q.reshape(fifth.shape) | fifth << 4, *params


def unpack_q6_k(blocks: np.ndarray) -> tuple[Any, ...]:
    lower = unpack_halves(blocks[:, :128].reshape(-1, 2, 64))  # [blocks, 2, 128]
    upper = unpack_quarters(blocks[:, 128:192].reshape(-1, 2, 32))
    q = (lower | upper << 4) + np.uint8(128 - 32)
    return q, blocks[:, 192:208].view(np.int8), None, read_float16(blocks[:, 208:])


# The numbers that four bits stand for, plus 128
IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8).view(np.uint8) ^ 128
MXFP4 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8).view(np.uint8) ^ 128


def unpack_iq4_nl(blocks: np.ndarray) -> tuple[np.ndarray, ...]:
    return IQ4[unpack_halves(blocks[:, 2:])], read_float16(blocks[:, :2])


def unpack_iq4_xs(blocks: np.ndarray) -> tuple[np.ndarray, ...]:
    lower = np.stack((blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4), 2).reshape(-1, 8)
    upper = blocks[:, 2:4, None] >> np.array([0, 2, 4, 6], np.uint8) & 3  # [blocks, 2, 4]
    scales = read_float16(blocks[:, :2]) * ((lower | upper.reshape(-1, 8) << 4).astype(np.float32) - 32)
    return IQ4[unpack_halves(blocks[:, 8:].reshape(-1, 8, 16))], scales


def unpack_mxfp4(blocks: np.ndarray) -> tuple[np.ndarray, ...]:
    half = np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - 128)  # of the scale, because MXFP4 is doubled
    return MXFP4[unpack_halves(blocks[:, 1:])], half


class ExactType(NamedTuple):
    """The Format that represents a type of tensors exactly, and the function that unpacks the type's blocks."""

    format: Format
    block_bytes: int
    unpack_blocks: Callable[[np.ndarray], tuple[Any, ...]]


EXACT_TYPES = {
    "Q8_0": ExactType(Format.INT8_GROUPS, 34, unpack_q8_0),
    "Q5_0": ExactType(Format.INT8_GROUPS, 22, unpack_q5_0),
    "Q4_0": ExactType(Format.INT4, 18, unpack_q4_0),
    "Q4_1": ExactType(Format.INT4, 20, unpack_q4_1),
    "Q4_K": ExactType(Format.INT4_K, 144, unpack_q4_k),
    "Q5_1": ExactType(Format.INT5, 24, unpack_q5_1),
    "Q5_K": ExactType(Format.INT5_K, 176, unpack_q5_k),
    "Q2_K": ExactType(Format.INT4_HALVES_K, 84, unpack_q2_k),
    "Q3_K": ExactType(Format.INT6_K, 110, unpack_q3_k),
    "Q6_K": ExactType(Format.INT6_K, 210, unpack_q6_k),
    "IQ4_NL": ExactType(Format.INT8_GROUPS, 18, unpack_iq4_nl),
    "IQ4_XS": ExactType(Format.INT8_GROUPS, 136, unpack_iq4_xs),
    "MXFP4": ExactType(Format.INT8_GROUPS, 17, unpack_mxfp4),
}


# The header

# Types of metadata values; types of numbers with their codes in the struct module
NUMBER_CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
TEXT_TYPE, ARRAY_TYPE = 8, 9


class HeaderReader:
    """A reader of the header's fields, in order. A damaged count cannot make it read past the end of the file."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.offset = 0

    def take(self, size: int) -> bytes:
        """Return the next `size` bytes. Raise ValueError if there are fewer."""
        start, self.offset = self.offset, self.offset + size
        if self.offset > len(self._data):
            raise ValueError(f"it has {len(self._data)} bytes, but its header needs more")
        return self._data[start : self.offset]

    def numbers(self, code: str, count: int = 1) -> tuple[Any, ...]:
        """Return the next `count` numbers. `code` is their type's code in the struct module."""
        return struct.unpack(f"<{count}{code}", self.take(count * struct.calcsize(f"<{code}")))

    def text(self) -> str:
        """Return the next string."""
        return self.take(*self.numbers("Q")).decode()

    def value(self, type: int) -> Any:
        """Return the next value, which has the type `type`. Raise ValueError for an unknown type."""
        if type in NUMBER_CODES:
            return self.numbers(NUMBER_CODES[type])[0]
        if type == TEXT_TYPE:
            return self.text()
        if type != ARRAY_TYPE:
            raise ValueError(f"its header has a value of the unknown type {type}")
        (item_type,), (count,) = self.numbers("I"), self.numbers("Q")
        code = NUMBER_CODES.get(item_type)
        return [*self.numbers(code, count)] if code else [self.value(item_type) for _ in range(count)]

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        """Return the next tensor's name, shape (innermost dimension first), type number and offset."""
        return self.text(), self.numbers("Q", *self.numbers("I")), *self.numbers("I"), *self.numbers("Q")


def read_header(path: Path) -> tuple[Entries, dict[str, Stored]]:
    """Return the metadata and the tensors of a GGUF file.

    Raise ValueError if the file is damaged or has tensors of an unsupported type.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            header, size = HeaderReader(data), len(data)
            if header.take(4) != b"GGUF":
                raise ValueError("it does not begin with GGUF")
            (version,), (num_tensors, num_values) = header.numbers("I"), header.numbers("Q", 2)
            if version not in (2, 3):
                raise ValueError(f"its version must be 2 or 3, got {version}")
            metadata = Entries({header.text(): header.value(*header.numbers("I")) for _ in range(num_values)}, path)
            fields = [header.tensor() for _ in range(num_tensors)]
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a complete GGUF file: {error}") from None
    alignment = metadata.integer("general.alignment", 32)
    data_start = -(-header.offset // alignment) * alignment
    tensors = {}
    for name, shape, type_number, offset in fields:
        type = tensor_type(type_number)
        if not type.is_supported:
            raise ValueError(f"{path}: tensor {name} has the unsupported type {type.name}")
        if not shape or math.prod(shape) == 0 or shape[0] % type.block_size:
            raise ValueError(f"{path}: tensor {name} of type {type.name} has the impossible shape {[*shape]}")
        num_bytes = math.prod(shape) // type.block_size * type.block_bytes
        if data_start + offset + num_bytes > size:
            raise ValueError(
                f"{path} is not a complete GGUF file: it has {size} bytes, "
                f"but tensor {name} ends at {data_start + offset + num_bytes}"
            )
        tensors[name] = Stored(type.name, data_start + offset, num_bytes, [*reversed(shape)])
    return metadata, tensors


class TensorType(NamedTuple):
    """A type of tensors. Each block of `block_size` numbers takes `block_bytes` bytes."""

    name: str
    block_size: int = 1
    block_bytes: int = 1
    is_supported: bool = False  # whether the gguf package can dequantize tensors of this type


@cache
def tensor_type(number: int) -> TensorType:
    """Return the type that has this number in GGUF files. It may be one that the gguf package does not know."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

    try:
        type = GGMLQuantizationType(number)
    except ValueError:  # a type that the installed version of the package does not know
        return TensorType(str(number))
    block_size, block_bytes = GGML_QUANT_SIZES[type]
    try:
        dequantize(np.zeros((1, block_bytes), np.uint8), type)
    except NotImplementedError:
        return TensorType(type.name)
    return TensorType(type.name, block_size, block_bytes, True)


# The configuration

ARCHITECTURES = ("llama", "qwen2", "qwen3")  # Mistral's files are "llama"
SAFETENSORS_NAMES = {  # name in GGUF: name in safetensors. In a layer, both come after the layer's number
    **{"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"},
    **{f"attn_{part}": f"self_attn.{part}_proj" for part in "qkv"},
    **{"attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"},
    **{f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
    **{"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"},
}
EMBEDDING = "token_embd.weight"
ROPE_FACTORS = "rope_freqs.weight"  # Llama 3's RoPE scaling, as a factor for each frequency
SIZE_KEYS = {  # entry of config.json: key of the metadata
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
}
DTYPES = {"F32": "float32", "F16": "float16"}  # type of all matrices: dtype of the model; otherwise it is bfloat16


def safetensors_name(name: str) -> str:
    """Return the name that a tensor of a GGUF file has in safetensors. An unknown tensor keeps its name.

    >>> safetensors_name("blk.3.attn_q.weight"), safetensors_name("output.weight")
    ('model.layers.3.self_attn.q_proj.weight', 'lm_head.weight')
    >>> safetensors_name("blk.0.ffn_gate_exps.weight"), safetensors_name("blk"), safetensors_name("")
    ('blk.0.ffn_gate_exps.weight', 'blk', '')
    """
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(\w+)", name)
    if not match or match[2] not in SAFETENSORS_NAMES:
        return name
    return ".".join([*(["model.layers", match[1]] if match[1] else []), SAFETENSORS_NAMES[match[2]], match[3]])


def config_of(metadata: Entries, architecture: str, tensors: dict[str, Stored]) -> dict[str, Any]:
    """Return the entries of config.json for a GGUF file."""
    values, prefix = metadata.values, f"{architecture}."
    sizes = {name: metadata.integer(prefix + key) for name, key in SIZE_KEYS.items()}
    heads = sizes["num_attention_heads"]
    head_dim = metadata.integer(f"{prefix}attention.key_length", sizes["hidden_size"] // heads)
    types = {stored.type for stored in tensors.values() if len(stored.shape) > 1}
    eos_ids = [values.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    return {
        "model_type": architecture,
        "vocab_size": tensors[EMBEDDING].shape[0],
        **sizes,
        "num_key_value_heads": metadata.integer(f"{prefix}attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": metadata.integer(f"{prefix}context_length"),
        "rms_norm_eps": metadata.number(f"{prefix}attention.layer_norm_rms_epsilon"),
        "rope_parameters": rope_parameters(metadata, prefix, head_dim, tensors.get(ROPE_FACTORS)),
        "partial_rotary_factor": metadata.integer(f"{prefix}rope.dimension_count", head_dim) / head_dim,
        "sliding_window": values.get(f"{prefix}attention.sliding_window"),
        "num_local_experts": values.get(f"{prefix}expert_count", 0),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
        "dtype": DTYPES.get(types.pop(), "bfloat16") if len(types) == 1 else "bfloat16",
        "bos_token_id": values.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": [token_id for token_id in dict.fromkeys(eos_ids) if token_id is not None],
    }


def rope_parameters(metadata: Entries, prefix: str, head_dim: int, factors: Stored | None) -> dict[str, Any]:
    """Return the entries of rope_parameters. If there are `factors`, they must be those of Llama 3's scaling.

    Raise ValueError if they are not. `prefix` begins the metadata's keys for the architecture, such as "llama.".
    """
    theta = metadata.number(f"{prefix}rope.freq_base", 10000.0)
    if factors is None:
        rope = {"rope_type": metadata.text(f"{prefix}rope.scaling.type", "linear").replace("none", "default")}
        return {"rope_theta": theta, **rope, "factor": metadata.number(f"{prefix}rope.scaling.factor", 1.0)}
    actual = torch.from_numpy(np.fromfile(metadata.path, np.float32, factors.shape[-1], offset=factors.offset))
    scaling = RopeScaling(actual.max().item(), original_max_position_embeddings=8192)
    expected = rope_frequencies(head_dim, theta, None) / rope_frequencies(head_dim, theta, scaling)
    if actual.shape != expected.shape or not torch.allclose(actual, expected, rtol=1e-4):
        raise ValueError(f"{metadata.path}: tensor {ROPE_FACTORS} must be Llama 3's scaling of frequencies")
    return {"rope_theta": theta, "rope_type": "llama3", **asdict(scaling)}


# The tokenizer

LLAMA3_PATTERN = QWEN2_PATTERN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
TEKKEN_PATTERN = (  # for Mistral Nemo
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Tokenizers with these patterns add BOS by default, and encode a word that is in the vocabulary as one token.
WITH_BOS = (LLAMA3_PATTERN, TEKKEN_PATTERN)
PATTERNS = {  # pre-tokenizer: the regular expression that splits a text into words, or "" for GPT-2's
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), LLAMA3_PATTERN),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), QWEN2_PATTERN),
    "tekken": TEKKEN_PATTERN,
    **dict.fromkeys(("gpt-2", "smollm"), ""),
}
CONTROL, USER_DEFINED = 3, 4  # types of tokens
# Name of a special token in tokenizer_config.json: its name in GGUF
SPECIAL_TOKENS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def tokenizer_files(metadata: Entries) -> dict[str, str]:
    """Return the text of each tokenizer file, by file name. Return {} if the GGUF file has no tokenizer.

    Raise ValueError if the tokenizer is damaged or not supported.
    """
    model = metadata.text("tokenizer.ggml.model", "none")
    name = metadata.text("tokenizer.ggml.pre", "default")  # of the pre-tokenizer
    if model in ("none", "no_vocab"):
        return {}
    if model not in ("llama", "gpt2"):
        raise metadata.error("tokenizer.ggml.model", "llama or gpt2")
    if model == "gpt2" and name not in PATTERNS:
        raise ValueError(f"{metadata.path}: unknown pre-tokenizer {name!r}; supported: {', '.join(PATTERNS)}")
    try:
        texts: list[str] = metadata.values["tokenizer.ggml.tokens"]
        backend = sentencepiece_bpe(metadata, texts) if model == "llama" else byte_level_bpe(metadata, texts, name)
        types = metadata.values.get("tokenizer.ggml.token_type") or [1] * len(texts)
        for text, type in zip(texts, types, strict=True):
            if type in (CONTROL, USER_DEFINED):
                backend.add_tokens([AddedToken(text, special=type == CONTROL, normalized=False)])
        ids = {token: metadata.values.get(f"tokenizer.ggml.{key}_token_id") for token, key in SPECIAL_TOKENS.items()}
        named = {token: texts[token_id] for token, token_id in ids.items() if token_id is not None}
        adds_bos = metadata.flag("tokenizer.ggml.add_bos_token", model == "llama" or PATTERNS[name] in WITH_BOS)
        adds_eos = metadata.flag("tokenizer.ggml.add_eos_token", False)
        bos = [named["bos_token"]] if adds_bos and "bos_token" in named else []
        eos = [named["eos_token"]] if adds_eos else []
        token_ids = [(text, backend.token_to_id(text)) for text in dict.fromkeys(bos + eos)]
        backend.post_processor = TemplateProcessing(single=[*bos, "$A", *eos], special_tokens=token_ids)
    except Exception as error:  # the tokenizers library raises plain Exceptions
        raise ValueError(f"{metadata.path}: its tokenizer is damaged: {error!r}") from None
    config = {"chat_template": metadata.values.get("tokenizer.chat_template"), **named}
    return {"tokenizer.json": backend.to_str(), "tokenizer_config.json": json.dumps(config)}


def sentencepiece_bpe(metadata: Entries, texts: list[str]) -> Tokenizer:
    """Build a BPE tokenizer with sentencepiece's pieces, `texts`. Merges into pieces with higher scores come first."""
    scores = metadata.values["tokenizer.ggml.scores"]
    by_score = sorted(range(len(texts)), key=lambda i: -scores[i])
    merges = derive_merges({texts[i]: rank for rank, i in enumerate(by_score)})
    options = {"add_prefix_space": metadata.flag("tokenizer.ggml.add_space_prefix", True)}
    return llama_bpe({text: i for i, text in enumerate(texts)}, merges, Entries(options, metadata.path))


def byte_level_bpe(metadata: Entries, texts: list[str], name: str) -> Tokenizer:
    """Build a byte-level BPE tokenizer with the vocabulary `texts` and the pre-tokenizer `name`."""
    merges = [tuple(merge.split(" ")) for merge in metadata.values["tokenizer.ggml.merges"]]
    pattern = PATTERNS[name]
    backend = Tokenizer(BPE({text: i for i, text in enumerate(texts)}, merges, ignore_merges=pattern in WITH_BOS))
    if pattern == QWEN2_PATTERN:
        backend.normalizer = normalizers.NFC()
    words = [pre_tokenizers.Split(Regex(pattern), "isolated")] if pattern else []
    digits = [pre_tokenizers.Digits(individual_digits=True)] if name == "smollm" else []
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not pattern)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*words, *digits, to_bytes])
    backend.decoder = decoders.ByteLevel()
    return backend
