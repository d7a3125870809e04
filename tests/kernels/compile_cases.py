"""Compile every launch for every architecture, on a machine without a card.

Each case is the arguments of one op on the ``meta`` device, which have shapes, strides and
alignment but no memory. ``launch`` runs as it is: the kernels are compiled with the options, the
constants and the specialisation that it chooses, and are not launched.

    python -m tests.kernels.compile_cases [--full] [NAME ...]

prints one JSON line per kernel: shared memory in bytes, and with Triton's own ``cuobjdump``
registers and stack (which is where spilled registers go, in bytes) per thread. It needs an
environment without TRITON_INTERPRET.
"""

import concurrent.futures
import functools
import importlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Shared memory that one program may have, in bytes. A launch for 8.x serves 8.6 and 8.9 as well.
MAX_SHARED = {80: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}


# For 9.0, other sizes of kernels that other cases compile: under --full alone, as they take long.
RARE = {
    "indexer_topk, one block, more rows",
    "indexer_topk, a large block, many rows",
    "indexer_topk, long rows, many of them",
    "indexer_topk of bf16, long rows",
    "sparse_mla_decode early combination",
    "sparse_mla_decode unsplit, few heads",
    "sparse_mla_decode fp8, many heads",
    "sparse_mla_decode fp8, whole lines",
    "sparse_mla_decode fp8 unsplit, few heads",
    "sparse_mla_decode fp8 shared",
    "indexer_logits, eight rows at once, blocks of 32",
    "indexer_logits of some requests",
    "indexer_select",
}


class Case(NamedTuple):
    """The keyword arguments of the op whose kernel is ``mtpgraph.kernels.<kernel>``, and the
    architectures for which they are worth the time of a compilation."""

    name: str
    kernel: str
    make: Callable[[], dict[str, Any]]
    archs: tuple[int, ...] = tuple(MAX_SHARED)

    @property
    def is_rare(self) -> bool:
        return self.name in RARE


CASES: list[Case] = []

BF16 = torch.bfloat16
# what a CUDA address looks like: an int that needs 64 bits
ADDRESS = 1 << 46


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def int32(*shape: int) -> Tensor:
    return meta(*shape, dtype=torch.int32)


# Metadata and copies

CASES += [
    Case(
        "flatten_decode",
        "flatten_decode",
        lambda: {"query_start_loc": int32(9), "seq_lens": int32(8), "num_tokens": 17},
    ),
    Case(
        "has_initial_state",
        "has_initial_state",
        lambda: {"query_start_loc": int32(9), "seq_lens": int32(8)},
    ),
    Case(
        "expand_block_table",
        "expand_block_table",
        lambda: {"block_table": int32(8, 512), "row_requests": int32(17)},
    ),
    Case(
        "topk_to_slots",
        "topk_to_slots",
        lambda: {
            "topk_indices": int32(17, 2048),
            "block_table": int32(8, 512),
            "row_requests": int32(17),
            "block_size": 64,
        },
    ),
    Case(
        "kv_cache_write",
        "kv_cache_write",
        lambda: {
            "kv": meta(17, 576, dtype=torch.bfloat16),
            "slot_mapping": meta(17, dtype=torch.int64),
            "kv_cache": meta(4096, 64, 576, dtype=torch.bfloat16),
        },
    ),
    *[
        Case(
            f"kv_cache_write fp8 {dtype}",
            "kv_cache_write",
            lambda dtype=dtype: {
                "kv": meta(17, 576, dtype=dtype),
                "slot_mapping": meta(17, dtype=torch.int64),
                "kv_cache": meta(4096, 64, 656, dtype=torch.uint8),
            },
        )
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
    ],
    Case(
        "copy_inputs",
        "copy_inputs",
        lambda: {
            "table": meta(12, 7, dtype=torch.int64),
            "requests": 37,
            "tokens": 74,
            "sources": (ADDRESS,) * 16,
            "grid": (12, 16, 1),
        },
    ),
    *[
        Case(
            f"indexer_cache_write {dtype}",
            "indexer_cache_write",
            lambda dtype=dtype, power_of_two=power_of_two: {
                "k": meta(17, 128, dtype=dtype),
                "slot_mapping": meta(17, dtype=torch.int64),
                "k_cache": meta(4096, 64 * (128 + 4), dtype=torch.uint8),
                "power_of_two_scale": power_of_two,
            },
        )
        for dtype, power_of_two in [(torch.bfloat16, False), (torch.float32, True)]
    ],
    *[
        Case(
            f"reset_states {name}",
            "reset_states",
            lambda state=state: {
                "state": state,
                "state_indices": int32(8),
                "has_initial_state": meta(8, dtype=torch.bool),
            },
        )
        for name, state in [
            ("contiguous", meta(64, 32, 64, 128)),
            ("transposed", meta(64, 128, 3, dtype=torch.bfloat16).transpose(1, 2)[:, :, ::2]),
        ]
    ],
]


