"""What ops do to the rows of a dimension that grows, by kind: one function each.

Each raises :class:`Mixed` where real entries would not stay in front, or depend on padding.
"""

import operator
from collections.abc import Callable, Sequence

import sympy
import torch
from torch import Tensor, fx

from .roles import Roles
from .rows import Call, is_symbolic


class Mixed(Exception):
    """An op lets padding reach real rows, or may: why, and what to write instead."""

    def __init__(self, reason: str, remedy: str = "") -> None:
        super().__init__(reason)
        self.reason, self.remedy = reason, remedy


Rule = Callable[[Call, Roles], None]
OWN_WRITE = (
    "use an op that leaves padding out, as ops.kv_cache_write_ does, and declare it: "
    "mtpgraph.declare"
)
_ELSEWHERE = "compute it outside of the step, or declare inputs and keep padding out with a mask"


def keep(call: Call, roles: Roles) -> None:
    """Dimensions stay as they are, or broadcast."""


def reduce(call: Call, roles: Roles) -> None:
    tensor = call.values["self"]
    dims = call.values.get("dim")
    given = None if dims is None or dims == [] else [dims] if isinstance(dims, int) else dims
    for dim in roles.dims(tensor):
        if given is None or dim in _normal(given, tensor):
            raise Mixed(f"reduces over {_dim(dim)}, so padding counts too", _ELSEWHERE)


def along(call: Call, roles: Roles) -> None:
    tensor = call.values["self"]
    dims = call.values.get("dim", call.values.get("dims", -1))
    given = [dims] if isinstance(dims, int) else list(dims) or list(range(tensor.dim()))
    for dim in roles.dims(tensor):
        if dim in _normal(given, tensor):
            verb = _VERBS.get(call.name.removesuffix("_"), "works")
            raise Mixed(f"{verb} along {_dim(dim)}, so padding rows take part", _ELSEWHERE)


_VERBS = {"sort": "sorts", "topk": "selects", "flip": "flips", "roll": "rolls"}


def contract(first: str, second: str) -> Rule:
    def rule(call: Call, roles: Roles) -> None:
        a, b = call.values[first], call.values[second]
        inner = [(a, a.dim() - 1), (b, max(0, b.dim() - 2))]
        for tensor, dim in inner:
            if dim in roles.dims(tensor):
                raise Mixed(f"sums products over {_dim(dim)}, so padding counts too", _ELSEWHERE)

    return rule


def linear(call: Call, roles: Roles) -> None:
    x, weight = call.values["input"], call.values["weight"]
    if x.dim() - 1 in roles.dims(x) or weight.dim() - 1 in roles.dims(weight):
        raise Mixed("sums products over a dimension that grows, so padding counts too", _ELSEWHERE)


def slice(call: Call, roles: Roles) -> None:
    source, result = call.values["self"], call.results[0]
    (dim,) = _normal([call.values.get("dim") or 0], source)
    start, end = call.values.get("start") or 0, call.values.get("end")
    before, after = roles.size(source.shape[dim]), roles.size(result.shape[dim])
    if not roles.grows(before):
        if is_symbolic(end) and roles.grows(end) and not roles.grows(after):
            raise Mixed("takes as many entries as fit in this batch, padding counted", _ELSEWHERE)
        return
    if is_symbolic(start) or start < 0:
        raise Mixed(f"takes the end of {_dim(dim)}, where padding is", _LAST)
    if isinstance(end, int) and 0 <= end < _NO_END and (start, end) != (0, 1):
        raise Mixed(f"takes entries {start} to {end} of {_dim(dim)}, padding among them", _LAST)
    dropped = sympy.expand(before - after - start)
    known = dropped.is_Integer and dropped >= 0
    if call.values.get("step", 1) != 1:
        known = not is_symbolic(end) or sympy.expand(before - roles.size(end)).is_Integer
    if after != 1 and not known:
        raise Mixed(f"takes {after} of {before} entries of {_dim(dim)}, padding among them", _LAST)


def cuts_end(call: Call, roles: Roles) -> bool:
    """A slice leaves out entries at the end of a dimension that grows."""
    source, result = call.values["self"], call.results[0]
    (dim,) = _normal([call.values.get("dim") or 0], source)
    start, end = call.values.get("start") or 0, call.values.get("end")
    before, after = roles.size(source.shape[dim]), roles.size(result.shape[dim])
    if not (roles.grows(before) and roles.grows(after)):
        return False
    if call.values.get("step", 1) == 1:
        return sympy.expand(before - after - roles.size(start)) != 0
    if end is None or (isinstance(end, int) and end >= _NO_END):
        return False
    return sympy.expand(before - roles.size(end)) != 0


