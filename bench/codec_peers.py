"""kvtier's host codecs beside what else turns a 16-bit KV cache into fewer bits on a CPU, one thread each, in one table:
ggml's rows as llama.cpp writes and reads its own cache, torch's FP8 cast, and KIVI in numpy.

    scripts/bench-peers [CODEC_BENCH] [--mib MIB] [--runs RUNS] [--json]
"""
import argparse
import ctypes
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

# codec_bench's memory lies in plain pages. numpy would ask for huge ones, which the kernel may grant.
os.environ["NUMPY_MADVISE_HUGEPAGE"] = "0"

import numpy as np
import torch

HEAD_DIM = 128
GROUP = 32  # values that share a scale, in ggml's blocks and in KIVI
PATTERN = 1 << 19  # values, 1 MiB of 16 bits; the data repeats them
# Rows of codec_bench by the bits of their codes. Elsewhere in the table stand the bits stored, scales and all.
OURS = {"fp8_e4m3": 8, "q8_0": 8, "q4_0": 4, "kivi2 K": 2, "kivi2 V": 2}
NOTES = """\
GB are of 16-bit data, /memcpy is against codec_bench's copy of it: another program's differs by what the machine's other
work makes of it. ggml takes and gives float32 rows, twice the bytes that count here, and is not charged for turning
bfloat16 into them or them into bfloat16; all others take and give bfloat16. No first touch of memory is timed, save of the
temporaries that numpy allocates within KIVI. What each peer read back in each run is as near as its format allows."""


def widened(bf16):
    return (bf16.astype(np.uint32) << 16).view(np.float32)


def rounded(fp32):
    """The nearest bfloat16, ties to even. Overwrites its argument, which has no NaN."""
    bits = fp32.view(np.uint32)
    bits += 0x7FFF + ((bits >> 16) & 1)
    bits >>= 16
    return bits.astype(np.uint16)


class Data:
    """What every peer starts from, and the memory that it writes to: touched, so that no page fault is timed."""

    def __init__(self, mib):
        bf16 = rounded(np.random.default_rng(1).standard_normal(PATTERN, np.float32))
        self.pattern = widened(bf16)
        self.count = mib * PATTERN
        self.gigabytes = self.count * 2 / 1e9
        self.bf16, self.fp32 = np.tile(bf16, mib), np.tile(self.pattern, mib)
        self.stored = np.empty(self.count * 9 // 8, np.uint8)  # no codec here stores more than 9 bits a value
        self.read_bf16, self.read_fp32 = np.empty_like(self.bf16), np.empty_like(self.fp32)
        self.spoil()

    def spoil(self):
        """Else a peer that does nothing could pass for right with what the one before it left."""
        self.stored.fill(0)
        self.read_bf16.fill(0x7FC0)
        self.read_fp32.fill(np.nan)

    def copy(self):
        ctypes.memmove(self.read_bf16.ctypes.data, self.bf16.ctypes.data, self.bf16.nbytes)


class TypeTraits(ctypes.Structure):
    """ggml_type_traits of ggml.h. Both functions take (from, to, values)."""

    FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
    _fields_ = [("name", ctypes.c_char_p), ("block", ctypes.c_int64), ("interleave", ctypes.c_int64),
                ("block_bytes", ctypes.c_size_t), ("is_quantized", ctypes.c_bool), ("to_float", FUNCTION),
                ("from_float_ref", FUNCTION)]


class CpuTypeTraits(ctypes.Structure):
    """The start of ggml_type_traits_cpu of ggml-cpu.h."""

    _fields_ = [("from_float", TypeTraits.FUNCTION)]


class GgmlLibrary:
    def __init__(self):
        folder = pathlib.Path(importlib.util.find_spec("llama_cpp").origin).parent / "lib"
        self.base = ctypes.CDLL(folder / "libggml-base.so", ctypes.RTLD_GLOBAL)
        self.cpu = ctypes.CDLL(folder / "libggml-cpu.so")
        self.base.ggml_get_type_traits.restype = ctypes.POINTER(TypeTraits)
        self.cpu.ggml_get_type_traits_cpu.restype = ctypes.POINTER(CpuTypeTraits)
        self.base.ggml_version.restype = ctypes.c_char_p
        self.cpu.ggml_cpu_init()

    def version(self):
        return self.base.ggml_version().decode()


class GgmlRows:
    """llama.cpp writes its cache with the CPU backend's from_float, which is the faster of the two that it exports, and
    reads it with to_float, the only one."""

    TYPES = {"q4_0": 2, "q8_0": 8}  # enum ggml_type
    CODE_BITS = {"q4_0": 4, "q8_0": 8}

    def __init__(self, library, format, data):
        traits = library.base.ggml_get_type_traits(self.TYPES[format]).contents
        if traits.name.decode() != format or traits.block != GROUP:
            raise SystemExit(f"codec_peers: ggml's type {self.TYPES[format]} is not {format}: its header has changed")
        self.name, self.width = f"ggml {format}", self.CODE_BITS[format]
        self.bits = 8 * traits.block_bytes / traits.block
        self.read, self.want = data.read_fp32, data.pattern
        largest = np.abs(data.pattern.reshape(-1, GROUP)).max(1, keepdims=True)
        # q8_0: half a step, and what fp16 makes of 127 steps. q4_0: its codes end one step short of the value that lies
        # opposite the one that gave the scale.
        step = largest / (127 if format == "q8_0" else 8) * (0.57 if format == "q8_0" else 1.01)
        self.tolerance = np.broadcast_to(step, (step.size, GROUP)).reshape(-1)
        write = library.cpu.ggml_get_type_traits_cpu(self.TYPES[format]).contents.from_float
        source, stored, read = (array.ctypes.data for array in (data.fp32, data.stored, data.read_fp32))
        self.encode = lambda: write(source, stored, data.count)
        self.decode = lambda: traits.to_float(stored, read, data.count)


class TorchFp8:
    """copy_ into memory that is there is the cast of tensor.to(float8_e4m3fn), without its allocation."""

    name, width, bits = "torch float8_e4m3fn", 8, 8.0

    def __init__(self, data):
        source, read = (torch.from_numpy(array).view(torch.bfloat16) for array in (data.bf16, data.read_bf16))
        stored = torch.from_numpy(data.stored[: data.count]).view(torch.float8_e4m3fn)
        self.encode, self.decode = lambda: stored.copy_(source), lambda: read.copy_(stored)
        self.read, self.want, self.tolerance = data.read_bf16, self.nearest(data.pattern), np.float32(0)

    @staticmethod
    def nearest(x):
        """From what E4M3 is, 4 bits of exponent biased by 7 and 3 of mantissa: the nearest value, ties to even codes."""
        code = np.arange(127)
        exponent, mantissa = code >> 3, code & 7
        values = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7))
        middles = (values[1:] + values[:-1]) / 2
        below = np.searchsorted(middles, np.abs(x))  # of the two codes around a middle, the lower
        tie = (middles[np.minimum(below, middles.size - 1)] == np.abs(x)) & (below % 2 == 1)
        return np.copysign(values[below + tie], x).astype(np.float32)


