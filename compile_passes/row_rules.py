"""What each op does to rows: the table that ``check_row_independence`` goes by.

Everywhere in a padded step the real entries of a dimension that grows stand in front. A rule says
whether an op keeps it so: whether the entries that a batch without padding would have still hold
what they would have held, whatever the padding behind them holds. An op without a rule, called on
something that grows, is not known to.
"""

import torch

from . import _compat
from . import row_effects as effects
from .roles import Roles
from .row_effects import Rule
from .row_views import squeeze, view
from .rows import Call, is_symbolic


def is_pointwise(call: Call) -> bool:
    """Each element of the result depends on the elements at its own place alone."""
    op = call.op
    assert op is not None
    if torch.Tag.pointwise in op.tags or call.name in _POINTWISE:
        return True
    name = base_name(call)
    if name != call.name:
        functional = getattr(getattr(torch.ops.aten, name, None), op._overloadname, None)
        return name in _POINTWISE or (
            functional is not None and torch.Tag.pointwise in functional.tags
        )
    return False


def base_name(call: Call) -> str:
    """The name of an op without the underscore that says it writes."""
    name = call.name
    return name[:-1] if name.endswith("_") and not name.endswith("__") else name


def rule_of(call: Call) -> Rule | None:
    """The rule for an op; None if nothing is known of it."""
    if call.op is None or call.op.namespace != "aten":
        return None
    return effects.keep if is_pointwise(call) else RULES.get(base_name(call))


def numbers_that_grow(call: Call, roles: Roles) -> list[str]:
    """Arguments that are, or hold, a number that follows the batch and is no size."""
    allowed = _SIZES.get(base_name(call), frozenset({"size"}))
    return [
        name
        for name, value in call.values.items()
        if name not in allowed
        and any(is_symbolic(leaf) and roles.grows(leaf) for leaf in _compat.tree_leaves(value))
    ]


_SIZES = {
    name: frozenset(arguments)
    for name, *arguments in (
        ("arange", "end"),
        ("slice", "end"),
        ("native_group_norm", "N"),
        ("empty_strided", "size", "stride"),
        ("new_empty_strided", "size", "stride"),
        ("as_strided", "size", "stride"),
        ("_reshape_alias", "size", "stride"),
        ("split", "split_size"),
        ("split_with_sizes", "split_sizes"),
        ("repeat", "repeats"),
    )
}
"""Arguments that are sizes, of ops whose argument ``size`` is not the only one."""


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# no tag says so in every supported version
_POINTWISE = _names(
    """_to_copy copy fill masked_fill floor_divide lift_fresh lift_fresh_copy native_dropout
    bernoulli rand_like randn_like randint_like exponential normal uniform random log_normal
    geometric cauchy zero leaky_relu softplus gelu celu elu selu hardtanh hardswish hardsigmoid
    log_sigmoid_forward threshold prelu _prelu_kernel where polar view_as_real view_as_complex
    complex"""
)
# a scan goes from the front, where real entries are
_ROWWISE = _names(
    """alias detach permute transpose t unsqueeze expand tril triu stack
    zeros ones empty full arange scalar_tensor rand randn randint zeros_like ones_like empty_like
    full_like new_zeros new_ones new_empty new_full empty_strided new_empty_strided
    index_select embedding empty_permuted real imag cumsum cumprod cummax cummin logcumsumexp"""
)
_REDUCING = _names(
    """sum mean prod amax amin max min argmax argmin any all var std var_mean std_mean
    logsumexp linalg_vector_norm norm nansum nanmean median nanmedian mode count_nonzero aminmax
    kthvalue"""
)
_ALONG = _names(
    """_softmax _log_softmax softmax log_softmax _safe_softmax sort topk flip roll glu
    linalg_cross"""
)

RULES: dict[str, Rule] = {
    **dict.fromkeys(_ROWWISE, effects.keep),
    **dict.fromkeys(_REDUCING, effects.reduce),
    **dict.fromkeys(_ALONG, effects.along),
    **dict.fromkeys(("view", "_unsafe_view", "reshape", "_reshape_alias"), view),
    "squeeze": squeeze,
    **dict.fromkeys(("split", "split_with_sizes", "unsafe_split", "unbind"), effects.split),
    **dict.fromkeys(("mm", "bmm", "_int_mm", "_scaled_mm"), effects.contract("self", "mat2")),
    "mv": effects.contract("self", "vec"),
    "matmul": effects.contract("self", "other"),
    "dot": effects.contract("self", "tensor"),
    "addmm": effects.contract("mat1", "mat2"),
    "addmv": effects.contract("mat", "vec"),
    "baddbmm": effects.contract("batch1", "batch2"),
    "linear": effects.linear,
    "slice": effects.slice,
    "select": effects.select,
    "repeat": effects.repeat,
    "repeat_interleave": effects.repeat_interleave,
    "cat": effects.concatenate,
    **dict.fromkeys(("pad", "constant_pad_nd"), effects.pad),
    **{
        f"{how}_pad{n}d": effects.leading_only(n)
        for how in ("reflection", "replication")
        for n in (1, 2, 3)
    },
    **dict.fromkeys(("native_layer_norm", "_fused_rms_norm"), effects.normalize),
    "_native_batch_norm_legit_no_training": effects.leading_only(-1),
    **dict.fromkeys(("native_batch_norm", "cudnn_batch_norm"), effects.batch_norm),
    "native_group_norm": effects.leading_only(-1),
    "convolution": effects.leading_only(-1),
    **dict.fromkeys(("avg_pool2d", "max_pool2d_with_indices"), effects.leading_only(2)),
    **dict.fromkeys(("_adaptive_avg_pool2d", "adaptive_max_pool2d"), effects.leading_only(2)),
    **dict.fromkeys(
        (
            "scaled_dot_product_attention",
            "_scaled_dot_product_attention_math",
            "_scaled_dot_product_flash_attention",
            "_scaled_dot_product_flash_attention_for_cpu",
            "_scaled_dot_product_efficient_attention",
            "_scaled_dot_product_cudnn_attention",
            "_scaled_dot_product_fused_attention_overrideable",
        ),
        effects.attention,
    ),
    "index": effects.index,
    "gather": effects.gather,
    **dict.fromkeys(("scatter", "scatter_add", "scatter_reduce"), effects.scatter),
    **dict.fromkeys(
        ("index_put", "index_copy", "index_add", "index_fill", "index_reduce"), effects.index_write
    ),
    "searchsorted": effects.search("sorted_sequence"),
    "bucketize": effects.search("boundaries"),
    "isin": effects.is_in,
    "diagonal": effects.diagonal,
    "unfold": effects.unfold,
    **dict.fromkeys(("_local_scalar_dense", "nonzero", "masked_select"), effects.on_host),
}
"""The rule of each op of aten that is not pointwise, by name."""
