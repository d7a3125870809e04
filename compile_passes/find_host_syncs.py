"""Calls that wait for the device, or make a shape that only the device knows.

Such a call cannot be part of a CUDA graph, and outside of one it stops the host at every step. No
rewrite: each is noted with the user's line and what to write instead. The list does not depend on
the device of the trace, so a laptop finds what a card would refuse. One thing only a card can tell:
whether ``x.to(device)`` leaves the device, where the line does not say ``"cpu"`` itself.

Noted
- a number read from a tensor: ``.item()``, ``int(t)``, ``t.tolist()``, ``torch.equal``, the
  predicate of ``torch.cond`` and ``while_loop``, and a tensor given where a function takes a
  number, as in ``x.view(t, -1)``, ``torch.zeros(t)`` or ``x.add(y, alpha=t)``;
- shapes that depend on values: ``nonzero``, ``torch.where(mask)``, ``masked_select``, ``x[mask]``,
  ``unique``, ``bincount``, ``repeat_interleave`` by lengths and ``one_hot`` without a size, and any
  other call whose result has a size that the trace could not know;
- ``x[mask] = values``; of one number it is a fill, and fine;
- copies between devices, and tensors of the CPU among those of a card;
- functions that check their input on the host: ``multinomial``, ``normal`` by a tensor of standard
  deviations, ``histc`` without bounds, and most of ``torch.linalg``.

Left alone
- shapes, strides, Python numbers;
- what breaks the graph, such as ``if mask.any()``: it never arrives here;
- ``torch.tensor([...])`` of numbers: Inductor makes it a constant when it compiles;
- tensors without dimensions on the CPU: a kernel takes those by value.
"""

import linecache
import operator
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from ._compat import example_value, reads_number, unbacked_symbols, user_frame
from ._nodes import nodes_in, op_of
from .report import note

Words = tuple[str, str]
"""What is wrong with a call, and what to write instead."""


def find_host_syncs(graph: fx.Graph) -> int:
    """Note every call that would sync; rewrites nothing and returns 0."""
    on_card = any(tensor.device.type == "cuda" for node in graph.nodes for tensor in _tensors(node))
    looked_at: dict[Any, bool] = {}
    for node in graph.nodes:
        if node.op not in ("call_function", "call_method"):
            continue
        words = (
            _of_known_call(node)
            or _of_number(node, looked_at)
            or _of_unknown_size(node)
            or _of_devices(node, on_card)
        )
        if words is not None:
            note(node, "host sync", "find_host_syncs", *words)
    return 0


def _of_known_call(node: fx.Node) -> Words | None:
    words = _CALLS.get(_name(node))
    return words(node) if callable(words) else words


def _name(node: fx.Node) -> str:
    """What a node calls, without the module and the underscore of an in-place form."""
    op = op_of(node)
    if op is not None:
        return op._schema.name.split("::")[1].rstrip("_") if op.namespace == "aten" else ""
    if isinstance(node.target, str):
        return node.target.rstrip("_")
    if node.target in (torch.unique, torch.unique_consecutive):
        # both are dispatchers without a name of their own
        return "unique"
    return getattr(node.target, "__name__", "").rstrip("_")


def _argument(node: fx.Node, position: int, name: str) -> Any:
    """An argument of a call by position, the tensor of a method being the first, or by name."""
    return node.args[position] if position < len(node.args) else node.kwargs.get(name)


def _is_tensor(value: object) -> bool:
    return isinstance(value, fx.Node) and isinstance(example_value(value), Tensor)


def _tensors(node: fx.Node) -> list[Tensor]:
    value = example_value(node)
    values = value if isinstance(value, list | tuple) else [value]
    return [item for item in values if isinstance(item, Tensor)]


def _reads_number(instead: str) -> Words:
    return (
        "a number is read from a tensor on the host: on a GPU that waits for the device, and a "
        "CUDA graph keeps the number of its capture",
        instead,
    )


def _shape_by_values(instead: str) -> Words:
    return "the shape of the result depends on values: on a GPU that waits for the device", instead


