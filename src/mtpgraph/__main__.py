"""The command line: ``mtpgraph demo`` and ``mtpgraph bench step``."""

import argparse
import sys
from collections.abc import Sequence

from ._version import __version__


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    # the commands need more than the package does; their flags alone must not
    from . import bench_step
    from .example import demo

    parser = argparse.ArgumentParser(prog="mtpgraph", description=__doc__)
    parser.add_argument("--version", action="version", version=f"mtpgraph {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    demo_parser = commands.add_parser(
        "demo",
        help="decode real text with the example model, speculatively and one token at a time",
        description="Decode real text with the example model three ways and compare the outputs. "
        "Exit status 1 if they differ.",
    )
    demo.add_arguments(demo_parser)
    demo_parser.set_defaults(run=demo.run)
    bench_parser = commands.add_parser("bench", help="measure on a CUDA card")
    benches = bench_parser.add_subparsers(dest="bench", required=True)
    step_parser = benches.add_parser(
        "step",
        help="a decode step of realistic shape, four ways",
        description=bench_step.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    bench_step.add_arguments(step_parser)
    step_parser.set_defaults(run=bench_step.run)
    args = parser.parse_args(argv)
    return args.run(args)


if __name__ == "__main__":
    sys.exit(main())
