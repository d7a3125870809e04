"""Assertions for tests of models and ops: what they fail with names a line, a reason and a remedy.

They work with any model, with or without ops of this package, and with any test runner. For pytest
there is a plugin as well: see the documentation.
"""

from .equal import assert_compiled_equals_eager
from .graphs import assert_no_graph_breaks, assert_no_recompiles, assert_whole_graph
from .op import assert_op
from .padding import assert_padding_safe
from .record import Graph, Problem, Record, record

__all__ = [
    "Graph",
    "Problem",
    "Record",
    "assert_compiled_equals_eager",
    "assert_no_graph_breaks",
    "assert_no_recompiles",
    "assert_op",
    "assert_padding_safe",
    "assert_whole_graph",
    "record",
]
