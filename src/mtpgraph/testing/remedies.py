"""What to write instead: of a graph break, of what recompiles, of what mixes rows with padding."""

import ast
import dataclasses
import functools
import linecache
import re
from collections.abc import Sequence

# what Dynamo's message must hold (any of it), a short name, what to write instead
_BREAKS: Sequence[tuple[str, str, str]] = (
    (
        r"Data-dependent (branching|assertion)|generic_jump|data-dependent branch",
        "data-dependent branch",
        "keep both results and choose on the device: torch.where(condition, a, b), or torch.cond "
        "if a side is costly; pass what the host already knows as a Python bool",
    ),
    (
        r"Tensor\.item\(\)|_local_scalar_dense",
        "a tensor's value read on the host",
        "leave the value in a 0-d tensor and compute with that; without .item(), int(), float() "
        "or bool() of a tensor. A size that the host knows belongs in an argument",
    ),
    (
        r"Tensor\.tolist\(\)",
        "a tensor's values read on the host",
        "index with the tensor itself (torch.index_select, torch.gather) instead of .tolist()",
    ),
    (
        r"aten\.nonzero|nonzero\b",
        "a shape that depends on data",
        "keep the shape: torch.where(mask, x, fill) with three arguments instead of x[mask] or "
        "nonzero(), or torch.nonzero_static(mask, size=n)",
    ),
    (
        r"aten\.(masked_select|index\.Tensor)|boolean",
        "a shape that depends on data",
        "keep the shape: torch.where(mask, x, fill) instead of x[mask]",
    ),
    (
        r"Dynamic shape operator|Data[- ]dependent operator|dynamic output shape",
        "a shape that depends on data",
        "keep the shape: mask with torch.where, or write into a tensor of the largest size",
    ),
    (
        r"does not support running with fake tensors|no fake impl|fake impl",
        "an op without a fake",
        'register its shapes: @torch.library.register_fake("namespace::op") with a function that '
        "returns torch.empty of the right shape and dtype",
    ),
    (
        r"builtin `?print|\bprint\b",
        "print inside the graph",
        "print outside of the compiled function, or delete the line; what is needed for debugging "
        "can be returned",
    ),
    (
        r"logging|Logger",
        "logging inside the graph",
        "log outside of the compiled function, or only `if not torch.compiler.is_compiling()`",
    ),
    (
        r"warnings?\.warn",
        "a warning inside the graph",
        "check and warn before the compiled function is called",
    ),
    (
        r"compiler\.disable|_dynamo\.disable|disallow_in_graph",
        "a function kept out of the graph",
        "take torch.compiler.disable off, or make the function an op: torch.library.custom_op "
        "with register_fake",
    ),
    (
        r"_dynamo\.graph_break\(\)",
        "an explicit graph break",
        "delete the call of torch._dynamo.graph_break()",
    ),
    (
        r"numpy|np\.|\bndarray\b",
        "numpy inside the graph",
        "use the torch function of the same name, or make the code an op: torch.library.custom_op "
        "with register_fake",
    ),
    (
        r"[Gg]enerator",
        "a generator",
        "build a list instead of yielding: [f(x) for x in xs], or a plain loop",
    ),
    (
        r"builtin `?(open|input)\b|TextIOWrapper|BufferedReader",
        "input or output inside the graph",
        "read and write files outside of the compiled function and pass the values in",
    ),
    (
        r"recompile limit|cache_size_limit",
        "too many recompiles",
        "see why the function recompiles with mtpgraph.testing.assert_no_recompiles",
    ),
    (
        r"marked as skipped|Failed to trace builtin|Unsupported (function|method) call|"
        r"C/C\+\+|pybind|[Uu]nsupported builtin",
        "a call that Dynamo cannot trace",
        "call it outside of the compiled function and pass the result in, or make it an op: "
        "torch.library.custom_op with register_fake",
    ),
    (
        r"context manager",
        "a context manager that Dynamo cannot trace",
        "enter it outside of the compiled function",
    ),
    (
        r"[Oo]bserved exception|Exception raised",
        "an exception inside the graph",
        "check inputs before the compiled function is called",
    ),
)


# an aside that holds parentheses of its own
_EXAMPLE = r"\(e\.g\.(?:[^()]|\([^()]*\))*\)"


