#!/usr/bin/env python3
"""The files of the repository, tracked or about to be: not what git ignores.

usage: repo_files.py [ENDING...]     prints one path a line, relative to the root
"""
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent


def repo_files(*endings):
    """Paths relative to ROOT with one of the endings (all files if none is named), sorted."""
    listed = subprocess.run(
        ["git", "-C", ROOT, "ls-files", "--cached", "--others", "--exclude-standard"],
        check=True, capture_output=True, text=True).stdout.splitlines()
    return sorted(name for name in set(listed)
                  if (not endings or name.endswith(endings)) and (ROOT / name).is_file())


if __name__ == "__main__":
    print("\n".join(repo_files(*sys.argv[1:])))
