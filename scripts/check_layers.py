#!/usr/bin/env python3
"""Fails when a file includes what its room may not know about: the arrows of the architecture, as two tables."""
import re
import sys

from repo_files import ROOT, repo_files

# What the rooms above kernels/ may say of it; the rest of it is cachestore/device's and client's.
KERNEL_WORDS = {"kernels/element.h", "kernels/codec.h", "kernels/codec_table.h", "kernels/codec_run.h"}
STORE = {"cachestore", "cachestore/base", "cachestore/device", "cachestore/model"}
SERVICE = {"service", "service/config", "service/metrics", "service/rpc"}

# Room -> the rooms and single headers that it may include. A file's room is the longest that its path starts with.
MAY_INCLUDE = {
    "kernels": {"kernels"},
    "cachestore/base": {"cachestore/base"},
    "cachestore/model": {"cachestore/base", "cachestore/model"} | KERNEL_WORDS,
    "cachestore/device": {"cachestore/base", "cachestore/device", "cachestore/model", "kernels"},
    # Values are checked where they arrive, in host memory, before any device sees them.
    "cachestore": STORE | KERNEL_WORDS | {"kernels/host_codec.h"},
    "transport": {"transport", "cachestore/base"},
    "proto": {"proto"},
    "client": {"client", "transport", "cachestore/base", "cachestore/model", "kernels", "proto"},
    "client/cli": {"client", "client/cli", "cachestore/base", "cachestore/model", "kernels", "proto", "version"},
    "service/config": {"service", "service/config", "cachestore/base", "cachestore/model", "version"} | KERNEL_WORDS,
    "service/metrics": {"service", "service/metrics", "version"} | STORE | KERNEL_WORDS,
    "service/rpc": {"service", "service/rpc", "transport", "proto", "version"} | STORE | KERNEL_WORDS,
    "service": SERVICE | {"transport", "proto", "version", "kernels/host_target.h"} | STORE | KERNEL_WORDS,
    "tests/support": {"tests/support", "cachestore/base", "cachestore/device", "cachestore/model"} | KERNEL_WORDS,
    "tests": None,  # anything
    "bench": None,
}
# What is generated into the build directory, by the start of its name.
GENERATED = {"kvtier/v1/": "proto", "google/rpc/": "proto", "kvtier/version.h": "version"}

# Header -> the places that may include it; none: not yet anywhere.
ONLY_IN = {
    "cuda": ("bench/kernel_bench.cc", "bench/nccl_bench.cc", "cachestore/device/cuda_", "client/gpu_", "kernels/cuda_", "tests/emulation/",
             "tests/nccl/", "transport/nccl_"),
    "nccl": ("tests/emulation/", "transport/nccl_"),
    "grpc/": ("client/", "service/", "tests/", "bench/"),
    "grpcpp/": ("client/", "service/", "tests/", "bench/"),
    "google/protobuf/": ("client/", "service/", "tests/", "bench/"),
    "hwy/": ("kernels/host_",),
    "nlohmann/": ("cachestore/model/", "client/", "service/", "tests/", "bench/"),
    "openssl/": ("cachestore/model/prefix_key.cc",),
    "prometheus/": ("service/metrics/", "service/main.cc"),
    "spdlog/": ("client/cli/", "service/"),
    "toml++/": ("service/config/",),
    "CLI/": ("client/cli/", "service/", "bench/"),
}
# Slow to compile: not in headers that many files see.
NOT_IN_HEADERS = ("absl/strings/", "fmt/", "nlohmann/json.hpp", "spdlog/")
HEADERS_FREE_OF_THEM = ("kernels/", "cachestore/", "transport/", "client/", "service/")
HEADERS_EXCEPTED = ("client/cli/",)

# kernels/ stands on the standard library, on what compiles it for each of the host's instruction sets, and on CUDA's
# runtime.
KERNEL_LIBRARY = re.compile(r"[a-z_0-9]+|hwy/.*|cuda_runtime_api.h")
INCLUDE = re.compile(r'^\s*#\s*include\s+(["<])([^">]+)[">]', re.M)


def room_of(path):
    for start, room in GENERATED.items():
        if path.startswith(start):
            return room
    return max((room for room in MAY_INCLUDE if path.startswith(room + "/")), key=len, default=None)


def wrong_room(name, header):
    room, target = room_of(name), room_of(header)
    allowed = MAY_INCLUDE.get(room)
    if target is None or allowed is None or target in allowed or header in allowed:
        return None
    return f"{room} may not include {header}; it may include {', '.join(sorted(allowed))}"


def wrong_library(name, header):
    for start, places in ONLY_IN.items():
        if header.startswith(start) and not name.startswith(places or ("\0",)):
            return f"{header} belongs only in {', '.join(places) or 'no file yet'}"
    if (name.endswith(".h") and header.startswith(NOT_IN_HEADERS) and name.startswith(HEADERS_FREE_OF_THEM)
            and not name.startswith(HEADERS_EXCEPTED)):
        return f"{header} belongs in .cc files only"
    if name.startswith("kernels/") and not header.startswith("kernels/") and not KERNEL_LIBRARY.fullmatch(header):
        return f"kernels includes the standard library, Highway and itself only, not {header}"
    return None


def problems():
    for name in repo_files(".h", ".cc", ".cu"):
        if room_of(name) is None:
            yield f"{name}: lies in no room; scripts/check_layers.py has the table of rooms"
        for quote, header in INCLUDE.findall((ROOT / name).read_text()):
            if quote == '"' and "/" not in header:
                yield f"{name}: \"{header}\" should be relative to the root of the repository"
            for found in (wrong_room(name, header), wrong_library(name, header)):
                if found:
                    yield f"{name}: {found}"


def main():
    found = list(problems())
    for problem in found:
        print(problem)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