_NO_END = 2**62
_LAST = "gather the rows that are meant, as in hidden[(query_start_loc[1:] - 1).clamp(min=0)]"


def select(call: Call, roles: Roles) -> None:
    tensor, index = call.values["self"], call.values["index"]
    (dim,) = _normal([call.values["dim"]], tensor)
    if dim in roles.dims(tensor) and index != 0:
        raise Mixed(f"takes entry {index} of {_dim(dim)}, which may be padding", _LAST)


def split(call: Call, roles: Roles) -> None:
    tensor = call.values["self"]
    (dim,) = _normal([call.values.get("dim", 0)], tensor)
    if dim in roles.dims(tensor) and len(call.results) > 1:
        raise Mixed(f"splits {_dim(dim)}, so that padding comes to stand among real rows", _LAST)
    if call.name == "unbind" or len(call.results) == 1 or _takes_front_alone(call.node):
        return
    if any(dim in roles.dims(result) for result in call.results):
        raise Mixed(
            f"splits dimension {dim} behind as many entries as the batch has, padding counted",
            "take the front alone, as in table[: x.shape[0]]",
        )


def _takes_front_alone(node: fx.Node) -> bool:
    """Of what a split returns, the graph uses the first alone."""
    is_split = node.op == "call_method" and node.target in ("split", "split_with_sizes")
    return is_split and all(
        user.target is operator.getitem and user.args[1] == 0 for user in node.users
    )


def repeat(call: Call, roles: Roles) -> None:
    tensor, repeats = call.values["self"], call.values["repeats"]
    new = len(repeats) - tensor.dim()
    for dim in roles.dims(tensor):
        if repeats[new + dim] != 1:
            raise Mixed(
                f"repeats {_dim(dim)}, so that padding comes to stand among real rows",
                "use repeat_interleave, or a dimension of its own",
            )


def repeat_interleave(call: Call, roles: Roles) -> None:
    if not isinstance(call.values.get("repeats"), int):
        raise Mixed(
            "repeats rows as often as a tensor says, so their number depends on what is in the "
            "batch, padding included",
            "index by the request of each token, as in x[row_requests.clamp(min=0)] with the "
            "row_requests of ops.flatten_decode",
        )


def concatenate(call: Call, roles: Roles) -> None:
    tensors = call.values["tensors"]
    (dim,) = _normal([call.values.get("dim", 0)], tensors[0])
    for tensor in tensors[:-1]:
        if dim in roles.dims(tensor):
            raise Mixed(
                f"puts something behind the padding of {_dim(dim)}",
                "concatenate along another dimension, or put what does not grow in front",
            )


def pad(call: Call, roles: Roles) -> None:
    tensor, pad = call.values["self"], call.values["pad"]
    repeats = call.values.get("mode", "constant") != "constant"
    for dim in roles.dims(tensor):
        at = 2 * (tensor.dim() - 1 - dim)
        before, behind = pad[at : at + 2] if at < len(pad) else (0, 0)
        if repeats and (before or behind):
            raise Mixed(f"repeats entries at the ends of {_dim(dim)}, padding among them", _LAST)
        if behind > 0:
            raise Mixed(
                f"puts something behind the padding of {_dim(dim)}", "pad in front, or outside"
            )


def normalize(call: Call, roles: Roles) -> None:
    tensor = call.values["input"]
    count = len(call.values["normalized_shape"])
    for dim in roles.dims(tensor):
        if dim >= tensor.dim() - count:
            raise Mixed(f"normalizes over {_dim(dim)}, so padding counts too", _ELSEWHERE)


def batch_norm(call: Call, roles: Roles) -> None:
    if call.values["training"] is not False or call.values["running_mean"] is None:
        raise Mixed("normalizes over the batch, so padding counts too", "use its eval mode")
    leading_only(-1)(call, roles)


def leading_only(spatial: int) -> Rule:
    """The last ``spatial`` dimensions of the input, and all of the weights, are mixed."""

    def rule(call: Call, roles: Roles) -> None:
        name = "input" if "input" in call.values else "self"
        tensor = call.values[name]
        mixed = tensor.dim() - 1 if spatial < 0 else spatial
        grown = [dim for dim in roles.dims(tensor) if dim >= tensor.dim() - mixed]
        weight = call.values.get("weight")
        if grown or (weight is not None and roles.dims(weight)):
            raise Mixed("works across a dimension that grows, so padding takes part", _ELSEWHERE)

    return rule


def attention(call: Call, roles: Roles) -> None:
    query, key = call.values["query"], call.values["key"]
    if any(dim >= key.dim() - 2 for dim in roles.dims(key)):
        raise Mixed(
            "attends to keys along a dimension that grows, so padding is attended to",
            "make the batch a dimension of its own, or use attention by request",
        )
    if call.values.get("is_causal") and query.dim() - 2 in roles.dims(query):
        raise Mixed("masks causally along a dimension that grows", "give a mask")


