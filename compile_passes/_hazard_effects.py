"""What a node of a graph does to memory: what it writes, takes, copies and leaves equal.

``_hazard_scan`` asks this of each node. Names of functions stand for what torch and
Inductor are known to do in them.
"""

import operator
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import HigherOrderOperator, OpOverloadPacket

from ._compat import example_value
from ._nodes import nodes_in, op_of
from ._writes import mutated, named_in_place, storages

_HARMLESS = frozenset({"detach_", "requires_grad_", "retain_grad_"})
_KERNELS = frozenset({"triton_kernel_wrapper_mutation", "triton_kernel_wrapper_functional"})


def effect_of(node: fx.Node) -> str:
    """``input``, ``output``, ``value``, ``write`` for a function of torch, ``op``, ``kernel``."""
    if node.op in ("placeholder", "get_attr"):
        return "input"
    if node.op == "output":
        return "output"
    if node.op == "call_module":
        return "op"
    if isinstance(node.target, HigherOrderOperator):
        return "kernel" if node.target.name() in _KERNELS else "op"
    if isinstance(node.target, OpOverloadPacket) and op_of(node) is None:
        if str(node.target).startswith(_OF_TORCH):
            in_place = named_in_place(str(node.target)) or stores_elsewhere(node)
            return "write" if in_place else "value"
        return "op"
    op = op_of(node)
    if op is not None:
        if op.namespace + "." not in _OF_TORCH:
            return "op"
        return "write" if op._schema.is_mutable else "value"
    if node.target in _HARMLESS:
        return "value"
    if not mutated(node) or (node.target in _STATISTICS and not targets_of(node)):
        return "value"
    return "write" if _is_function_of_torch(node) else "op"


_OF_TORCH = ("aten.", "prims.", "prim.")


def _is_function_of_torch(node: fx.Node) -> bool:
    if node.op == "call_method":
        return True
    module = (getattr(node.target, "__module__", None) or "").split(".")[0]
    return module in ("torch", "_operator", "builtins", "math")


