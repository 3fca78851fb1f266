#!/usr/bin/env python3
"""Counts what ctest ran. Last line: `N passed, N failed, N skipped`; exit status 1 unless all is well.

A failed step counts as one failure, and so does a run that executed nothing or ended badly without saying which test.
"""
import argparse
import pathlib
import re
import sys
import xml.etree.ElementTree as ElementTree

# As gtest and unittest print them.
SKIP_REASONS = (re.compile(r": Skipped\n(.*)"), re.compile(r"\.\.\. skipped '(.*)'"))


def skip_reason(case):
    """Why a test was skipped; None if it was not. ctest calls a test that it could not start skipped too: that is none."""
    skipped = case.find("skipped")
    if skipped is None or "SKIP_REGULAR_EXPRESSION" not in skipped.get("message", ""):
        return None
    output = case.findtext("system-out", "")
    found = (reason.search(output) for reason in SKIP_REASONS)
    return next((match.group(1) for match in found if match), "no reason given")


class Run:
    """One run of ctest, read from its JUnit file."""

    def __init__(self, name, path, status):
        self.name = name
        self.passed, self.failed, self.skipped = 0, [], []
        if pathlib.Path(path).exists():
            for case in ElementTree.parse(path).getroot().iter("testcase"):
                self.add(case)
        if not self.passed and not self.failed:
            self.failed.append("executed no test")
        elif int(status) != 0 and not self.failed:
            self.failed.append(f"ctest ended with status {status}")

    def add(self, case):
        reason = skip_reason(case)
        if reason is not None:
            self.skipped.append((case.get("name"), reason))
        elif case.get("status") == "run":
            self.passed += 1
        else:
            self.failed.append(case.get("name"))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", nargs=3, action="append", default=[], metavar=("NAME", "JUNIT", "STATUS"))
    parser.add_argument("--failed-step", action="append", default=[])
    arguments = parser.parse_args()

    runs = [Run(*run) for run in arguments.run]
    for run in runs:
        print(f"{run.name}: {run.passed} passed, {len(run.failed)} failed, {len(run.skipped)} skipped")
        for name in run.failed:
            print(f"  failed: {name}")
        for name, reason in run.skipped:
            print(f"  skipped: {name}: {reason}")
    for step in arguments.failed_step:
        print(f"failed step: {step}")
    if not runs:
        print("no test was run")

    passed = sum(run.passed for run in runs)
    failed = sum(len(run.failed) for run in runs) + len(arguments.failed_step) + (not runs)
    skipped = sum(len(run.skipped) for run in runs)
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
