#!/usr/bin/env python3
"""Streams real K and V through a real server, reads them back, and tables what each format costs and loses."""
import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile

from kvtierd_process import Failed, server
from rich import box
from rich.console import Console
from rich.table import Table
from sample_kv import SAMPLE, errors, load

ROOT = pathlib.Path(__file__).resolve().parent.parent
FORMATS = ["auto", "fp8", "int8_per_token_head", "kivi4", "kivi2"]
CHUNK_TOKENS = 100
REPEATS = 3
PLANNED_TOKENS = 32768


class Kvtier:
    """The command line client."""

    def __init__(self, binary, address):
        self.command = [binary]
        self.address = address

    def __call__(self, verb, *arguments, on_server=True):
        command = [*self.command, verb, *map(str, arguments), "--json"]
        if on_server:
            command += ["--server", self.address]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        if done.returncode != 0:
            raise Failed(f"{' '.join(map(str, command))}\n{done.stderr}")
        return json.loads(done.stdout)


def measure(kvtier, source, kv_cache_dtype, out):
    """Appends and reads the sample REPEATS times; what a format costs, loses and how fast it went."""
    puts, gets = [], []
    for i in range(REPEATS):
        name = f"{kv_cache_dtype}-{i}"
        puts.append(
            kvtier("put", SAMPLE, "--sequence", name, "--kv-cache-dtype", kv_cache_dtype, "--chunk-tokens", CHUNK_TOKENS)
        )
        gets.append(kvtier("get", "--sequence", name, "--as", "source", "--out", out))
    tokens, heads, dim = source["layers.0.k"].shape
    layers = sum(name.endswith(".k") for name in source)
    shape = ["--layers", layers, "--kv-heads", heads, "--head-dim", dim, "--kv-cache-dtype", kv_cache_dtype]
    plan = kvtier("plan", *shape, "--tokens", PLANNED_TOKENS, "--memory", "1GiB", on_server=False)["formats"][0]
    return {
        "format": kv_cache_dtype,
        "tokens": tokens,
        "bytes_per_token": puts[0]["bytes_per_token"],
        "compression_ratio": puts[0]["compression_ratio"],
        "planned_compression_ratio": plan["compression_ratio"],
        "tokens_in_1_gib": plan["tokens_that_fit"],
        **errors(source, load(out)),
        "append_mb_per_s": statistics.median(put["append_mb_per_s"] for put in puts),
        "read_mb_per_s": statistics.median(get["read_mb_per_s"] for get in gets),
    }


def percent(value):
    return "0" if value == 0 else f"{100 * value:.2f} %"


# heading, how a result is shown
COLUMNS = [
    ("format", lambda r: r["format"]),
    ("bytes/\ntoken", lambda r: f"{r['bytes_per_token']:,.0f}"),
    ("ratio\nhere", lambda r: f"{r['compression_ratio']:.2f}x"),
    ("ratio\nat 32k", lambda r: f"{r['planned_compression_ratio']:.2f}x"),
    ("tokens in\n1 GiB", lambda r: f"{r['tokens_in_1_gib']:,}"),
    ("error\nof K", lambda r: percent(r["k_error"])),
    ("error\nof V", lambda r: percent(r["v_error"])),
    ("output,\nK' alone", lambda r: percent(r["output_error_from_k"])),
    ("output,\nV' alone", lambda r: percent(r["output_error_from_v"])),
    ("output,\nboth", lambda r: percent(r["output_error"])),
    ("append\nMB/s", lambda r: f"{r['append_mb_per_s']:,.0f}"),
    ("read\nMB/s", lambda r: f"{r['read_mb_per_s']:,.0f}"),
]


def print_table(results, source):
    tokens, heads, dim = source["layers.0.k"].shape
    layers = sum(name.endswith(".k") for name in source)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for i, (heading, _) in enumerate(COLUMNS):
        table.add_column(heading, justify="left" if i == 0 else "right", no_wrap=True)
    for result in results:
        table.add_row(*(show(result) for _, show in COLUMNS))
    # Wider than a narrow terminal: lines that wrap lose nothing, cells that are cut do.
    console = Console(width=max(140, Console().width))
    console.print(
        f"{SAMPLE.name}: {layers} layers x {heads} KV heads x {dim}, {tokens} tokens, bf16, appended {CHUNK_TOKENS} tokens at "
        "a time, read back as bf16\n",
        highlight=False,
        soft_wrap=True,
    )
    console.print(table)
    console.print(
        "Bytes are everything stored: codes, scales, residual, headers, slack. Errors are |x' - x| / |x|, mean over layers; "
        "output is attention output\nover the whole sample. Ratio at 32k and tokens in 1 GiB are planned for one sequence.",
        highlight=False,
        soft_wrap=True,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bin", type=pathlib.Path, default=ROOT / "build/release/bin", help="where kvtierd and kvtier are")
    parser.add_argument("--formats", default=",".join(FORMATS), help="comma-separated kv_cache_dtypes")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    args = parser.parse_args()

    source = load(SAMPLE)
    progress = Console(stderr=True)
    results = []
    with tempfile.TemporaryDirectory() as folder:
        work = pathlib.Path(folder)
        with server(args.bin / "kvtierd", work, "256MiB") as addresses, progress.status("") as status:
            kvtier = Kvtier(args.bin / "kvtier", addresses["listen"])
            formats = args.formats.split(",")
            for i, kv_cache_dtype in enumerate(formats, 1):
                line = f"{i} of {len(formats)}: append and read as {kv_cache_dtype}"
                status.update(line)
                if not progress.is_terminal:
                    progress.print(line, highlight=False)
                results.append(measure(kvtier, source, kv_cache_dtype, work / "out.safetensors"))
    if args.json:
        print(json.dumps(results, indent=2))
    else:
        print_table(results, source)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Failed as failure:
        print(failure, file=sys.stderr)
        sys.exit(1)