_ITEM = _reads_number(
    "keep it a tensor, with torch.where for a branch, or pass the number to the step"
)
_AT_NUMBER = _reads_number("index by a tensor with a dimension: x[i[None]], or x.index_select")
_MASKED = _shape_by_values(
    "keep all rows and choose by torch.where(mask, a, b), or torch.nonzero_static(mask, size=...)"
)
_CHECKS = (
    "the function checks its input or its result on the host: on a GPU that waits for the device"
)


_NEW_TENSOR = _reads_number("torch.stack([a, b]) of the tensors stays on the device")
_READS_NUMBER = ("item", "tolist", "_local_scalar_dense")


_OUTSIDE = "compute it outside of the step"


def _item(node: fx.Node) -> Words | None:
    """Under ``dynamic=True`` the tracer passes a Python float as a tensor of the CPU, and reads it;
    it knows the number then, and not that of any other tensor."""
    value = example_value(node)
    known = isinstance(value, torch.SymFloat) and not unbacked_symbols(value)
    return None if known else _ITEM


def _where(node: fx.Node) -> Words | None:
    return _MASKED if len(node.args) + len(node.kwargs) == 1 else None


def _repeat_interleave(node: fx.Node) -> Words | None:
    repeats = _argument(node, 1, "repeats")
    # with one argument, that is the lengths
    if (repeats is None or _is_tensor(repeats)) and node.kwargs.get("output_size") is None:
        return _shape_by_values("pass output_size=, the number of rows of the result")
    return None


def _one_hot(node: fx.Node) -> Words | None:
    classes = _argument(node, 1, "num_classes")
    if classes is None or (isinstance(classes, int) and classes < 0):
        return _shape_by_values("pass num_classes=")
    return None


def _getitem(node: fx.Node) -> Words | None:
    if not _is_tensor(node.args[0]):
        return None
    return _MASKED if _masks(node.args[1]) else _at_number(node)


def _setitem(node: fx.Node) -> Words | None:
    return _masked_write(node.args[0], node.args[1], node.args[2]) or _at_number(node)


def _at_number(node: fx.Node) -> Words | None:
    """``x[i]`` for a tensor ``i`` without dimensions."""
    return _AT_NUMBER if _holds_number(node.args[1]) else None


def _of_number(node: fx.Node, looked_at: dict[Any, bool]) -> Words | None:
    """A tensor without dimensions where a function of torch takes a number.

    ``looked_at`` has the answer for calls of one function with arguments of the same kinds.
    """
    module = (getattr(node.target, "__module__", None) or "").split(".")[0]
    # the operators take such a tensor as it is, and indices are looked at elsewhere
    if node.op != "call_method" and module != "torch":
        return None
    if _name(node) in _READS_NUMBER or not _holds_number((node.args, node.kwargs)):
        return None
    call = (node.op, node.target, _kind(node.args), _kind(node.kwargs))
    if call not in looked_at:
        looked_at[call] = reads_number(node)
    return _ITEM if looked_at[call] else None


def _kind(value: Any) -> Any:
    """What decides which form of a function an argument asks for."""
    if isinstance(value, list | tuple):
        return tuple(map(_kind, value))
    if isinstance(value, dict):
        return tuple((name, _kind(item)) for name, item in sorted(value.items()))
    if isinstance(value, fx.Node):
        recorded = example_value(value)
        if isinstance(recorded, Tensor):
            return recorded.dtype, recorded.device, bool(recorded.dim())
        return type(recorded)
    return type(value)


def _spaced(node: fx.Node) -> Words | None:
    if _holds_number((node.args, node.kwargs)):
        return _reads_number("compute start + step * torch.arange(steps)")
    return None


def _new_tensor(node: fx.Node) -> Words | None:
    """Of tensors, ``torch.tensor`` makes one on the CPU unless it is told a device."""
    data = _argument(node, 0, "data")
    if _is_tensor(data) or not any(map(_is_tensor, nodes_in(data))):
        return None
    return None if node.kwargs.get("device") is not None else _NEW_TENSOR


def _holds_number(value: Any) -> bool:
    values = map(example_value, nodes_in(value))
    return any(
        isinstance(value, Tensor) and not value.dim() and value.dtype != torch.bool
        for value in values
    )


