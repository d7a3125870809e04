"""The command line: ``mtpgraph demo``, ``explain``, ``doctor`` and ``bench``."""

import argparse
import sys
from collections.abc import Sequence

from ._version import __version__


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    # the commands need more than the package does; their flags alone must not
    from . import bench_host, bench_plot, bench_step, doctor
    from .example import demo
    from .explanation import command as explain

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
    explain_parser = commands.add_parser(
        "explain",
        help="say how a step of yours compiles, line by line",
        description=explain.DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    explain.add_arguments(explain_parser)
    explain_parser.set_defaults(run=explain.run)
    doctor_parser = commands.add_parser(
        "doctor",
        help="check the installation, and say which kernels will run",
        description=doctor.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    doctor.add_arguments(doctor_parser)
    doctor_parser.set_defaults(run=doctor.run)
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
    host_parser = benches.add_parser(
        "host",
        help="what a call of a compiled step costs the host",
        description=bench_host.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    bench_host.add_arguments(host_parser)
    host_parser.set_defaults(run=bench_host.run)
    plot_parser = benches.add_parser(
        "plot",
        help="what was measured, as a table and a picture",
        description=bench_plot.__doc__,
    )
    bench_plot.add_arguments(plot_parser)
    plot_parser.set_defaults(run=bench_plot.run)
    args = parser.parse_args(argv)
    return args.run(args)


if __name__ == "__main__":
    sys.exit(main())
