"""Bytes as people write them, and as a table shows them."""

import re

UNITS = {prefix: 1000**power for power, prefix in enumerate(("", "k", "m", "g", "t"))}
BINARY = {prefix: 1024**power for power, prefix in enumerate(("", "k", "m", "g", "t"))}


def parse_bytes(text: str) -> int:
    """Raises ValueError for what is no number of bytes.

    >>> parse_bytes("24GiB"), parse_bytes("80 GB"), parse_bytes("4.8TB/s"), parse_bytes("1048576")
    (25769803776, 80000000000, 4800000000000, 1048576)
    """
    found = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,15})?) *([kmgt]?)(i?)b?(?:/s)?", text.strip().lower())
    if not found or (found[3] and not found[2]):
        raise ValueError(f"{text!r} is no number of bytes, such as 24GiB or 80GB")
    number, prefix, binary = found.groups()
    return round(float(number) * (BINARY if binary else UNITS)[prefix])


def show_bytes(size: float) -> str:
    """
    >>> show_bytes(25769803776), show_bytes(524288), show_bytes(100)
    ('24.0 GiB', '512.0 KiB', '100 bytes')
    """
    if size < 1024:
        return f"{size:,.0f} bytes"
    for unit in ("KiB", "MiB", "GiB"):
        size /= 1024
        if size < 1024:
            return f"{size:.1f} {unit}"
    return f"{size / 1024:,.1f} TiB"


def show_seconds(seconds: float) -> str:
    """
    >>> show_seconds(0.0041), show_seconds(2.5)
    ('4.1 ms', '2.5 s')
    """
    return f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:,.1f} s"
