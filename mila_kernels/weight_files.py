"""Weights from files: one tensor of a safetensors file, or of a state dict of torch, by its name."""

from __future__ import annotations

import difflib
import json
import os
from pathlib import Path

import torch

_SAFETENSORS_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "I64": torch.int64, "I32": torch.int32, "I8": torch.int8, "U8": torch.uint8,
}  # fmt: skip
_LARGEST_HEADER = 100 << 20


def load_weight(path: str | Path, name: str | None = None) -> torch.Tensor:
    """A tensor by its name from a local ``.safetensors`` file or a ``torch.save``d state dict, on the CPU.

    Only that tensor's bytes are read from a safetensors file. With ``name`` None the file must hold one tensor.

    Raises:
        FileNotFoundError: no such file.
        TypeError: a path that is none, or a name that is no str.
        ValueError: a file that is neither, or a name that it does not hold; the text lists close names.
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"path: a str or a Path is needed, not {type(path).__name__}")
    if name is not None and not isinstance(name, str):
        raise TypeError(f"name: a str or None is needed, not {type(name).__name__}")
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"path: there is no file {path}")
    if path.suffix == ".safetensors":
        return _load_safetensors(path, name)
    state = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(state, dict):
        raise ValueError(f"path: {path} holds a {type(state).__name__}, not a dict of tensors")
    tensors = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
    return tensors[_known_name(path, name, list(tensors))]


def weight_names(path: str | Path) -> list[str]:
    """The names of the tensors in a ``.safetensors`` file."""
    return list(_safetensors_header(Path(path))[0])


def _load_safetensors(path: Path, name: str | None) -> torch.Tensor:
    header, data_start = _safetensors_header(path)
    entry = header[_known_name(path, name, list(header))]
    dtype = _SAFETENSORS_DTYPES.get(entry["dtype"])
    if dtype is None:
        known = ", ".join(_SAFETENSORS_DTYPES)
        raise ValueError(f"name: {name!r} of {path} has dtype {entry['dtype']}, which is none of {known}")
    begin, end = entry["data_offsets"]
    with path.open("rb") as file:
        file.seek(data_start + begin)
        data = bytearray(file.read(end - begin))
    if len(data) != end - begin:
        raise ValueError(f"path: {path} is cut short: {name!r} needs {end - begin} bytes and {len(data)} are left")
    if not data:
        return torch.empty(entry["shape"], dtype=dtype)
    return torch.frombuffer(data, dtype=torch.uint8).view(dtype).view(entry["shape"])


def _safetensors_header(path: Path) -> tuple[dict[str, dict], int]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        text = file.read(length) if length <= _LARGEST_HEADER else b""
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
    except (ValueError, AttributeError) as error:
        raise ValueError(f"path: {path} is not a safetensors file") from error
    return header, 8 + length


def _known_name(path: Path, name: str | None, known: list[str]) -> str:
    if name is None and len(known) == 1:
        return known[0]
    if name in known:
        return str(name)
    close = difflib.get_close_matches(name or "", known, 5, 0.3) or known[:5]
    raise ValueError(f"name: {name!r} is not in {path}, which holds {len(known)} tensors such as {', '.join(close)}")
