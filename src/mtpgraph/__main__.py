"""The command line: ``mtpgraph demo``, ``explain``, ``doctor`` and ``bench``."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from ._version import __version__


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    # the commands need more than the package does; their flags alone must not
    from . import bench_host, bench_indexer, bench_plot, bench_step, doctor
    from .example import demo
    from .explanation import command as explain

    parser = argparse.ArgumentParser(prog="mtpgraph", description=__doc__)
    parser.add_argument("--version", action="version", version=f"mtpgraph {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    _add(
        commands,
        "demo",
        demo,
        "decode real text with the example model, speculatively and one token at a time",
        "Decode real text with the example model three ways and compare the outputs.\n"
        "Exit status 1 if they differ.",
    )
    _add(
        commands,
        "explain",
        explain,
        "say how a step of yours compiles, line by line",
        explain.DESCRIPTION,
    )
    _add(commands, "doctor", doctor, "check the installation, and say which kernels will run")
    bench_parser = commands.add_parser("bench", help="measure on a CUDA card")
    benches = bench_parser.add_subparsers(dest="bench", required=True)
    _add(benches, "step", bench_step, "a decode step of realistic shape, four ways")
    _add(benches, "host", bench_host, "what a call of a compiled step costs the host")
    _add(benches, "indexer", bench_indexer, "the indexer and its attention, beside their peers")
    _add(benches, "plot", bench_plot, "what was measured, as a table and a picture")
    args = parser.parse_args(argv)
    return args.run(args)


def _add(
    commands: Any, name: str, module: Any, summary: str, description: str | None = None
) -> None:
    """A command whose flags and work are a module's; described by its docstring if not here."""
    parser = commands.add_parser(
        name,
        help=summary,
        description=description or module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module.add_arguments(parser)
    parser.set_defaults(run=module.run)


if __name__ == "__main__":
    sys.exit(main())
