#!/usr/bin/env python3
"""What the compiler made of each kernel, which needs no GPU to be seen: registers, spills, instructions of PTX, and the
widest piece of memory that one instruction loads and stores.

    bench/kernel_code.py [--json] [FOLDER]    FOLDER: of the PTX, build/dev/kernels/ptx by default; ptxas must be on PATH
"""
import argparse
import json
import pathlib
import re
import subprocess
import sys

ENTRY = re.compile(r"Compiling entry function '(\S+)' for '(\S+)'")
SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
REGISTERS = re.compile(r"Used (\d+) registers")
MEMORY = re.compile(r"^\s*(?:@!?%p\d+ )?(ld|st)\.(?!param|shared|const)(?:\w+\.)*?(?:v(\d)\.)?[bfsu](\d+)\s")
INSTRUCTION = re.compile(r"^\t(?:@!?%p\d+ )?[a-z]\w*[.\w]*\s.*;")


def short(mangled):
    """DecodeRows<KiviToken<8>, 1>: as it's called in the source."""
    name = subprocess.run(["c++filt", mangled], capture_output=True, text=True, check=True).stdout
    name = re.sub(r"^void |kvtier::kernels::|\(anonymous namespace\)::|_GLOBAL__N__\w+::|\(int\)|\(bool\)", "", name.strip())
    return re.sub(r"\([^()]*\)$", "", name)


def kernels(ptx_file):
    """What ptxas and the PTX say of each kernel."""
    ptx = ptx_file.read_text()
    target = re.search(r"^\.target (\S+)", ptx, re.M).group(1)
    said = subprocess.run(["ptxas", "-v", f"-arch={target}", ptx_file, "-o", "/dev/null"], capture_output=True, text=True,
                          check=True).stderr
    found, name = {}, None
    for line in said.splitlines():
        if match := ENTRY.search(line):
            name = match.group(1)
            found[name] = {"kernel": short(name), "gpu": match.group(2)}
        elif match := SPILLS.search(line):
            found[name]["spilled_bytes"] = int(match.group(2)) + int(match.group(3))
        elif match := REGISTERS.search(line):
            found[name]["registers"] = int(match.group(1))
    for name, row in found.items():
        body = ptx[ptx.index("{", re.search(rf"\.entry {re.escape(name)}\(", ptx).end()):]
        lines = body[:body.index("\n}")].splitlines()
        widths = {"ld": [0], "st": [0]}
        for line in lines:
            if match := MEMORY.search(line):
                widths[match.group(1)].append(int(match.group(2) or 1) * int(match.group(3)) // 8)
        row["instructions"] = sum(bool(INSTRUCTION.match(line)) for line in lines)
        row["load_bytes"], row["store_bytes"] = max(widths["ld"]), max(widths["st"])
    return list(found.values())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("folder", nargs="?", default="build/dev/kernels/ptx", type=pathlib.Path)
    arguments = parser.parse_args()
    files = sorted(arguments.folder.glob("*.ptx"))
    if not files:
        sys.exit(f"no PTX in {arguments.folder}: build with nvcc first (cmake -D KVTIER_CUDA=ON)")
    rows = sorted((row for file in files for row in kernels(file)), key=lambda row: row["kernel"])
    if arguments.json:
        print(json.dumps(rows, indent=2))
        return
    print("| kernel | registers | spilled bytes | instructions | widest load | widest store |\n|---|---|---|---|---|---|")
    for row in rows:
        print(f"| `{row['kernel']}` | {row['registers']} | {row['spilled_bytes']} | {row['instructions']} "
              f"| {row['load_bytes']} | {row['store_bytes']} |")


if __name__ == "__main__":
    main()