def _index(node: fx.Node) -> Words | None:
    return _MASKED if _masks(_argument(node, 1, "indices")) else None


def _index_put(node: fx.Node) -> Words | None:
    value = _argument(node, 2, "values")
    return _masked_write(node.args[0], _argument(node, 1, "indices"), value)


def _masked_write(target: Any, index: Any, value: Any) -> Words | None:
    if not _is_tensor(target) or not _masks(index):
        return None
    parts = index if isinstance(index, list | tuple) else (index,)
    rest = [part for part in parts[1:] if not (part is Ellipsis or part == slice(None))]
    if _masks(parts[0]) and not rest and _is_one_number(value):
        return None
    return (
        "writing at a mask looks up where the mask is true: on a GPU that waits for the device",
        "write the whole tensor: x.copy_(torch.where(mask, values, x)), the mask unsqueezed to "
        "the dimensions of x",
    )


def _masks(index: Any) -> bool:
    """An index that is, or holds, a mask with dimensions."""
    values = map(example_value, nodes_in(index))
    return any(
        isinstance(value, Tensor) and value.dtype in (torch.bool, torch.uint8) and value.dim()
        for value in values
    )


def _is_one_number(value: Any) -> bool:
    if not isinstance(value, fx.Node):
        return True
    tensor = example_value(value)
    size = tensor.numel() if isinstance(tensor, Tensor) else 1
    return isinstance(size, int) and size == 1


def _histc(node: fx.Node) -> Words | None:
    bounds = _argument(node, 2, "min"), _argument(node, 3, "max")
    if all(bound in (None, 0) for bound in bounds):
        return _CHECKS, "pass min= and max="
    return None


def _tensor_split(node: fx.Node) -> Words | None:
    where = _argument(node, 1, "indices_or_sections") or node.kwargs.get("indices")
    return _shape_by_values("split by Python numbers") if _is_tensor(where) else None


def _multinomial(_: fx.Node) -> Words:
    return (
        _CHECKS,
        "draw with (probs / torch.empty_like(probs).exponential_()).argmax(-1), or sample outside "
        "of the step",
    )


def _branch(_: fx.Node) -> Words:
    return _reads_number("compute both and choose by torch.where(condition, a, b)")


def _scaled_by(node: fx.Node) -> Words | None:
    if _is_tensor(node.kwargs.get("alpha")):
        return _reads_number("multiply by the tensor instead of passing it as alpha")
    return None


def _normal(node: fx.Node) -> Words | None:
    if _is_tensor(_argument(node, 1, "std")):
        return _CHECKS, "draw mean + std * torch.randn_like(std)"
    return None


def _matrix_power(node: fx.Node) -> Words | None:
    power = _argument(node, 1, "n")
    if isinstance(power, int) and power < 0:
        return _CHECKS, "take the power of torch.linalg.inv_ex(x)[0]"
    return None


def _norm_of_matrix(node: fx.Node) -> Words | None:
    """The spectral and the nuclear norm are computed from singular values."""
    order = _argument(node, 1, "ord")
    if order == "nuc":
        return _CHECKS, _OUTSIDE
    if order not in (2, -2):
        return None
    dims, x = _argument(node, 2, "dim"), node.args[0] if node.args else node.kwargs.get("A")
    value = example_value(x) if isinstance(x, fx.Node) else None
    of_vector = _name(node) == "linalg_norm" and (
        isinstance(dims, int)
        or (isinstance(dims, list | tuple) and len(dims) == 1)
        or (dims is None and isinstance(value, Tensor) and value.dim() != 2)
    )
    return None if of_vector else (_CHECKS, _OUTSIDE)


def _to_host(node: fx.Node) -> Words | None:
    """``.to("cpu")``; other devices are seen by what comes out."""
    device = _argument(node, 1, "device")
    if isinstance(device, str):
        return _OFF_DEVICE if device.startswith("cpu") else None
    is_cpu = isinstance(device, torch.device) and device.type == "cpu"
    return _OFF_DEVICE if is_cpu and _says_cpu(node) else None


