"""Other people's kernels that ``mtpgraph bench indexer`` measures beside ours.

None is a dependency. Each is looked for by import, in the packages that contain it, and in the
folder given with ``--peers``; one that is not there, or does not load, is named with the reason.
"""

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import ops
from .bench_graph import first_line

WORKSPACE_BYTES = 1 << 20


@dataclass(frozen=True)
class _Source:
    """A module to import, or a library that a package brings."""

    module: str
    library: str = ""
    package: str = ""
    ops: str = ""


SOURCES = {
    "DeepGEMM": _Source("deep_gemm"),
    "TokenSpeed": _Source("tvm_ffi", "dsv4_attention.so", "tokenspeed_kernel"),
    "vLLM": _Source("", "_C_stable_libtorch.abi3.so", "vllm", "_C"),
    "FlashMLA": _Source("flash_mla"),
    "FA3": _Source("", "_vllm_fa3_C.abi3.so", "vllm", "_vllm_fa3_C"),
}


@dataclass
class Peers:
    """What was found, by name: a module, or the ops that a library registered."""

    found: dict[str, Any] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)

    def get(self, name: str) -> Any:
        """The peer, None where it is absent."""
        return self.found.get(name)


def find_peers(folder: Path | None, skip: Sequence[str] = ()) -> Peers:
    """Load every peer that is there; ``folder`` comes before what is installed."""
    peers = Peers()
    # it stays there: what a peer imports at its first call is in the folder too
    if folder is not None and str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    for name, source in SOURCES.items():
        if name in skip:
            peers.absent[name] = "skipped"
            continue
        try:
            peers.found[name] = _load(source, folder)
        except Exception as error:  # a foreign binary fails in ways of its own
            peers.absent[name] = first_line(error)
    return peers


def _load(source: _Source, folder: Path | None) -> Any:
    if not source.library:
        return importlib.import_module(source.module)
    library = _find_library(source, folder)
    if source.module:
        return importlib.import_module(source.module).load_module(str(library))
    torch.ops.load_library(str(library))
    return getattr(torch.ops, source.ops)


def _find_library(source: _Source, folder: Path | None) -> Path:
    places = [folder] if folder is not None else []
    # the package itself is not imported: vLLM alone takes half a minute
    spec = importlib.util.find_spec(source.package)
    places += [Path(place) for place in (spec.submodule_search_locations or [])] if spec else []
    for place in places:
        for library in sorted(place.rglob(source.library)):
            return library
    where = f"--peers {folder} or " if folder is not None else ""
    raise FileNotFoundError(f"no {source.library} in {where}package {source.package}")


def deep_gemm_logits(
    deep_gemm: Any,
    q: Tensor,
    weights: Tensor,
    k_cache: Tensor,
    block_tables: Sequence[Tensor],
    lens: Tensor,
    width: int,
    *,
    apart: bool,
) -> Callable[[int], Tensor]:
    """DeepGEMM's paged logits.

    Args:
        q: [num_reqs, next_n, num_heads, head_dim]; flattened, a request is one token
        block_tables: of each input set, [num_reqs, max_blocks]
        lens: int32 [num_reqs, next_n], keys that each token sees
        apart: the schedule is made once, ahead
    """
    cache = k_cache.view(k_cache.shape[0], 64, 1, -1)
    slots = deep_gemm.get_num_sms() // (2 if q.shape[1] == 4 else 1)

    def schedule() -> Tensor:
        return deep_gemm.get_paged_mqa_logits_metadata(lens, 64, slots)

    ahead = schedule() if apart else None

    def call(i: int) -> Tensor:
        return deep_gemm.fp8_fp4_paged_mqa_logits(
            (q, None),
            cache,
            weights,
            lens,
            block_tables[i],
            schedule() if ahead is None else ahead,
            width,
            clean_logits=False,
            logits_dtype=torch.float32,
        )

    return call


def topk_selectors(
    peers: Peers, num_rows: int, width: int, topk: int, device: torch.device
) -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    """Top-k kernels that take such rows: (logits, row_lens) -> int32 [num_rows, topk]."""
    found: dict[str, Callable[..., Any]] = {}
    tokenspeed, vllm = peers.get("TokenSpeed"), peers.get("vLLM")
    if vllm is not None:
        found["vLLM per row"] = functools.partial(_vllm_per_row, vllm)
    if topk in (512, 1024, 2048):
        if tokenspeed is not None:
            # rows of one query token each
            found["TokenSpeed"] = lambda *args: tokenspeed.dsv4_persistent_topk(*args, 1)
        if vllm is not None:
            found["vLLM persistent"] = lambda *args: vllm.persistent_topk(*args)
        if vllm is not None and num_rows <= 32 and width % 4 == 0:
            found["vLLM cooperative"] = lambda *args: vllm.cooperative_topk(*args)
    return {name: _selector(call, num_rows, width, topk, device) for name, call in found.items()}


