"""How many tokens stay readable in a memory that is too small for all of them, by eviction alone and with the pressure
ladder, and what the values and an attention over them have lost by then. On K, V and queries of a real model.

    python3 bench/ladder_bench.py [KVTIERD] [--memory MIB] [--json]
                                  build/release/bin/kvtierd, or build/dev's, unless named
"""

import argparse
import contextlib
import json
import os
import pathlib
import platform
import subprocess
import sys
import tempfile
import time

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "scripts")]
import kvtier
from kvtierd_process import Failed, server
from sample_kv import SAMPLE, errors, load

PAGE_TOKENS = 128
STEPS = (0.5, 1, 1.5, 2, 3, 4, 5, 6, 8)  # appended, of what fits at source precision


class Run:
    """One server that takes the sample as sequence after sequence."""

    def __init__(self, address, source, ladder):
        self._client, self._source = kvtier.Client(address), source
        if ladder:
            self._client.set_pressure("ladder")
        layers = range(sum(name.endswith(".k") for name in source))
        self._values = [[kvtier.from_float32(source[f"layers.{i}.{side}"], "bfloat16") for side in "kv"] for i in layers]
        spec = [kvtier.Layer(k.shape[1], k.shape[2]) for k, _ in self._values]
        self._model = self._client.register_model("smollm2-135m", spec, page_tokens=PAGE_TOKENS)
        self.tokens = len(self._values[0][0])  # of a sequence
        self.fits = self._model.reply.capacity_tokens // self.tokens  # sequences
        self.appended, self.seconds = 0, 0.0

    def append_up_to(self, sequences):
        begin = time.monotonic()
        while self.appended < sequences:
            name = f"{self.appended}"
            with self._client.append(name, self._model) as stream:
                for layer, (k, v) in enumerate(self._values):
                    stream.send(layer, 0, k, v)
            self._client.seal(name, self.tokens)
            self.appended += 1
        self.seconds += time.monotonic() - begin

    def readable(self):
        """Tokens, and the mean errors over the whole sequences among them: of K, of V, of attention."""
        tokens, lost = 0, []
        for info in self._client.list_sequences():
            tokens += info.committed_tokens
            if info.evicted_tokens:
                continue
            layers = self._client.read(info.sequence, dtype="float32").layers
            served = {f"layers.{i}.{side}": getattr(layer, side) for i, layer in layers.items() for side in "kv"}
            of_sequence = errors(self._source, served)
            lost.append([of_sequence[name] for name in ("k_error", "v_error", "output_error")])
        return tokens, np.mean(lost, axis=0).tolist()


def measure(kvtierd, mib):
    source = load(SAMPLE)
    rows = []
    with contextlib.ExitStack() as stack:
        runs = []
        for ladder in (False, True):
            work = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
            addresses = stack.enter_context(server(kvtierd, work, f"{mib}MiB"))
            runs.append(Run(addresses["listen"], source, ladder))
        for step in STEPS:
            sequences = round(step * runs[0].fits)
            print(f"ladder_bench: {step:g} times what fits", file=sys.stderr)
            for run in runs:
                run.append_up_to(sequences)
            (evicted, _), (lowered, lost) = (run.readable() for run in runs)
            rows.append(
                {
                    "appended_tokens": sequences * runs[0].tokens,
                    "of_what_fits": step,
                    "readable_tokens_eviction": evicted,
                    "readable_tokens_ladder": lowered,
                    "ratio": lowered / evicted,
                    **dict(zip(("k_error", "v_error", "attention_error"), lost, strict=True)),
                }
            )
    return {"rows": rows, "append_seconds_eviction": runs[0].seconds, "append_seconds_ladder": runs[1].seconds}


def cpu():
    with open("/proc/cpuinfo") as lines:
        return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def commit():
    git = subprocess.run(["git", "-C", ROOT, "describe", "--always", "--dirty"], capture_output=True, text=True)
    return git.stdout.strip() or "unknown"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    built = [ROOT / f"build/{preset}/bin/kvtierd" for preset in ("release", "dev")]
    parser.add_argument("kvtierd", nargs="?", default=next((str(path) for path in built if path.exists()), None))
    parser.add_argument("--memory", type=int, default=32, metavar="MIB")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.kvtierd is None or not os.access(options.kvtierd, os.X_OK):
        parser.error(f"{options.kvtierd or 'build/release/bin/kvtierd'} can't be run; scripts/build builds it")
    try:
        measured = measure(options.kvtierd, options.memory)
    except Failed as failed:
        sys.exit(f"ladder_bench: {failed}")
    result = {"machine": cpu(), "commit": commit(), "memory_mib": options.memory} | measured
    if options.json:
        print(json.dumps(result))
        return
    print(f"{result['machine']}, {result['commit']}, {options.memory} MiB; errors are |x' - x| / |x|")
    print("appended  of what  readable    readable  ladder/       error of   error of   error of")
    print(" [tokens]     fits  eviction     ladder  eviction            K          V  attention")
    for row in result["rows"]:
        print(
            f"{row['appended_tokens']:>9,} {row['of_what_fits']:>8g} {row['readable_tokens_eviction']:>9,} "
            f"{row['readable_tokens_ladder']:>10,} {row['ratio']:>9.2f} "
            f"{row['k_error']:>12.4f} {row['v_error']:>10.4f} {row['attention_error']:>10.4f}"
        )
    print(f"appends took {result['append_seconds_eviction']:.1f} s with eviction, {result['append_seconds_ladder']:.1f} s with the ladder")


if __name__ == "__main__":
    main()
