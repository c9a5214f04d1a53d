"""The command that checks the machine: doctor."""

from __future__ import annotations

import argparse
import json


def doctor_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `doctor`."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def doctor(arguments: argparse.Namespace) -> None:
    """Check this machine: versions, devices, bfloat16, attention backends, optional packages and disk.

    A line that starts with `!` says what to do. Nothing is downloaded. Add the output to a bug report.
    """
    from rope_extend.report.machine import examine

    findings = examine()
    if arguments.json:
        print(json.dumps([finding._asdict() for finding in findings], indent=2))
        return
    for finding in findings:
        print(f"{'!' if finding.advice else ' '} {finding.subject:<16}{finding.result}")
        if finding.advice:
            print(f"  {'':<16}-> {finding.advice}")