def _says_cpu(node: fx.Node) -> bool:
    """The user wrote the device out. In the graph ``x.to(y.device)`` looks the same."""
    file, line = user_frame(node)
    text = linecache.getline(file, line) if file else ""
    # the rest of a call over several lines
    for following in range(line + 1, line + 10):
        if text.count("(") <= text.count(")"):
            break
        text += linecache.getline(file, following)
    return re.search(r"""\(\s*(\w+\s*=\s*)?["']cpu["':]""", text) is not None


_OFF_DEVICE = (
    "the tensor is copied to the host: on a GPU that waits for the device",
    "return the tensor and copy it after the step",
)

_CALLS: dict[str, Words | Callable[[fx.Node], Words | None]] = {
    **dict.fromkeys(_READS_NUMBER, _item),
    **dict.fromkeys(
        ("equal", "allclose", "is_nonzero"),
        _reads_number("compare as a tensor: (a == b).all(), and choose by torch.where"),
    ),
    **dict.fromkeys(("nonzero", "argwhere", "masked_select"), _MASKED),
    "where": _where,
    **dict.fromkeys(
        ("unique", "unique_consecutive", "_unique2"),
        _shape_by_values("sort, and mark where a value differs from the one before it"),
    ),
    "bincount": _shape_by_values(
        "count into a tensor of fixed size: counts.scatter_add_(0, x, torch.ones_like(x))"
    ),
    "repeat_interleave": _repeat_interleave,
    "one_hot": _one_hot,
    "getitem": _getitem,
    "setitem": _setitem,
    "index": _index,
    **dict.fromkeys(("linspace", "logspace"), _spaced),
    "tensor": _new_tensor,
    **dict.fromkeys(("index_put", "_unsafe_index_put", "_index_put_impl"), _index_put),
    **dict.fromkeys(("add", "sub", "subtract"), _scaled_by),
    "histc": _histc,
    "tensor_split": _tensor_split,
    "multinomial": _multinomial,
    "normal": _normal,
    **dict.fromkeys(("cond", "while_loop"), _branch),
    "cpu": _OFF_DEVICE,
    "to": _to_host,
    **dict.fromkeys(
        ("inverse", "linalg_inv", "linalg_solve", "linalg_cholesky", "cholesky"),
        (_CHECKS, "use the form that ends in _ex, which leaves its info on the device"),
    ),
    **dict.fromkeys(
        [f"linalg_{name}" for name in ("eig", "eigh", "eigvals", "eigvalsh", "cond")]
        + [f"linalg_{name}" for name in ("lu_factor", "ldl_factor", "tensorinv", "tensorsolve")]
        + [f"linalg_{name}" for name in ("matrix_rank", "pinv", "svd", "svdvals")]
        + ["svd"],
        (_CHECKS, _OUTSIDE),
    ),
    **dict.fromkeys(("linalg_matrix_power", "matrix_power"), _matrix_power),
    **dict.fromkeys(("linalg_matrix_norm", "linalg_norm"), _norm_of_matrix),
}


def _of_unknown_size(node: fx.Node) -> Words | None:
    """A size or number that first appears here and that the trace could not know."""
    made = unbacked_symbols(example_value(node))
    given = any(unbacked_symbols(example_value(source)) for source in node.all_input_nodes)
    # what asks for such a size comes after what made it
    if not made or given or _name(node).startswith("sym_"):
        return None
    return _shape_by_values("give the result a fixed size, with padding or a mask")


def _of_devices(node: fx.Node, on_card: bool) -> Words | None:
    given = [tensor for source in node.all_input_nodes for tensor in _tensors(source)]
    given_on = {tensor.device.type for tensor in given}
    made_on = {tensor.device.type for tensor in _tensors(node)}
    if not on_card or (node.target is operator.getitem and len(given_on) == 1):
        return None
    # of several operands the first one is what is copied
    if given and given[0].device.type == "cuda" and "cpu" in made_on:
        return _OFF_DEVICE
    from_host = any(tensor.device.type == "cpu" and tensor.dim() for tensor in given)
    if from_host and "cuda" in given_on | made_on:
        return (
            "a tensor of the CPU is copied to the device within the step",
            "make it on the device, or copy it there once, before the step",
        )
    return None
