#!/usr/bin/env python3
"""clang-tidy on the files that changed last, newest first, as many as fit the time.

usage: run_tidy.py [--seconds N] [--build DIR] [FILE...]

Changed: differs from HEAD, or from where this branch left origin/main; on origin/main itself, touched by the last
commits. Files that the time did not allow are named. A header is checked through the .cc beside it, or alone.
"""
import argparse
import concurrent.futures
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time

from repo_files import ROOT, repo_files

ROOMS = ("bench/", "cachestore/", "client/", "kernels/", "service/", "tests/")
LAST_COMMITS = 10
CLANG_TIDY = shutil.which("clang-tidy-14") or shutil.which("clang-tidy")
# g++'s precompiled headers mean nothing to clang.
PRECOMPILED = re.compile(r"(-Winvalid-pch )?-include \S*/cmake_pch\.hxx ")
# Where CMake compiles each header of a room alone.
HEADER_ALONE = re.compile(r".*_verify_interface_header_sets/(.+\.h)\.cxx")
NOISE = re.compile(r"^\d+ warnings? .*generated\.\n", re.M)


def git(*arguments):
    done = subprocess.run(["git", "-C", ROOT, *arguments], capture_output=True, text=True)
    return done.stdout.split() if done.returncode == 0 else []


def changed_files():
    """Newest first."""
    uncommitted = git("diff", "--name-only", "HEAD") + git("ls-files", "--others", "--exclude-standard")
    base = git("merge-base", "HEAD", "origin/main")
    if not base or base == git("rev-parse", "HEAD"):
        since = ["--max-count", str(LAST_COMMITS), "HEAD"]
    else:
        since = [f"{base[0]}..HEAD"]
    committed = git("log", "--name-only", "--format=", *since)
    existing = set(repo_files(".h", ".cc"))
    return [name for name in dict.fromkeys(uncommitted + committed)
            if name in existing and name.startswith(ROOMS)]


def compile_database(build):
    """Writes build/tidy/compile_commands.json for clang; gives {file as the repository names it: source to check}."""
    entries = json.loads((build / "compile_commands.json").read_text())
    sources = {}
    for entry in entries:
        entry["command"] = PRECOMPILED.sub("", entry["command"])
        alone = HEADER_ALONE.fullmatch(entry["file"])
        if alone:
            sources[alone.group(1)] = entry["file"]
        elif entry["file"].startswith(f"{ROOT}/"):
            sources[os.path.relpath(entry["file"], ROOT)] = entry["file"]
    (build / "tidy").mkdir(exist_ok=True)
    (build / "tidy/compile_commands.json").write_text(json.dumps(entries, indent=1))
    return sources


def check(source, database, deadline):
    """The findings as text ("" if none), or None if there was no time."""
    left = deadline - time.monotonic()
    if left < 5:
        return None
    # What the sources are compiled with is for g++; clang need not know each flag.
    command = [CLANG_TIDY, "-quiet", "-p", database, "--extra-arg=-Wno-unknown-warning-option", source]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=left)
    except subprocess.TimeoutExpired:
        return None
    return NOISE.sub("", done.stdout + done.stderr).strip() if done.returncode else ""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=180)
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build/dev")
    parser.add_argument("files", nargs="*")
    arguments = parser.parse_args()
    if not (arguments.build / "compile_commands.json").exists():
        print(f"{arguments.build} is not configured: cmake --preset dev, and build it once for the generated headers")
        return 1

    sources = compile_database(arguments.build.resolve())
    wanted = {}
    unknown = []
    for name in arguments.files or changed_files():
        beside = name.removesuffix(".h") + ".cc"
        source = sources.get(beside) or sources.get(name)
        if source:
            wanted.setdefault(source, name)
        else:
            unknown.append(name)

    deadline = time.monotonic() + (arguments.seconds if not arguments.files else 3600)
    failed, late = [], []
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        results = pool.map(lambda source: check(source, arguments.build / "tidy", deadline), wanted)
        for source, found in zip(wanted, results):
            if found is None:
                late.append(wanted[source])
            elif found:
                failed.append(wanted[source])
                print(found)
    print(f"clang-tidy: {len(wanted) - len(late) - len(failed)} files clean, {len(failed)} with findings, "
          f"{len(late)} not reached in {arguments.seconds:.0f} s, {len(unknown)} not in the build")
    for label, names in (("findings", failed), ("not reached", late), ("not in the build", unknown)):
        for name in names:
            print(f"  {label}: {name}")
    if wanted and len(late) == len(wanted):
        print("clang-tidy: no file was reached: nothing is known")
        return 1
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
