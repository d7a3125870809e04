"""Built engines on disk, under a key of all that an engine depends on.

A file is found again only for the same calls, shapes, ranges, weights, libraries and card.
"""

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from .engine_input import EngineInput

_HEADER = b"mtpgraph engine 1\n"


class EngineCache:
    """A directory of engines, shared between processes."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)

    @classmethod
    def of(cls, directory: str | None) -> "EngineCache | None":
        """The cache of the option, or else of ``MTPGRAPH_ENGINE_CACHE``; ``None`` without both."""
        directory = directory or os.environ.get("MTPGRAPH_ENGINE_CACHE")
        return cls(directory) if directory else None

    def load(self, key: str) -> bytes | None:
        """The engine of a key, if it is there and whole."""
        try:
            content = self._path(key).read_bytes()
        except OSError:
            return None
        head = len(_HEADER) + hashlib.sha256().digest_size
        engine = content[head:]
        whole = content[:head] == _HEADER + hashlib.sha256(engine).digest()
        return engine if whole else None

    def store(self, key: str, engine: bytes) -> None:
        """Keep an engine; another process sees all of it or nothing.

        Raises:
            OSError: the directory cannot be written
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=self.directory, suffix=".partial")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(_HEADER + hashlib.sha256(engine).digest())
                file.write(engine)
            os.replace(name, self._path(key))
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise

    def _path(self, key: str) -> Path:
        return self.directory / f"{key}.engine"


def engine_key(
    gm: fx.GraphModule, inputs: Sequence[EngineInput], fingerprint: str, passes: bytes
) -> str:
    """Names an engine.

    Args:
        gm: the region, its weights among its parameters: their contents count
        inputs: ranges and dtypes; which of several equal cards they are on does not count
        fingerprint: libraries, card and settings of the builder
        passes: changes with the sources of this package and with torch
    """
    digest = hashlib.sha256()
    ranges = [
        (given.dtype, given.bytes_of, given.least, given.usual, given.most) for given in inputs
    ]
    for part in (describe(gm.graph), repr(ranges), fingerprint, torch.__version__):
        digest.update(part.encode() + b"\0")
    digest.update(passes)
    for name, weight in gm.named_parameters(remove_duplicate=False):
        digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}\0".encode())
        digest.update(_bytes(weight))
    return digest.hexdigest()


def describe(graph: fx.Graph) -> str:
    """The calls of a graph, whatever its nodes are named."""
    names: dict[fx.Node, str] = {}
    lines = []
    for node in graph.nodes:
        names[node] = f"%{len(names)}"
        target = node.target if isinstance(node.target, str) else _qualified(node.target)
        if node.op == "placeholder":
            target = ""
        args = fx.map_arg((node.args, dict(node.kwargs)), lambda given: _Name(names[given]))
        lines.append(f"{names[node]} = {node.op} {target} {args!r}")
    return "\n".join(lines)


class _Name(str):
    """Stands for a node; no string among the arguments looks the same."""

    def __repr__(self) -> str:
        return str(self)


def _qualified(target: Any) -> str:
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', target)}"


def _bytes(tensor: Tensor) -> Any:
    flat = tensor.detach().cpu().contiguous().flatten()
    return flat.view(torch.uint8).numpy()