def _vllm_per_row(
    vllm: Any, logits: Tensor, row_lens: Tensor, out: Tensor, _workspace: Tensor, topk: int, _: int
) -> None:
    # rows of one query token each
    vllm.top_k_per_row_decode(
        logits, 1, row_lens, out, len(out), logits.stride(0), logits.stride(1), topk
    )


def _selector(
    call: Callable[..., Any], num_rows: int, width: int, topk: int, device: torch.device
) -> Callable[[Tensor, Tensor], Tensor]:
    """A kernel that writes into an output, with a workspace that it wants zeroed once."""
    out = torch.empty(num_rows, topk, dtype=torch.int32, device=device)
    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)

    def select(logits: Tensor, row_lens: Tensor) -> Tensor:
        call(logits, row_lens, out, workspace, topk, width)
        return out

    return select


def torch_topk(logits: Tensor, row_lens: Tensor, topk: int) -> Tensor:
    """``torch.topk``, which knows no row lengths: for rows that are full."""
    return logits.topk(topk, dim=1, sorted=False).indices


def fa3_decode(
    fa3: Any, q: Tensor, kv_cache: Tensor, slots: Sequence[Tensor], scale: float, latent: int
) -> Callable[[int], Tensor]:
    """FA3 with page size 1, whose block table is the slots that each token selected.

    Args:
        q: [num_tokens, num_heads, latent + rope]
        slots: of each input set, int32 [num_tokens, topk]
    """
    q_latent, q_rope = q[..., :latent].contiguous(), q[..., latent:].contiguous()
    keys = kv_cache[..., latent:].view(-1, 1, 1, kv_cache.shape[2] - latent)
    values = kv_cache[..., :latent].view(-1, 1, 1, latent)
    num_tokens, topk = slots[0].shape
    starts = torch.arange(num_tokens + 1, dtype=torch.int32, device=q.device)
    lens = torch.full((num_tokens,), topk, dtype=torch.int32, device=q.device)

    def call(i: int) -> Tensor:
        return fa3.fwd(
            *(q_rope, keys, values, None, None, q_latent, None),
            *(starts, None, None, None, lens, 1, topk, slots[i]),
            # no batch index, no left pad, no rotary, no descales
            *(None,) * 8,
            *(scale, True, -1, -1, 0.0, True),
            # no scheduler metadata, splits and packing chosen by FA3
            *(None, 0, None, 0, None, 1, 0, None),
        )[0]

    return call


def flash_mla_decode(
    flash_mla: Any, q: Tensor, fp8_cache: Tensor, slots: Sequence[Tensor], scale: float, apart: bool
) -> Callable[[int], Tensor]:
    """FlashMLA's sparse decode over its cache of 656 bytes a token.

    Args:
        fp8_cache: uint8 [num_blocks, block_size, 656]
        apart: the split is planned once, ahead
    """
    queries, cache = q.unsqueeze(1), fp8_cache.unsqueeze(2)
    indices = [each.unsqueeze(1) for each in slots]
    ahead = flash_mla.get_mla_metadata()[0] if apart else None

    def call(i: int) -> Tensor:
        plan = flash_mla.get_mla_metadata()[0] if ahead is None else ahead
        out, _ = flash_mla.flash_mla_with_kvcache(
            queries, cache, None, None, 512, plan, None, scale, False, True, indices[i]
        )
        return out.squeeze(1)

    return call


def flash_mla_forward(
    flash_mla: Any, q: Tensor, kv_cache: Tensor, slots: Sequence[Tensor], scale: float
) -> Callable[[int], Tensor]:
    """FlashMLA's sparse prefill, over the bf16 cache."""
    cache = kv_cache.view(-1, 1, kv_cache.shape[2])
    indices = [each.unsqueeze(1) for each in slots]
    return lambda i: flash_mla.flash_mla_sparse_fwd(q, cache, indices[i], scale)[0]


def fp8_kv_cache(kv_cache: Tensor, latent: int = 512) -> Tensor:
    """FlashMLA's cache of the same keys: uint8 [num_blocks, block_size, 656].

    A token is ``latent`` fp8 codes, an fp32 scale for every 128 of them, and the rotary part.
    """
    num_blocks, block_size, width = kv_cache.shape
    token_bytes = latent + latent // 32 + 2 * (width - latent)
    cache = torch.empty(
        num_blocks, block_size, token_bytes, dtype=torch.uint8, device=kv_cache.device
    )
    slots = torch.arange(num_blocks * block_size, device=kv_cache.device)
    ops.kv_cache_write_(kv_cache.flatten(0, 1), slots, cache)
    return cache


def fp8_kv_values(tokens: Tensor, latent: int = 512) -> Tensor:
    """fp32 [n, latent + rope] of tokens of that cache, uint8 [n, 656]."""
    codes = tokens[:, :latent].contiguous().view(torch.float8_e4m3fn).float()
    scales = tokens[:, latent : latent + latent // 32].contiguous().view(torch.float32)
    rope = tokens[:, latent + latent // 32 :].contiguous().view(torch.bfloat16).float()
    values = codes.unflatten(1, (-1, 128)) * scales.unsqueeze(2)
    return torch.cat([values.flatten(1), rope], dim=1)