# The indexer

CASES += [
    Case(
        name,
        "indexer_topk",
        lambda num_tokens=num_tokens, width=width, topk=topk, dtype=dtype: {
            "logits": meta(num_tokens, width, dtype=dtype),
            "row_lens": int32(num_tokens),
            "topk": topk,
        },
        archs,
    )
    for name, archs, num_tokens, width, topk, *dtypes in [
        ("indexer_topk", (90,), 64, 33, 7),
        ("indexer_topk, one block", tuple(MAX_SHARED), 64, 8192, 2048),
        # these and a topk beyond a block take most shared memory
        ("indexer_topk, the largest block of a row", (120,), 64, 16384, 2048),
        ("indexer_topk, long rows, the largest block", (120,), 64, 65536, 4096),
        # two programs share the registers of a multiprocessor, and four
        ("indexer_topk, one block, many rows", (90,), 256, 4096, 2048),
        ("indexer_topk, one block, more rows", (90,), 1024, 4096, 2048),
        # 32 keys a thread where there are many rows
        ("indexer_topk, a large block, many rows", (90,), 256, 8192, 2048),
        ("indexer_topk, long rows", (80, 90), 64, 131072, 2048),
        ("indexer_topk, long rows, many of them", (90,), 256, 32768, 2048),
        ("indexer_topk, a topk beyond a block", (90, 120), 64, 131072, 12000),
        ("indexer_topk of bf16, one block", (90,), 64, 8192, 2048, torch.bfloat16),
        ("indexer_topk of bf16, long rows", (90,), 64, 131072, 2048, torch.bfloat16),
    ]
    for dtype in dtypes or [torch.float32]
]


# Sparse attention


def _sparse_mla(
    num_tokens: int,
    num_heads: int,
    dtype: torch.dtype = torch.bfloat16,
    head_dim: int = 576,
    latent_dim: int = 512,
    fp8: bool = False,
    num_reqs: int = 8,
) -> dict[str, Any]:
    key_bytes = latent_dim + latent_dim // 128 * 4 + (head_dim - latent_dim) * 2
    return {
        "q": meta(num_tokens, num_heads, head_dim, dtype=dtype),
        "kv_cache": meta(4096, 64, key_bytes, dtype=torch.uint8)
        if fp8
        else meta(4096, 64, head_dim, dtype=dtype),
        "topk_indices": int32(num_tokens, 2048),
        "block_table": int32(num_reqs, 512),
        "query_start_loc": int32(num_reqs + 1),
        "scale": 0.1,
        "latent_dim": latent_dim,
    }


# On 9.0, models' sizes in half precision have a kernel of their own.
CASES += [
    Case(
        "sparse_mla_decode strided",
        "sparse_mla_decode",
        lambda: {**_sparse_mla(8, 64), "q": meta(576, 64, 8, dtype=torch.bfloat16).transpose(0, 2)},
        (80, 90),
    )
]

CASES += [
    Case(
        f"sparse_mla_decode {name}",
        "sparse_mla_decode",
        functools.partial(_sparse_mla, *args),
        archs,
    )
    for name, args, archs in [
        ("split", (8, 16), tuple(MAX_SHARED)),
        ("unsplit", (512, 128), (80, 90, 100)),
        ("early combination", (1, 16), (90,)),
        ("split, whole lines", (8, 128), (90,)),
        ("unsplit, few heads", (512, 16, BF16, 576, 512, False, 512), (90,)),
        ("shared", (512, 16), (90,)),
        ("shared, split", (128, 8), (90,)),
        ("fp16", (8, 64, torch.float16), (80, 90)),
        ("odd dims", (8, 65, torch.float16, 12, 9), (80, 90)),
        ("wide", (8, 32, torch.bfloat16, 1088, 1024), (80, 90)),
        ("fp32", (8, 64, torch.float32), (90, 120)),
        ("fp8", (8, 16, torch.bfloat16, 576, 512, True), tuple(MAX_SHARED)),
        ("fp8, many heads", (8, 64, torch.bfloat16, 576, 512, True), (90,)),
        ("fp8 unsplit", (512, 128, torch.bfloat16, 576, 512, True), (90, 100)),
        ("fp8 unsplit, few heads", (512, 16, BF16, 576, 512, True, 512), (90,)),
        ("fp8 shared", (512, 16, BF16, 576, 512, True), (90,)),
        ("fp8 shared, split", (128, 32, BF16, 576, 512, True), (90,)),
        ("fp8, whole lines", (8, 128, torch.bfloat16, 576, 512, True), (90,)),
        ("fp8, fp16 queries", (8, 128, torch.float16, 576, 512, True), (80, 90)),
        ("fp8, fp32 queries", (8, 128, torch.float32, 576, 512, True), (90, 120)),
    ]
]


