"""Small steps written to a file of their own, so that their lines are known."""

import importlib
import sys
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

_count = 0


def write_module(folder: Path, source: str) -> tuple[str, Path]:
    """Write a module with a name of its own; returns the name and the path."""
    global _count
    _count += 1
    path = folder / f"explained_{_count}.py"
    path.write_text(textwrap.dedent(source).lstrip("\n"))
    return path.stem, path


def load_module(folder: Path, source: str) -> tuple[Any, Path]:
    """Write a module and import it."""
    name, path = write_module(folder, source)
    sys.path.insert(0, str(folder))
    try:
        module: ModuleType = importlib.import_module(name)
    finally:
        sys.path.remove(str(folder))
    return module, path


PLAIN = """
    import torch

    def step(x, weight, cache):
        hidden = x @ weight
        cache.add_(hidden)
        return hidden.relu(), cache[0]
"""

BROKEN = """
    import torch

    LOG = []
    TOTAL = torch.zeros(4)

    def shout(x):
        print("<loud> & clear")
        LOG.append(1)
        return x * 2

    def step(x, cache):
        cache.add_(1)
        TOTAL.add_(1)
        x = shout(x)
        if x.sum() > 0:
            x = x + 1
        return x + TOTAL
"""

LAYERS = """
    import torch

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(8, 8))
            self.scale = 3

        def forward(self, x):
            y = x @ self.weight
            return torch.tanh(y) * self.scale

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList(Layer() for _ in range(5))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    def make():
        return Net(), (torch.ones(4, 8),)

    def make_named():
        return Net(), [], {"x": torch.ones(4, 8)}
"""
