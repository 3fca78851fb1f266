#!/usr/bin/env python3
"""Prints the build targets that compile the changed headers alone, one a line: what clang-tidy calls changed.

usage: changed_headers.py BUILD_FOLDER
"""
import re
import subprocess
import sys

from run_tidy import changed_files

ALONE = re.compile(r"^(\S+_verify_interface_header_sets/(\S+\.h)\.cxx\.o): ")


def main():
    listed = subprocess.run(["ninja", "-C", sys.argv[1], "-t", "targets", "all"], capture_output=True, text=True, check=True)
    changed = set(changed_files())
    for line in listed.stdout.splitlines():
        found = ALONE.match(line)
        if found and found.group(2) in changed:
            print(found.group(1))


if __name__ == "__main__":
    main()
