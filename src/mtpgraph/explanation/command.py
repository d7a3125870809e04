"""``mtpgraph explain``: the flags, what they name, and the exit status."""

import argparse
import importlib
import inspect
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .specs import GRAMMAR, parse_inputs

DESCRIPTION = """\
Say how a step compiles: graph breaks, host syncs and mutation hazards with their lines and what to
write instead, the ops of each graph, passes, padding, and the bytes that each op moves. The step is
traced, not run; only past a graph break it runs, on copies.

Exit status: 0 for one graph without a problem, 1 for graph breaks, host syncs or mutation hazards,
2 if the step cannot be examined.
"""


class Step(NamedTuple):
    """A function with its inputs; ``made_up`` if the values in them mean nothing."""

    fn: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    made_up: bool


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``mtpgraph explain``."""
    parser.add_argument(
        "target",
        metavar="MODULE:NAME",
        help="the step, with --input for each argument; or a factory without arguments that "
        "returns (step, args) or (step, args, kwargs)",
    )
    parser.add_argument(
        "--input",
        dest="inputs",
        action="append",
        default=[],
        metavar="SPEC",
        help=f"{GRAMMAR}. Floating point is filled with random numbers, all else with zeros",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, nothing else")
    parser.add_argument("--html", type=Path, metavar="PATH", help="write a self-contained page")


def run(args: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    from .trace import examine

    try:
        step = load(args.target, args.inputs)
        explanation = examine(
            step.fn, step.args, step.kwargs, name=args.target, made_up=step.made_up
        )
        if args.html:
            args.html.write_text(explanation.html(), encoding="utf-8")
    except (ImportError, OSError, RuntimeError, TypeError, ValueError) as error:
        print(f"mtpgraph explain: {error}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps(explanation.asdict(), indent=2))
    else:
        _print(explanation)
    return 0 if explanation.ok else 1


def load(target: str, inputs: list[str]) -> Step:
    """What the command line names.

    Raises:
        ImportError, TypeError, ValueError: it names nothing, or nothing of the kind
    """
    module_name, _, name = target.partition(":")
    if not module_name or not name:
        raise ValueError(f"expected MODULE:NAME, got {target!r}")
    if (here := os.getcwd()) not in sys.path:
        # as `python -m` does; a console script looks beside itself instead
        sys.path.insert(0, here)
    found: Any = importlib.import_module(module_name)
    for part in name.split("."):
        if not hasattr(found, part):
            raise ValueError(f"{target!r} does not exist: {found!r} has no attribute {part!r}")
        found = getattr(found, part)
    if not callable(found):
        raise TypeError(f"{target} must be a function, a module or a factory, got {found!r}")
    if inputs:
        args, kwargs = parse_inputs(inputs)
        return Step(found, args, kwargs, made_up=True)
    return _from_factory(target, found)


def _from_factory(target: str, factory: Callable[..., Any]) -> Step:
    parameters = inspect.signature(factory).parameters.values()
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in kinds]
    if needed:
        raise ValueError(
            f"{target} takes {', '.join(needed)}: give an --input for each ({GRAMMAR}), or name a "
            "factory that returns (step, args)"
        )
    made = factory()
    if (
        isinstance(made, tuple | list)
        and len(made) in (2, 3)
        and callable(made[0])
        and isinstance(made[1], tuple | list)
        and (len(made) == 2 or isinstance(made[2], Mapping))
    ):
        return Step(made[0], made[1], made[2] if len(made) == 3 else {}, made_up=False)
    raise TypeError(
        f"{target} takes no arguments, so it must be a factory that returns (step, args) or "
        f"(step, args, kwargs), got {type(made).__name__}"
    )


def _print(explanation: Any) -> None:
    from .text import print_rich, render

    if sys.stdout.isatty():
        try:
            from rich.console import Console
        except ImportError:
            pass
        else:
            print_rich(explanation, Console(highlight=False))
            return
    print(render(explanation), end="")