def of_break(message: str) -> tuple[str, str, str]:
    """Kind, reason and remedy for what Dynamo says of a graph break."""
    head, _, rest = message.partition("\n")
    explanation = re.search(r"Explanation: (.*?)(?=\n\s*Hint:|\n\n|\Z)", rest, re.DOTALL)
    why = " ".join(explanation[1].split()) if explanation else ""
    why = re.sub(rf" {_EXAMPLE}", "", why)
    reason = ": ".join(part for part in (head.strip().rstrip("."), why) if part)
    hint = re.search(r"Hint: (.*?)(?=\n\s*Hint:|\n\n|\Z)", rest, re.DOTALL)
    # the advice of torch may name what does not apply: hints are no evidence of the cause
    evidence = re.sub(r"Hint: .*?(?=\n\s*Hint:|\n\n|\Z)", "", message, flags=re.DOTALL)
    evidence = re.sub(rf"please visit: \S+|{_EXAMPLE}", "", evidence)
    for pattern, kind, remedy in _BREAKS:
        if re.search(pattern, evidence):
            return kind, reason, remedy
    own = "move it out of the compiled function, or make it an op with torch.library.custom_op"
    return "graph break", reason, " ".join(hint[1].split()) if hint else own


@dataclasses.dataclass(frozen=True)
class Guard:
    """The check that failed on the second call.

    Attributes:
        text: what Dynamo checks, as a user would write it
        name: the argument or variable that it is about; empty if none is named
        file, line: the user's line that made Dynamo check, as far as the message says it
    """

    text: str
    name: str
    file: str
    line: int


def read_guard(reason: str) -> Guard:
    """The guard in a reason for a recompile."""
    # "0/1: n == 3    # if n > 3:  # model.py:12 in step (torch's own line)"
    reason = re.sub(r"^\d+/\d+(_\d+)?: ", "", reason.strip())
    text, _, comment = reason.partition("  # ")
    where = re.findall(r"# (\S+\.py):(\d+) in ", f"# {comment}")
    file, line = where[0] if where else ("", 0)
    name = re.search(r"L?\[?'?tensor '([A-Za-z_]\w*)", text) or re.search(
        r"(?:L\['|\b(?:len|type)\(|\bnot |\"|^\s*(?:[\d.]+ [<=>!]+ )?)([A-Za-z_]\w*)", text
    )
    found = name[1] if name and not name[1].startswith(("___", "GLOBAL_STATE")) else ""
    return Guard(" ".join(text.split()), found, file, int(line))


def place_of_guard(guard: Guard, function: tuple[str, str, int]) -> tuple[str, int]:
    """The line that a guard goes back to: named by it, or the first use of its variable."""
    name, file, first = function
    if guard.line and (not guard.file or file.endswith(guard.file.rpartition("/")[2])):
        return file, guard.line
    return file, _first_use(file, name, first, guard.name) or first


@functools.lru_cache(maxsize=64)
def _first_use(file: str, function: str, first: int, name: str) -> int:
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return 0
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        start = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
        if start == first or node.lineno == first:
            body = node.body if isinstance(node.body, list) else [node.body]
            found += [
                use.lineno
                for statement in body
                for use in ast.walk(statement)
                if isinstance(use, ast.Name) and use.id == name
            ]
    return min(found, default=0)


_SIZES = (
    "pad to a few sizes outside of the compiled function (mtpgraph.compile(fn, sizes=...)), or "
    "say that the size changes before the first call: torch.compile(fn, dynamic=True) or "
    "torch._dynamo.mark_dynamic({name}, {dim})"
)

# what the guard must hold, a short name, what to write instead; {name} is filled in
_RECOMPILES: Sequence[tuple[str, str, str]] = (
    (r"size mismatch at index (?P<dim>\d+)", "a size that changed", _SIZES),
    (
        r"^2 <= |size\(\)\[\d+\] == 1\b|0/1 specialization",
        "a size of 0 or 1",
        "a size of 1 is compiled apart: pad it to 2 or more (mtpgraph.compile does), or call "
        "torch._dynamo.decorators.mark_unbacked({name}, dim) before the first call",
    ),
    (r"size\(\)\[(?P<dim>\d+)\]", "a size that changed", _SIZES),
    (
        r"dtype mismatch",
        "a dtype that changed",
        "give {name} one dtype in every call, or convert it before the compiled function",
    ),
    (
        r"stride mismatch|stride\(\)|storage_offset",
        "a memory layout that changed",
        "give {name} one layout in every call: .contiguous() outside of the compiled function",
    ),
    (
        r"rank mismatch",
        "a number of dimensions that changed",
        "give {name} the same number of dimensions in every call (unsqueeze outside), or compile "
        "two functions",
    ),
    (
        r"requires_grad mismatch",
        "requires_grad that changed",
        "call it under torch.no_grad() with detached tensors in every call",
    ),
    (
        r"device mismatch|device index|dispatch key",
        "a device or tensor kind that changed",
        "make {name} on the same device and as the same kind of tensor in every call",
    ),
    (
        r"GLOBAL_STATE",
        "a global setting that changed",
        "use the same grad mode, autocast and deterministic settings around every call",
    ),
    (
        r"Duplicate tensor",
        "one tensor passed twice",
        "pass the same tensor in the same places in every call, or different tensors in every call",
    ),
    (
        r"___check_type_id|type\(|isinstance|is None|is not None",
        "another type in the same place",
        "pass the same types in every call (a tensor of no entries rather than None), or compile "
        "two functions",
    ),
    (
        r"___check_obj_id|\bis\b|id\(",
        "an object that was replaced",
        "keep one object over all calls and change what it holds in place",
    ),
    (
        r"len\(|set\(|keys\(|dict",
        "a container that grew or shrank",
        "pass containers of the same length and keys in every call",
    ),
    (
        r"\w+\.[\w.]+ (==|!=|<|>|<=|>=)",
        "a number kept in an attribute",
        "keep what changes from call to call in a tensor buffer that is updated in place, not in a "
        "Python number",
    ),
    (
        r"( != | < | > | <= | >= )",
        "the other side of a branch on a number",
        "each side of a branch on {name} is compiled apart: choose with torch.where on a tensor, "
        "or allow one more with max_recompiles",
    ),
    (
        r" == ",
        "a Python number that changed",
        "pass {name} as a 0-d tensor, or compile with dynamic=True if it is an int; a float is "
        "always a constant of the graph",
    ),
)


