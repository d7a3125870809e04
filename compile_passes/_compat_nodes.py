"""What the tracer recorded of a node: its result, and the line of the user's that it comes from."""

import os
import re
import sys
import sysconfig
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

# the line of a frame in a traceback
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
# frames in here are the user's last of all: our own and torch's, then installed libraries
_OWN = (
    str(Path(__file__).parent) + os.sep,
    str(Path(__file__).parent.parent / "ops") + os.sep,
    str(Path(torch.__file__).parent) + os.sep,
)
_INSTALLED = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib", "platlib"))
# of the user's account, of the system, or wherever else an installer was told to put them
_INSTALLED_IN = re.compile(r"[\\/](site|dist)-packages[\\/]")


def example_value(node: fx.Node) -> Any:
    """The fake result that the tracer recorded for a node of a Dynamo-level graph."""
    return node.meta.get("example_value", node.meta.get("val"))


def has_example_value(node: fx.Node) -> bool:
    """The tracer recorded a result for the node, be it None."""
    return "example_value" in node.meta or "val" in node.meta


def copy_meta(source: fx.Node, target: fx.Node) -> None:
    """A new node stands for an old one: the same fake result, the same line of the user's."""
    target.meta.update(source.meta)


def user_frame(node: fx.Node) -> tuple[str, int]:
    """File and line of the user's that a node comes from; empty and 0 where none was recorded.

    The innermost frame outside of torch, of our ops and, if there is one, of installed packages.
    """
    frames = user_frames(node.meta.get("stack_trace") or "")
    return frames[-1] if frames else ("", 0)


def user_frames(stack_trace: str) -> list[tuple[str, int]]:
    """File and line of the user's in a traceback, outermost first.

    Frames of torch, of our ops and of installed packages are left out, unless nothing else is left.
    """
    frames = [(file, int(line)) for file, line in _FRAME.findall(stack_trace)]
    own = [frame for frame in frames if not frame[0].startswith(_OWN)]
    users = [frame for frame in own if not _is_installed(frame[0])]
    return users or own[-1:] or frames[-1:]


def _is_installed(file: str) -> bool:
    return file.startswith(_INSTALLED) or _INSTALLED_IN.search(file) is not None


_TORCH = str(Path(torch.__file__).parent) + os.sep


def place_of_op(op: OpOverload) -> tuple[str, int]:
    """File and line where a custom op was written; empty and 0 where torch does not know."""
    from torch._library import custom_ops
    from torch._library.simple_registry import singleton

    definition = custom_ops.OPDEFS.get(op._schema.name)
    if definition is not None:
        code = getattr(definition._init_fn, "__code__", None)
        if code is not None:
            return code.co_filename, code.co_firstlineno
    kernel = singleton.find(op._schema.name).fake_impl.kernel
    sources = [kernel.source] if kernel is not None else []
    sources += re.findall(r"registered at (\S+\.py:\d+)", torch._C._dispatch_dump(op._schema.name))
    for source in sources:
        file, _, line = source.rpartition(":")
        if line.isdigit() and not file.startswith(_TORCH):
            return file, int(line)
    return "", 0


def current_user_frame() -> tuple[str, int]:
    """File and line of the user's that runs now: the innermost, outside of installed packages."""
    own = (*_OWN, str(Path(__file__).parent.parent / "testing") + os.sep)
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(("<", *own)) and not _is_installed(file):
            return file, frame.f_lineno
        frame = frame.f_back
    return "", 0