def index(call: Call, roles: Roles) -> None:
    for index in call.values["indices"]:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            on_host(call, roles)


def gather(call: Call, roles: Roles) -> None:
    source, index = call.values["self"], call.values["index"]
    (dim,) = _normal([call.values["dim"]], source)
    _check_aligned(source, index, dim, roles, "reads")


def scatter(call: Call, roles: Roles) -> None:
    target, index, source = call.values["self"], call.values["index"], call.values.get("src")
    (dim,) = _normal([call.values["dim"]], target)
    if dim in roles.dims(target) or dim in roles.dims(index):
        raise Mixed(f"scatters across {_dim(dim)}, so padding may hit real rows", _ELSEWHERE)
    _check_aligned(target, index, dim, roles, "writes")
    for other in roles.dims(index):
        if roles.size(target.shape[other]) != roles.size(index.shape[other]):
            raise Mixed("writes padding rows to what does not grow", _ELSEWHERE)
    if isinstance(source, Tensor):
        _check_aligned(source, index, dim, roles, "reads")


def _check_aligned(tensor: Tensor, index: Tensor, dim: int, roles: Roles, verb: str) -> None:
    for other in roles.dims(tensor):
        if other != dim and roles.size(tensor.shape[other]) != roles.size(index.shape[other]):
            raise Mixed(f"{verb} a part of {_dim(other)}, padding among it", _ELSEWHERE)


def index_write(call: Call, roles: Roles) -> None:
    raise Mixed(
        "scatters rows by index, so padding rows are written too",
        OWN_WRITE,
    )


def puts_in_own_rows(call: Call, roles: Roles) -> bool:
    """Each row of what is put is put in its own row, if the index of rows counts 0, 1, 2, ...

    That index has an entry for each row of the target, and whatever else is put grows in its
    dimension, if in any.
    """
    target, values = call.values["self"], call.values["values"]
    given = [index for index in call.values["indices"] if index is not None]
    rows = call.values["indices"][0]
    if rows is None or roles.dims(target) != (0,) or len(roles.dims(rows)) != 1:
        return False
    if any(index.dtype in (torch.bool, torch.uint8) for index in given):
        return False
    count = roles.size(target.shape[0])
    width = max(index.dim() for index in given)
    # dimensions of what is written: those of the indices together, and those that have no index
    written = width + target.dim() - len(given)
    place = width - rows.dim() + roles.dims(rows)[0]
    for tensor, missing in (
        *((index, width - index.dim()) for index in given),
        (values, written - values.dim()),
    ):
        sizes = {missing + dim: roles.size(size) for dim, size in enumerate(tensor.shape)}
        grown = {missing + dim for dim in roles.dims(tensor)}
        if not grown <= {place} or sizes.get(place, 1) not in (1, count):
            return False
    return roles.size(rows.shape[roles.dims(rows)[0]]) == count


def search(sorted_in: str) -> Rule:
    def rule(call: Call, roles: Roles) -> None:
        boundaries = call.values[sorted_in]
        if boundaries.dim() - 1 in roles.dims(boundaries):
            raise Mixed(
                "searches among entries of the batch, padding among them",
                "use ops.flatten_decode for the request of a token",
            )

    return rule


def is_in(call: Call, roles: Roles) -> None:
    tests = call.values.get("test_elements")
    if isinstance(tests, Tensor) and roles.dims(tests):
        raise Mixed("searches among entries of the batch, padding among them", _ELSEWHERE)


def diagonal(call: Call, roles: Roles) -> None:
    tensor = call.values["self"]
    dims = [call.values.get("dim1", 0), call.values.get("dim2", 1)]
    if set(_normal(dims, tensor)) & set(roles.dims(tensor)):
        raise Mixed("takes the diagonal of a dimension that grows", _ELSEWHERE)


def unfold(call: Call, roles: Roles) -> None:
    tensor = call.values["self"]
    if _normal([call.values["dimension"]], tensor)[0] in roles.dims(tensor):
        raise Mixed("takes windows of a dimension that grows", _ELSEWHERE)


def on_host(call: Call, roles: Roles) -> None:
    raise Mixed(
        "makes a size or a number of what is in the batch, padding included",
        "use a mask and keep the size",
    )


def _normal(dims: Sequence[int], tensor: Tensor) -> list[int]:
    return [dim % max(1, tensor.dim()) for dim in dims]


def _dim(dim: int) -> str:
    return f"dimension {dim}, which grows with the batch"
