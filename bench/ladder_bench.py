"""How many tokens stay readable in a memory that is too small for all of them, by eviction alone and with the pressure
ladder, and what the values and an attention over them have lost by then. On K, V and queries of a real model.

    python3 bench/ladder_bench.py [KVTIERD] [--memory MIB] [--json]
                                  build/release/bin/kvtierd, or build/dev's, unless named
"""

import argparse
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
sys.path.insert(0, str(ROOT / "python"))
import kvtier

PAGE_TOKENS = 128
HEAD_GROUP = 3  # query heads of a KV head
STEPS = (0.5, 1, 1.5, 2, 3, 4, 5, 6, 8)  # appended, of what fits at source precision


def capture():
    """[(k, v, q)] of each layer, bfloat16 bits: tests/data/README.md."""
    data = (ROOT / "tests/data/smollm2-135m-kv.safetensors").read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])

    def tensor(name):
        begin, end = header[name]["data_offsets"]
        return np.frombuffer(data[8 + size :][begin:end], np.uint16).reshape(header[name]["shape"])

    layers = sum(name.endswith(".k") for name in header)
    return [tuple(tensor(f"layers.{layer}.{side}") for side in "kvq") for layer in range(layers)]


def attention(k, v, q):
    """[queries, heads, dim], float32, of bfloat16 queries."""
    q = kvtier.to_float32(q, "bfloat16")
    k, v = (np.repeat(x, HEAD_GROUP, axis=1) for x in (k, v))
    logits = np.einsum("qhd,thd->hqt", q, k) / np.sqrt(q.shape[-1])
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return np.einsum("hqt,thd->qhd", weights / weights.sum(-1, keepdims=True), v)


def error(got, want):
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


class Server:
    def __init__(self, kvtierd, mib):
        self._folder = tempfile.TemporaryDirectory()
        ready = pathlib.Path(self._folder.name) / "ready.json"
        addresses = [f"--{name}=127.0.0.1:0" for name in ("listen", "health-listen")]
        self._process = subprocess.Popen(
            [kvtierd, *addresses, "--metrics-listen=", f"--memory={mib}MiB", "--log-level=error", f"--ready-file={ready}"]
        )
        deadline = time.monotonic() + 60
        while not ready.exists():
            if self._process.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"ladder_bench: {kvtierd} did not get ready")
            time.sleep(0.05)
        self.client = kvtier.Client(json.loads(ready.read_text())["listen"])

    def stop(self):
        self.client.close()
        self._process.terminate()
        self._process.wait(timeout=60)
        self._folder.cleanup()


class Run:
    """One server that takes sequence after sequence."""

    def __init__(self, kvtierd, mib, ladder, layers):
        self._server = Server(kvtierd, mib)
        self._client, self._layers = self._server.client, layers
        if ladder:
            self._client.set_pressure("ladder")
        spec = [kvtier.Layer(k.shape[1], k.shape[2]) for k, _, _ in layers]
        self._model = self._client.register_model("smollm2-135m", spec, page_tokens=PAGE_TOKENS)
        self.fits = self._model.reply.capacity_tokens // len(layers[0][0])  # sequences
        self.appended, self.seconds = 0, 0.0

    def append_up_to(self, sequences):
        tokens = len(self._layers[0][0])
        begin = time.monotonic()
        while self.appended < sequences:
            name = f"{self.appended}"
            with self._client.append(name, self._model) as stream:
                for layer, (k, v, _) in enumerate(self._layers):
                    stream.send(layer, 0, k, v)
            self._client.seal(name, tokens)
            self.appended += 1
        self.seconds += time.monotonic() - begin

    def readable(self):
        """Tokens, and the mean errors over the whole sequences among them: of K, of V, of attention."""
        tokens, errors = 0, []
        for info in self._client.list_sequences():
            tokens += info.committed_tokens
            if info.evicted_tokens:
                continue
            result = self._client.read(info.sequence, dtype="float32")
            for layer, (k, v, q) in enumerate(self._layers):
                got = result.layers[layer]
                k, v = kvtier.to_float32(k, "bfloat16"), kvtier.to_float32(v, "bfloat16")
                errors.append((error(got.k, k), error(got.v, v), error(attention(got.k, got.v, q), attention(k, v, q))))
        return tokens, np.mean(errors, axis=0).tolist()

    def stop(self):
        self._server.stop()


def measure(kvtierd, mib):
    layers = capture()
    runs = [Run(kvtierd, mib, ladder, layers) for ladder in (False, True)]
    rows = []
    for step in STEPS:
        sequences = round(step * runs[0].fits)
        print(f"ladder_bench: {step:g} times what fits", file=sys.stderr)
        for run in runs:
            run.append_up_to(sequences)
        (evicted, _), (lowered, errors) = (run.readable() for run in runs)
        rows.append(
            {
                "appended_tokens": sequences * len(layers[0][0]),
                "of_what_fits": step,
                "readable_tokens_eviction": evicted,
                "readable_tokens_ladder": lowered,
                "ratio": lowered / evicted,
                **dict(zip(("k_error", "v_error", "attention_error"), errors, strict=True)),
            }
        )
    seconds = [run.seconds for run in runs]
    for run in runs:
        run.stop()
    return {"rows": rows, "append_seconds_eviction": seconds[0], "append_seconds_ladder": seconds[1]}


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
    result = {"machine": cpu(), "commit": commit(), "memory_mib": options.memory} | measure(options.kvtierd, options.memory)
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