def op_targets(node: fx.Node) -> Any:
    """What a custom op writes, as its schema says; all it gets where there is no schema."""
    op = op_of(node)
    if op is None:
        return (node.args, node.kwargs)
    names = [argument.name for argument in op._schema.arguments]
    values = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    return [
        values.get(argument.name)
        for argument in op._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def targets_at_risk(node: fx.Node, effect: str) -> list[fx.Node]:
    """What a value may be computed from too late, because of this call."""
    if effect == "op":
        return nodes_in(op_targets(node))
    if effect == "write" and (
        is_scatter(node) or "_foreach" in name_called(node) or not copies_into(node)[1]
    ):
        return targets_of(node)
    return [node] if is_reinterpreted(node) else []


def op_writes(node: fx.Node, effect: str) -> bool:
    return effect == "op" and bool(nodes_in(op_targets(node)))


def is_reinterpreted(node: fx.Node) -> bool:
    """A view as another dtype, or a view of one."""
    values = [example_value(source) for source in view_chain(node)]
    return len({value.dtype for value in values if isinstance(value, Tensor)}) > 1


# what keeps running statistics: where they stand, in the two forms of each function
_STATISTICS = {
    torch.batch_norm: (3, 4),
    torch.instance_norm: (3, 4),
    torch.nn.functional.batch_norm: (1, 2),
    torch.nn.functional.instance_norm: (1, 2),
}


def _written_places(node: fx.Node) -> tuple[frozenset[int], frozenset[str]]:
    """The arguments that a function of torch writes, by position and by name.

    It only takes all others. An argument may stand in both: ``torch.add(x, y, out=x)``.
    """
    op = op_of(node)
    if op is not None:
        written = [
            (position, argument.name)
            for position, argument in enumerate(op._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        return frozenset(place for place, _ in written), frozenset(name for _, name in written)
    if node.kwargs.get("out") is not None:
        return frozenset(), frozenset({"out"})
    if isinstance(node.target, OpOverloadPacket):
        given = {name for name, value in node.kwargs.items() if value is not None}
        if given & _named_outputs(node.target):
            return frozenset(), _named_outputs(node.target)
    if node.op == "call_function" and node.target in _STATISTICS:
        names = frozenset({"running_mean", "running_var"})
        return frozenset(_STATISTICS[node.target]), names
    return frozenset({0}), frozenset({"input", "self"} if not node.args else ())


def _named_outputs(packet: OpOverloadPacket) -> frozenset[str]:
    """``values`` and ``indices`` of ``aten.sort``."""
    return frozenset(
        argument.name
        for overload in packet.overloads()
        for argument in getattr(packet, overload)._schema.arguments
        if argument.kwarg_only and argument.is_out
    )


def stores_elsewhere(node: fx.Node) -> bool:
    """Writes a result into memory given for that, and not over what it is computed from."""
    positions, names = _written_places(node)
    return (not positions and bool(names & node.kwargs.keys())) or _is_out_overload(node)


def _is_out_overload(node: fx.Node) -> bool:
    op = op_of(node)
    return op is not None and any(argument.is_out for argument in op._schema.arguments)


def targets_of(node: fx.Node) -> list[fx.Node]:
    """What an in-place function of torch writes."""
    positions, names = _written_places(node)
    by_position = [arg for place, arg in enumerate(node.args) if place in positions]
    return nodes_in([by_position, [node.kwargs[name] for name in names & node.kwargs.keys()]])


def taken_by(node: fx.Node) -> list[Any]:
    """The arguments that an in-place function of torch does not write."""
    positions, names = _written_places(node)
    by_position = [arg for place, arg in enumerate(node.args) if place not in positions]
    return [*by_position, *(value for name, value in node.kwargs.items() if name not in names)]


def operands_of(node: fx.Node) -> list[fx.Node]:
    """The tensors that a write takes, apart from those that it writes."""
    copies = name_called(node) in ("copy_", "setitem")
    targets = set() if copies else set(targets_of(node))
    return [
        source
        for source in dict.fromkeys(nodes_in(taken_by(node)))
        if source not in targets and isinstance(example_value(source), Tensor)
    ]


def replace_taken(node: fx.Node, copies: dict[fx.Node, fx.Node]) -> None:
    """Let an in-place function take other tensors, and write what it wrote."""
    positions, names = _written_places(node)

    def replaced(value: Any) -> Any:
        return fx.map_arg(value, lambda arg: copies.get(arg, arg))

    node.args = tuple(
        arg if place in positions else replaced(arg) for place, arg in enumerate(node.args)
    )
    node.kwargs = {
        name: value if name in names else replaced(value) for name, value in node.kwargs.items()
    }


def name_called(node: fx.Node) -> str:
    """What a node calls, without the module, and without the underscores of in-place forms."""
    op = op_of(node)
    if op is not None:
        return op._schema.name.split("::")[1]
    if isinstance(node.target, OpOverloadPacket):
        return str(node.target).split(".")[1]
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


_SCATTERS = frozenset(
    {"index_put", "index_add", "index_copy", "index_fill", "index_reduce", "scatter"}
    | {"scatter_add", "scatter_reduce", "slice_scatter", "select_scatter", "diagonal_scatter"}
    | {"as_strided_scatter", "masked_scatter", "put"}
)  # fmt: skip


def is_scatter(node: fx.Node) -> bool:
    """Writes at indices, or gives a copy with something written at indices."""
    if node.target is operator.setitem:
        # a mask is a pointwise choice
        index = [n for n in nodes_in(node.args[1]) if isinstance(example_value(n), Tensor)]
        return bool(index) and all(example_value(n).dtype != torch.bool for n in index)
    return name_called(node).rstrip("_") in _SCATTERS


# takes the shape of a tensor, and none of its values
SHAPED_LIKE = frozenset(
    {"empty_like", "zeros_like", "ones_like", "new_empty", "new_zeros", "new_ones"}
)


def scattered_over(node: fx.Node) -> list[fx.Node]:
    """What a scatter gives a changed copy of."""
    if not is_scatter(node) or node.target is operator.setitem:
        return []
    return nodes_in(node.args[0] if node.args else node.kwargs.get("input"))


def is_product(node: fx.Node) -> bool:
    """A matrix product too wide for Inductor to write it out as a sum."""
    if name_called(node) not in ("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "__matmul__"):
        return False
    operands = [n for n in node.all_input_nodes if isinstance(example_value(n), Tensor)]
    factor = operands[1 if name_called(node) in ("addmm", "baddbmm") else 0] if operands else None
    width = example_value(factor).shape[-1] if factor is not None else 0
    return isinstance(width, int) and width > 8


def copies_into(node: fx.Node) -> tuple[list[fx.Node], bool]:
    """What an in-place function copies from, and whether it fills its target as a whole."""
    targets = targets_of(node)
    whole = all(map(is_base, targets))
    if node.target is operator.setitem:
        index = node.args[1]
        parts = index if isinstance(index, tuple) else (index,)
        whole = whole and all(part is Ellipsis or part == slice(None) for part in parts)
        sources = [] if is_scatter(node) else nodes_in(node.args[2])
    elif is_copy(node):
        sources = operands_of(node)
    else:
        sources = [source for source in left_equal_to(node) if source not in targets]
    return [source for source in sources if any(_may_fill(source, t) for t in targets)], whole


def left_equal_to(node: fx.Node) -> list[fx.Node]:
    """What arithmetic that changes nothing, or ``torch.cat([x], out=y)``, leaves in its target."""
    given = nodes_in(taken_by(node)) if stores_elsewhere(node) else node.all_input_nodes
    return [source for source in copied_by(node)[0] if source in given]


def is_copy(node: fx.Node) -> bool:
    return node.target is operator.setitem or name_called(node) in (
        "copy_",
        "_foreach_copy_",
        "set_",
    )


def _may_fill(source: fx.Node, target: fx.Node) -> bool:
    """A tensor has as many elements as what another is, or is a view of."""
    value, of = example_value(source), example_value(view_chain(target)[-1])
    return isinstance(of, Tensor) and _may_equal(value, of)


def view_chain(node: fx.Node) -> list[fx.Node]:
    """A tensor and what it is a view of, up to an input or the call that made it."""
    chain = [node]
    while node.op in ("call_function", "call_method") and node.args:
        source = node.args[0]
        if not isinstance(source, fx.Node) or not storages(node) & storages(source):
            break
        chain.append(source)
        node = source
    return chain


def is_base(node: fx.Node) -> bool:
    """A tensor that is no view."""
    value = example_value(node)
    return isinstance(value, Tensor) and not value._is_view()


_COPIES = frozenset(
    {"clone", "contiguous", "copy", "alias", "to", "type", "type_as", "float", "double", "half"}
    | {"bfloat16", "int", "long", "short", "byte", "bool", "repeat", "tile", "cat", "concat"}
    | {"concatenate", "stack", "hstack", "vstack", "dstack", "row_stack", "column_stack", "pad"}
    | {"round", "floor", "ceil", "trunc", "fix", "reshape", "flatten", "dropout", "positive"}
    | {"roll", "detach_copy", "view_copy", "expand_copy", "broadcast_to", "repeat_interleave"}
    | {"atleast_1d", "atleast_2d", "_to_copy", "constant_pad_nd", "ravel", "unfold_copy"}
)  # fmt: skip


def copied_by(node: fx.Node) -> tuple[list[fx.Node], bool]:
    """What Inductor may give in place of a call's result, and whether the call is arithmetic."""
    value = example_value(node)
    if not isinstance(value, Tensor) or node.op not in ("call_function", "call_method"):
        return [], False
    nothing, operands = changes_nothing(node)
    if not nothing:
        operands = node.all_input_nodes if name_called(node) in _COPIES else []
    return [source for source in operands if _may_equal(example_value(source), value)], nothing


def _may_equal(source: object, value: Tensor) -> bool:
    if not isinstance(source, Tensor) or source.dtype != value.dtype:
        return False
    sizes = source.numel(), value.numel()
    return not all(type(size) is int for size in sizes) or sizes[0] == sizes[1]


_NEUTRAL = {
    **dict.fromkeys(("add", "sub", "iadd", "isub", "subtract"), 0),
    **dict.fromkeys(("mul", "imul", "multiply", "div", "divide", "truediv", "itruediv"), 1),
    **dict.fromkeys(("true_divide", "floordiv", "ifloordiv", "floor_divide", "pow", "ipow"), 1),
}
_CONSTANTS = frozenset(
    {"zeros", "ones", "full", "zeros_like", "ones_like", "full_like"}
    | {"new_zeros", "new_ones", "new_full", "tensor", "scalar_tensor", "as_tensor"}
)  # fmt: skip


def changes_nothing(node: fx.Node) -> tuple[bool, list[fx.Node]]:
    """Arithmetic that may give its operand back, and which: ``x + 0``, ``x * torch.ones(4)``."""
    neutral = _NEUTRAL.get(name_called(node).rstrip("_"))
    if neutral is None or len(node.args) + len(node.kwargs) < 2:
        return False, []
    named = (node.kwargs.get(name) for name in ("input", "self", "other", "exponent"))
    operands = [*node.args[:2], *named]
    operands = [operand for operand in operands if operand is not None][:2]
    kept = [
        operand
        for operand, other in zip(operands, reversed(operands), strict=True)
        if isinstance(operand, fx.Node)
        and (_is_number(other, neutral) or _is_constant(other) or node.kwargs.get("alpha") == 0)
    ]
    return bool(kept), kept


def _is_number(value: object, number: int) -> bool:
    return isinstance(value, int | float) and value == number


def _is_constant(value: object) -> bool:
    """Made of one number, perhaps through views."""
    while isinstance(value, fx.Node) and value.op in ("call_function", "call_method"):
        if name_called(value) in _CONSTANTS:
            return True
        value = value.args[0] if value.args else None
    return False
