#!/usr/bin/env python3
"""Prints the table of docs/capacity.md: what well-known models' caches take, as `kvtier plan --csv` says it.

    scripts/capacity_table.py [KVTIER]        build/release/bin/kvtier unless another is named
"""
import csv
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parent.parent
LENGTHS = (512, 4096, 32768, 131072)
FORMATS = ("auto", "fp8_e4m3", "int8_per_token_head", "q4_0", "kivi4", "kivi2")


def plan(kvtier, config, retention):
    """Rows of the CSV by format and length."""
    command = [kvtier, "plan", "--csv", "--model", str(config), "--retention", retention,
               "--context-lengths", ",".join(map(str, LENGTHS)), *(f"--kv-cache-dtype={name}" for name in FORMATS)]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {(row["kv_cache_dtype"], int(row["tokens"])): row for row in csv.DictReader(text.splitlines())}


def lines(model, rows):
    for length in LENGTHS:
        source = rows["auto", length]
        cells = [model, f"{length:,}", f"{int(source['source_bytes']) / length / 1024:.1f}"]
        for name in FORMATS[1:]:
            row = rows[name, length]
            cells.append(f"{float(row['bytes_per_token']) / 1024:.1f} {float(row['compression_ratio']):.2f}x")
        cells.append(f"{float(rows['kivi2', length]['least_ratio']):.2f}x")
        yield "| " + " | ".join(cells) + " |"


def table(kvtier):
    yield "| model | tokens | 16 bit | " + " | ".join(f"`{name}`" for name in FORMATS[1:]) + " | `kivi2`, worst |"
    yield "|---|" + "--:|" * (len(FORMATS) + 2)
    for config in sorted((ROOT / "tests/data/configs").glob("*.json")):
        rows = plan(kvtier, config, "all")
        yield from lines(config.stem, rows)
        windowed = plan(kvtier, config, "window")
        if any(windowed[key]["source_bytes"] != row["source_bytes"] for key, row in rows.items()):
            yield from lines(config.stem + ", window", windowed)


if __name__ == "__main__":
    print("\n".join(table(sys.argv[1] if len(sys.argv) > 1 else str(ROOT / "build/release/bin/kvtier"))))