class NumpyKivi:
    """KIVI (arXiv 2402.02750) at 2 bits in fp32: scale and minimum of a group in fp16, four codes a byte. Channels is what
    lies between two values of a group: a head's channels for K, whose groups are 32 tokens of a channel, and 1 for V."""

    width = 2
    PIECE = 1 << 16  # values at a time: temporaries that fit in a cache

    def __init__(self, name, channels, data):
        self.name = f"numpy KIVI {name}"
        shape = (-1, GROUP, channels)
        groups = data.count // GROUP // channels
        codes = data.stored[: data.count // 4].reshape(groups, GROUP // 4, channels)
        scales, minimums = np.ones((2, groups, 1, channels), np.float16)
        self.bits = 8 * (codes.nbytes + scales.nbytes + minimums.nbytes) / data.count
        source, out = data.bf16.reshape(shape), data.read_bf16.reshape(shape)
        size = self.PIECE // GROUP // channels
        pieces = [slice(at, at + size) for at in range(0, groups, size)]

        def encode():
            for at in pieces:
                codes[at], scales[at], minimums[at] = self.encoded(widened(source[at]))

        def decode():
            for at in pieces:
                out[at] = rounded(self.decoded(codes[at], scales[at], minimums[at]))

        self.encode, self.decode = encode, decode
        self.read, self.want = data.read_bf16, data.pattern
        self.tolerance = self.largest_error(data.pattern.reshape(shape)).reshape(-1)

    @staticmethod
    def encoded(x):
        minimum = x.min(1, keepdims=True)
        scale = ((x.max(1, keepdims=True) - minimum) / 3).astype(np.float16)
        minimum = minimum.astype(np.float16)
        inverse = np.divide(1, scale, out=np.zeros(scale.shape, np.float32), where=scale > 0, dtype=np.float32)
        x -= minimum
        x *= inverse
        code = np.rint(np.clip(x, 0, 3, out=x), out=x).astype(np.uint8).reshape(len(x), -1, 4, x.shape[2])
        return code[:, :, 0] | code[:, :, 1] << 2 | code[:, :, 2] << 4 | code[:, :, 3] << 6, scale, minimum

    @staticmethod
    def decoded(codes, scale, minimum):
        shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
        x = (codes[:, :, None] >> shifts & 3).reshape(len(codes), GROUP, -1).astype(np.float32)
        x *= scale
        x += minimum
        return x

    @staticmethod
    def largest_error(x):
        """Half a step, and what fp16 and bfloat16 round away of the group's largest value."""
        step = (x.max(1, keepdims=True) - x.min(1, keepdims=True)) / 3
        return np.broadcast_to(0.51 * step + np.abs(x).max(1, keepdims=True) / 128, x.shape)


def check(peer):
    """That the peer did what was timed: its values are those of the source, as near as the format can say them."""
    for read in peer.read.reshape(-1, PATTERN):
        values = widened(read) if read.dtype == np.uint16 else read
        if not np.all(np.abs(values - peer.want) <= peer.tolerance):
            raise SystemExit(f"codec_peers: {peer.name} lost more than its format does: its figures would mean nothing")


def speed(gigabytes, work):
    """GB a second of CPU time, as codec_bench counts it; of all threads, so that one who starts some pays for them."""
    start = time.process_time()
    work()
    return gigabytes / (time.process_time() - start)


def run_codec_bench(options):
    command = [options.codec_bench, "--json", "--runs", "1", "--mib", str(options.mib)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def progress(text):
    print(f"codec_peers: {text}", file=sys.stderr, flush=True)


def measure(options, peers, data):
    """{row: [(encode, decode) of each run]} and codec_bench's last report. Who is compared takes turns, so that all meet
    the same neighbours on the machine."""
    runs = {}
    for run in range(options.runs + 1):  # the first warms up
        if run > 0:
            progress(f"run {run} of {options.runs}: codec_bench")
            report = run_codec_bench(options)
            runs.setdefault("memcpy (codec_bench)", []).append((report["memcpy_gb_per_s"],) * 2)
            for row in report["rows"]:
                figures = row["encode_gb_per_s"], row["decode_gb_per_s"]
                runs.setdefault(f"kvtier {row['format']}", []).append(figures)
        for peer in peers:
            progress(f"run {run} of {options.runs}: {peer.name}" if run > 0 else f"warming up: {peer.name}")
            copied = speed(data.gigabytes, data.copy)
            data.spoil()
            figures = speed(data.gigabytes, peer.encode), speed(data.gigabytes, peer.decode)
            check(peer)
            if run > 0:
                runs.setdefault("memcpy (peers)", []).append((copied,) * 2)
                runs.setdefault(peer.name, []).append(figures)
    return runs, report


def rows(peers, runs, report):
    """The table: kvtier's rows first at each width."""
    stored = {f"kvtier {row['format']}": row["bits"] for row in report["rows"]}
    order = [(16, 16.0, "memcpy (codec_bench)"), (16, 16.0, "memcpy (peers)")]
    order += [(width, stored[f"kvtier {name}"], f"kvtier {name}") for name, width in OURS.items()]
    order += [(peer.width, peer.bits, peer.name) for peer in peers]
    medians = {name: tuple(map(statistics.median, zip(*figures))) for name, figures in runs.items()}
    copy = medians["memcpy (codec_bench)"][0]
    for width, bits, name in sorted(order, key=lambda row: -row[0]):  # stable
        encode, decode = medians[name]
        yield {"width": width, "codec": name, "bits": bits, "encode_gb_per_s": encode, "encode_of_memcpy": encode / copy,
               "decode_gb_per_s": decode, "decode_of_memcpy": decode / copy}


def print_table(result):
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    print(f"{result['machine']}, codecs for {result['codecs']}, commit {result['commit']}\n{versions}")
    print(f"one thread each, {result['mib']} MiB of {result['source']}, medians of {result['runs']} runs\n")
    print(f"{'width':>5}  {'codec':<22}{'bits':>6}{'encode GB/s':>14}{'/memcpy':>9}{'decode GB/s':>14}{'/memcpy':>9}")
    width = None
    for row in result["rows"]:
        if width not in (None, row["width"]):
            print()
        shown, width = "" if row["width"] == width else row["width"], row["width"]
        print(f"{shown:>5}  {row['codec']:<22}{row['bits']:6.2f}{row['encode_gb_per_s']:14.2f}{row['encode_of_memcpy']:9.2f}"
              f"{row['decode_gb_per_s']:14.2f}{row['decode_of_memcpy']:9.2f}")
    print(f"\n{NOTES}")


def options_of(arguments):
    parser = argparse.ArgumentParser(prog="codec_peers", description=__doc__.partition("\n\n")[0])
    parser.add_argument("codec_bench", help="kvtier's own benchmark")
    parser.add_argument("--mib", type=int, default=128, help="16-bit data, in MiB (%(default)s)")
    parser.add_argument("--runs", type=int, default=3, help="runs; the median counts (%(default)s)")
    parser.add_argument("--json", action="store_true", help="JSON instead of a table")
    options = parser.parse_args(arguments)
    if options.mib < 1 or options.runs < 1:
        parser.error("--mib and --runs are at least 1")
    return options


def main():
    options = options_of(sys.argv[1:])
    torch.set_num_threads(1)
    data, ggml = Data(options.mib), GgmlLibrary()
    peers = [TorchFp8(data), GgmlRows(ggml, "q8_0", data), GgmlRows(ggml, "q4_0", data),
             NumpyKivi("K", HEAD_DIM, data), NumpyKivi("V", 1, data)]
    runs, report = measure(options, peers, data)
    versions = {"ggml": ggml.version(), "llama-cpp-python": importlib.metadata.version("llama-cpp-python"),
                "torch": torch.__version__, "numpy": np.__version__}
    result = {"machine": report["machine"], "codecs": report["codecs"], "commit": report["commit"],
              "source": report["source"], "mib": options.mib, "runs": options.runs, "versions": versions,
              "rows": list(rows(peers, runs, report))}
    if options.json:
        print(json.dumps(result | {"note": NOTES.replace("\n", " ")}, indent=2))
    else:
        print_table(result)


if __name__ == "__main__":
    main()