def of_recompile(guard: Guard, function: str) -> tuple[str, str, str]:
    """Kind, reason and remedy for a guard that failed."""
    text = guard.text or "torch names no guard"
    for pattern, kind, remedy in _RECOMPILES:
        match = re.search(pattern, text)
        if match:
            dim = match.groupdict().get("dim") or "dim"
            name = guard.name or "it"
            reason = f"{function} was compiled again for {kind}; the guard that failed: {text}"
            return kind, reason, remedy.format(name=name, dim=dim)
    reason = f"{function} was compiled again; the guard that failed: {text}"
    return "recompile", reason, "keep what the guard names the same in every call"


_WRITE = (
    "give padding rows an index that writes nothing: pad the index with -1, Batched(pad=-1), and "
    "write with an op that leaves negative indices out, as ops.kv_cache_write_ does; in an op of "
    "your own, drop the rows whose index is negative"
)
_COPY = (
    "write real rows alone: with an op that takes an index for each row and leaves negative ones "
    "out, as ops.kv_cache_write_ does; or return the rows and store them outside of the step"
)
_REDUCE = (
    "reduce within a row only; over the batch, replace padding first: torch.where(is_real, x, "
    "fill), and divide by the number of real rows, not by the size of the batch"
)
_COUNT = "take the number of real rows from a tensor, (seq_lens > 0).sum(), not from x.shape[0]"
_REST = (
    "compute each row from its own inputs, replace padding with torch.where before rows meet, or "
    "capture exact sizes"
)

# names of ops, without what says that they write, and what to write instead
_ROWS: Sequence[tuple[str, str]] = (
    ("index_put index_copy index_add index_fill index_reduce scatter scatter_add "
     "scatter_reduce put masked_scatter", _WRITE),
    ("copy fill zero slice_scatter select_scatter", _COPY),
    (
        "bmm mm mv dot matmul addmm addmv addbmm baddbmm linear convolution",
        "set padding rows to 0 with torch.where(is_real, x, 0) before they meet real rows; a "
        "product with a mask keeps NaN",
    ),
    ("sum mean max min amax amin aminmax any all norm linalg_vector_norm var var_mean std "
     "std_mean prod argmax argmin logsumexp median nanmedian nansum nanmean mode kthvalue "
     "count_nonzero", _REDUCE),
    (
        "native_layer_norm native_group_norm native_batch_norm _fused_rms_norm "
        "_native_batch_norm_legit cudnn_batch_norm",
        "normalise within a row only: over the last dimensions, or with running statistics (eval "
        "mode), not over the batch",
    ),
    (
        "cumsum cumprod cummax cummin logcumsumexp sort argsort topk softmax log_softmax "
        "safe_softmax flip roll",
        "run it along a dimension within a row, not along the batch; or put padding where it "
        "cannot reach real rows (at the end, with a fill that sorts last)",
    ),
    # these keep rows apart: a number that they are given follows the size of the batch
    ("mul div add sub rsub pow sqrt full full_like arange scalar_tensor lift_fresh clamp "
     "true_divide floor_divide remainder", _COUNT),
    (
        "scaled_dot_product_attention _scaled_dot_product_attention_math "
        "_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu "
        "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention",
        "let a token see the keys of its own request alone: give each request a row of its own "
        "along the batch, or mask with the lengths",
    ),
)  # fmt: skip
_REMEDIES = {name.strip("_"): remedy for names, remedy in _ROWS for name in names.split()}


def of_row_mixing(op: str, *, writes: bool = False) -> str:
    """What to write instead of an op through which padding reached real rows.

    Args:
        op: its name, as ``aten.add_.Tensor``
        writes: it is a custom op that writes an argument
    """
    if writes:
        return _WRITE
    namespace, _, name = op.partition(".")
    name = name.partition(".")[0]
    return _REMEDIES.get(name.strip("_"), _REST) if namespace == "aten" else _REST
