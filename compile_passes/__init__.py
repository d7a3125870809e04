"""Compile passes, the backend and the compiled step.

``PASSES`` is the only place that decides the order of the passes.
"""

from .fuse_select import fuse_select
from .fuse_state_reset import fuse_state_reset
from .graph_pass import GraphPass

PASSES: tuple[GraphPass, ...] = (fuse_select, fuse_state_reset)

__all__ = ["PASSES"]
