"""Compile passes, the backend and the compiled step.

``PASSES`` is the only place that decides the order of the passes. Rows are made native before
anything looks for the op that takes them, and metadata is shared once nothing is rewritten any
more. The finders come last: what they see is what runs.
"""

from .find_host_syncs import find_host_syncs
from .find_mutation_hazards import find_mutation_hazards
from .fuse_select import fuse_select
from .fuse_state_reset import fuse_state_reset
from .graph_pass import GraphPass
from .share_step_metadata import share_step_metadata
from .use_native_rows import use_native_rows

PASSES: tuple[GraphPass, ...] = (
    use_native_rows,
    fuse_select,
    fuse_state_reset,
    share_step_metadata,
    find_mutation_hazards,
    find_host_syncs,
)

__all__ = ["PASSES"]