# State updates: with all optional arguments and a slot per token, and with none


def slot_per_token(num_reqs: int = 8, next_n: int = 4) -> dict[str, Tensor]:
    return {
        "state_indices": int32(num_reqs, next_n),
        "query_start_loc": int32(num_reqs + 1),
        "has_initial_state": meta(num_reqs, dtype=torch.bool),
        "num_accepted_tokens": int32(num_reqs),
    }


def conv_inputs(state_len: int, width: int = 4, dtype: torch.dtype = BF16) -> dict[str, Tensor]:
    return {
        "conv_state": meta(64, 4352, state_len, dtype=dtype),
        "x": meta(32, 4352, dtype=dtype),
        "weight": meta(4352, width, dtype=dtype),
        "bias": meta(4352, dtype=dtype),
    }


def ssm_inputs(state_dtype: torch.dtype) -> dict[str, Tensor | bool]:
    return {
        "state": meta(64, 32, 64, 128, dtype=state_dtype),
        "x": meta(32, 32, 64, dtype=BF16),
        "dt": meta(32, 32, dtype=BF16),
        "A": meta(32),
        "B": meta(32, 1, 128, dtype=BF16),
        "C": meta(32, 1, 128, dtype=BF16),
        "D": meta(32),
        "z": meta(32, 32, 64, dtype=BF16),
        "dt_bias": meta(32),
        "dt_softplus": True,
    }


def delta_inputs(state_dtype: torch.dtype, *decay_channels: int) -> dict[str, Tensor]:
    return {
        "state": meta(64, 32, 128, 128, dtype=state_dtype),
        "q": meta(32, 16, 128, dtype=BF16),
        "k": meta(32, 16, 128, dtype=BF16),
        "v": meta(32, 32, 128, dtype=BF16),
        "g": meta(32, 32, *decay_channels),
        "beta": meta(32, 32, dtype=BF16),
    }


CASES += [
    Case(
        "causal_conv1d_update",
        "causal_conv1d_update",
        lambda: conv_inputs(3) | {"bias": None, "state_indices": int32(32)},
    ),
    Case(
        "causal_conv1d_update, rolling",
        "causal_conv1d_update",
        lambda: conv_inputs(6) | slot_per_token() | {"state_indices": int32(8)},
    ),
    Case(
        "causal_conv1d_update, slots",
        "causal_conv1d_update",
        lambda: conv_inputs(1, 2, torch.float32) | slot_per_token(),
    ),
    Case(
        "selective_state_update, fp32",
        "selective_state_update",
        lambda: ssm_inputs(torch.float32) | slot_per_token(),
    ),
    Case(
        "selective_state_update, bf16",
        "selective_state_update",
        lambda: ssm_inputs(BF16) | slot_per_token() | {"dst_indices": int32(8)},
    ),
    Case(
        "selective_state_update, Mamba-1",
        "selective_state_update",
        lambda: {
            "state": meta(64, 4096, 16),
            "x": meta(32, 4096, dtype=torch.float16),
            "dt": meta(32, 4096, dtype=torch.float16),
            "A": meta(4096, 16),
            "B": meta(32, 16, dtype=torch.float16),
            "C": meta(32, 16, dtype=torch.float16),
            "state_indices": int32(32),
        },
    ),
    Case(
        "gated_delta_update, fp32",
        "gated_delta_update",
        lambda: delta_inputs(torch.float32) | slot_per_token(),
    ),
    Case(
        "gated_delta_update, fp32, decay per channel",
        "gated_delta_update",
        lambda: delta_inputs(torch.float32, 128) | slot_per_token(),
    ),
    Case(
        "gated_delta_update, bf16",
        "gated_delta_update",
        lambda: delta_inputs(BF16) | {"state_indices": int32(32), "dst_indices": int32(32, 4)},
    ),
]


def index_inputs(
    dtype: torch.dtype,
    num_heads: int = 64,
    head_dim: int = 128,
    block_size: int = 64,
    num_tokens: int = 8,
) -> dict[str, Any]:
    return {
        "q": meta(num_tokens, num_heads, head_dim, dtype=dtype),
        "weights": meta(num_tokens, num_heads),
        "k_cache": meta(4096, block_size * (head_dim + 4), dtype=torch.uint8),
        "block_table": int32(8, 2048),
        "query_start_loc": int32(9),
        "seq_lens": int32(8),
        "max_seq_len": 16384,
    }


