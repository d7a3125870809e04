"""What the Gluon kernels for compute capability 9.0 share."""

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma


def _either(owner: Any, name: str, old_name: str) -> Any:
    """``owner.name``, which is ``owner.old_name`` in some Triton before 3.9."""
    return getattr(owner, name, None) or getattr(owner, old_name)


async_load = _either(async_copy, "async_load", "async_copy_global_to_shared")
tma_load = _either(tma, "async_load", "async_copy_global_to_shared")
reinterpret = _either(gl.shared_memory_descriptor, "reinterpret", "_reinterpret")
group_barrier = _either(gl, "barrier", "thread_barrier")


@gluon.jit
def blocks_of(request, table):
    """Where the blocks of a request are: ``table`` begins with a pointer and its stride."""
    return table[0] + request.to(gl.int64) * table[1]


@gluon.jit
def prefetch(addresses, mask):
    """Bring the lines of some addresses (int64) into the L2 cache."""
    gl.inline_asm_elementwise(
        """
        {
        .reg .pred p;
        setp.ne.u32 p, $2, 0;
        @p prefetch.global.L2 [$1];
        mov.u32 $0, 0;
        }
        """,
        "=r,l,r",
        [addresses, mask.to(gl.int32)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
