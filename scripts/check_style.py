#!/usr/bin/env python3
"""House rules that no compiler knows, as tables. Each message says what to do instead."""
import dataclasses
import pathlib
import re
import sys

from repo_files import ROOT, repo_files

# Lines, by ending. The contract is read as one.
MOST_LINES = {".h": 500, ".cc": 500, ".py": 500, ".cmake": 500, ".proto": 700}
CODE = (".h", ".cc", ".cu")
# Taken over unchanged, or data.
NOT_OURS = ("LICENSE", "proto/google/", "python/kvtier/v1/", "tests/data/")


@dataclasses.dataclass
class Rule:
    pattern: re.Pattern
    message: str
    endings: tuple = ()  # of the files it holds for; none: all text
    places: tuple = ()  # where the pattern may stand


# Character classes such as wor[k] keep a rule from finding itself.
RULES = [
    Rule(re.compile(r"absl::Now\(|(system|steady|high_resolution)_clock::now|\bgettimeofday\("),
         "time comes in through a Clock (cachestore/base/clock.h)", CODE,
         ("cachestore/base/clock.", "cachestore/device/cuda_handles.cc", "transport/nccl_link.cc", "client/", "service/", "tests/", "bench/")),
    Rule(re.compile(r"\b(s?rand|rand_r|drand48)\("), "use <random> with a seed that the failure prints", CODE),
    Rule(re.compile(r"std::random_device"), "take a seed or an id as a parameter", CODE,
         ("client/", "service/", "tests/support/", "bench/")),
    Rule(re.compile(r"\bsleep_for\(|\bsleep_until\(|absl::SleepFor\(|\bu?sleep\("),
         "wait for the event, not for time", CODE, ("cachestore/device/cuda_handles.cc", "client/gpu_copies.cc", "transport/nccl_channel.cc", "transport/nccl_link.cc", "tests/emulation/", "tests/gpu_client/", "tests/nccl/", "client/cli/", "tests/client/", "tests/e2e/", "tests/service/", "tests/support/", "bench/")),
    Rule(re.compile(r"std::(cout|cerr)\b|\bf?printf\(|fmt::print\("), "log, or return the text to the one who prints",
         CODE, ("client/cli/", "service/main.cc", "cachestore/base/check.", "tests/", "bench/")),
    Rule(re.compile(r"\b(assert)\("), "KVT_CHECK (cachestore/base/check.h) stays on in release", CODE, ("kernels/",)),
    Rule(re.compile(r"^\s*using namespace std\b", re.M), "name what you use", CODE),
    Rule(re.compile(r"NOLINT(NEXTLINE|BEGIN|END)?(?!\(|NEXTLINE|BEGIN|END)"), "say which check: NOLINT(name)", CODE),
    Rule(re.compile(r"-ffast-mat[h]|-Ofas[t]"), "codecs must give the same bits everywhere",
         ("CMakeLists.txt", ".cmake", ".json")),
    Rule(re.compile(r"\bTOD[O]\b|\bFIXM[E]\b|\bXX[X]\b"), "do it or leave it out"),
    Rule(re.compile(r"pypi\.or[g]|pythonhosted\.or[g]|deb\.debian\.or[g]|snapshot\.debian\.or[g]|ghcr\.i[o]|quay\.i[o]"
                    r"|docker\.i[o]|proxy\.golan[g]|crates\.i[o]|registry\.npmj[s]|conda\.anacond[a]"),
         "name packages, not the hosts that serve them"),
    Rule(re.compile(r"/wor[k]/|\.\./share[d]\b|\.librar[y]/"), "the repository knows no path outside itself"),
]


def file_problems(name, text):
    lines = text.count("\n")
    most = MOST_LINES.get(pathlib.PurePath(name).suffix, lines)
    if lines > most:
        yield f"{name}: {lines} lines; {most} at most: is it still about one thing?"
    # But for what each instruction set includes anew.
    once = text.startswith("#pragma once\n") or "== defined(HWY_TARGET_TOGGLE)" in text
    if name.endswith(".h") and not once:
        yield f"{name}: a header starts with #pragma once"
    if text and not text.endswith("\n"):
        yield f"{name}: no newline at the end"
    for rule in RULES:
        if (rule.endings and not name.endswith(rule.endings)) or name.startswith(rule.places or ("\0",)):
            continue
        for match in rule.pattern.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            yield f"{name}:{line}: {match.group().strip()}: {rule.message}"


def unbuilt_tests(names):
    """Test folders that no kvtier_tests() names."""
    built = set(re.findall(r"kvtier_tests\(\s*NAME (\w+)", (ROOT / "tests/CMakeLists.txt").read_text()))
    folders = {name.split("/")[1] for name in names if name.startswith("tests/") and name.endswith("_test.cc")}
    for folder in sorted(folders - built):
        yield f"tests/{folder}: has tests, but tests/CMakeLists.txt does not build them"


def is_text(data):
    return b"\0" not in data[:8192]


def problems():
    names = [name for name in repo_files() if not name.startswith(NOT_OURS)]
    for name in names:
        data = (ROOT / name).read_bytes()
        if is_text(data):
            yield from file_problems(name, data.decode("utf-8", errors="replace"))
    yield from unbuilt_tests(names)


def main():
    found = list(problems())
    for problem in found:
        print(problem)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
