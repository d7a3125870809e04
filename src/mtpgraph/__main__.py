"""The command line: ``mtpgraph demo``."""

import argparse
import sys
from collections.abc import Sequence

from ._version import __version__


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    # the demo needs more than the package does; its flags alone must not
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
    args = parser.parse_args(argv)
    return args.run(args)


if __name__ == "__main__":
    sys.exit(main())