# Single tokens need one loop over the keys, several rows of a request one for each number of rows.
CASES += [
    Case(
        f"indexer_logits, {name}",
        "indexer_logits",
        lambda dtype=dtype, sizes=sizes: index_inputs(dtype, *sizes),
    )
    for name, dtype, sizes in [
        ("several rows of fp8", torch.float8_e4m3fn, (64, 128, 64, 16)),
        ("fp8, odd sizes", torch.float8_e4m3fn, (5, 24, 7)),
        ("fp32", torch.float32, (64, 128)),
        ("fp32, large heads", torch.float32, (24, 192, 256)),
    ]
]

CASES += [
    Case(
        f"indexer_logits, eight rows at once, blocks of {block_size}",
        "indexer_logits",
        lambda block_size=block_size: {
            **index_inputs(torch.float8_e4m3fn, 64, 128, block_size, 64),
            "block_table": int32(8, 1 << 16),
            "max_seq_len": 1 << 20,
        },
        archs=(90,),
    )
    for block_size in (32, 64)
]

CASES += [
    Case(
        "indexer_logits of some requests",
        "indexer_logits",
        lambda: {
            **index_inputs(torch.float8_e4m3fn, num_tokens=200),
            "block_table": int32(100, 2048),
            "query_start_loc": int32(101),
            "seq_lens": int32(100),
        },
        archs=(90,),
    ),
    Case(
        "indexer_logits of many requests",
        "indexer_logits",
        lambda: {
            **index_inputs(torch.float8_e4m3fn, num_tokens=600),
            "block_table": int32(300, 2048),
            "query_start_loc": int32(301),
            "seq_lens": int32(300),
        },
        archs=(90,),
    ),
    Case(
        "indexer_logits of much work",
        "indexer_logits",
        lambda: {**index_inputs(torch.float8_e4m3fn, num_tokens=8192), "max_seq_len": 1 << 23},
        archs=(90,),
    ),
    *[
        Case(
            f"indexer_logits in bf16, of {dtype}",
            "indexer_logits",
            lambda dtype=dtype: {**index_inputs(dtype), "logits_dtype": torch.bfloat16},
            archs=(80, 90),
        )
        for dtype in (torch.float8_e4m3fn, torch.bfloat16)
    ],
    Case(
        "indexer_select of fp8",
        "indexer_select",
        lambda: {**index_inputs(torch.float8_e4m3fn, 32, 128, 64, 16), "topk": 2048},
        archs=(90,),
    ),
    Case(
        "indexer_select",
        "indexer_select",
        lambda: {**index_inputs(torch.bfloat16), "topk": 2048},
        archs=(90,),
    ),
]


class _Driver:
    """Stands for a card of the architecture ``arch``; every one is a device of its own."""

    arch = 0

    def get_current_device(self) -> int:
        return self.arch

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.arch, 32)


_DRIVER = _Driver()


def compiled(number: int, arch: int) -> list[dict[str, Any]]:
    """What each kernel of ``CASES[number]`` compiles to."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from mtpgraph.kernels import _common

    case = CASES[number]
    kernels: list[Any] = []
    run = JITFunction.run

    def warm_up(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        kernels.append(run(self, *args, grid=grid, warmup=True, **kwargs))

    driver.set_active(_DRIVER)
    _DRIVER.arch = arch
    _common.capability.cache_clear()
    JITFunction.run = warm_up
    try:
        importlib.import_module(f"mtpgraph.kernels.{case.kernel}").launch(**case.make())
    except Exception as error:
        text = f"{type(error).__name__}: {error}"[-2000:]
        return [{"case": case.name, "arch": arch, "error": text}]
    finally:
        JITFunction.run = run
    return [
        {
            "case": case.name,
            "arch": arch,
            "kernel": kernel.metadata.name,
            "num_warps": kernel.metadata.num_warps,
            "shared": kernel.metadata.shared,
            **_resources(kernel.asm["cubin"]),
        }
        for kernel in kernels
    ]


def _resources(cubin: bytes) -> dict[str, int]:
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {
        name: int(re.search(rf"{label}:(\d+)", usage)[1])
        for name, label in [("registers", "REG"), ("stack", "STACK")]
    }


def main(args: list[str]) -> None:
    full, names = "--full" in args, [name for name in args if name != "--full"]
    jobs = [
        (number, arch)
        for number, case in enumerate(CASES)
        if case.name in names or (not names and (full or not case.is_rare))
        for arch in case.archs
    ]
    with concurrent.futures.ProcessPoolExecutor() as pool:
        for results in pool.map(compiled, *zip(*jobs, strict=True)):
            for result in results:
                print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
