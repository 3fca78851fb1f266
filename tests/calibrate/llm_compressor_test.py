"""The recipe of docs/calibration.md, run by the real LLM Compressor, and what kvtier reads of the checkpoints that it
writes. Run by scripts/test-calibrate."""

import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

import tiny_model
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tiny_model import HEADS, KV_HEADS, LAYERS

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/python"))
from live_server import LiveServer

# In the place of kv_cache_scheme: attention is quantized, and so the cache. Calibration forces eager attention and so
# passes by the hook that would see Q (0.14.0.1), unless the hook is what "eager" means.
OF_ATTENTION = 'config_groups={"attention": QuantizationScheme(targets=["LlamaAttention"], input_activations=fp8)}'
SEE_QUERIES = """\
from compressed_tensors.quantization import QuantizationScheme
from transformers import AttentionInterface

AttentionInterface.register("eager", lambda module, *args, **options: module.impl(module, *args, **options))
"""


def recipe(strategy, with_q):
    """The documented program, as it stands but for the strategy and Q."""
    text = (ROOT / "docs/calibration.md").read_text()
    program = re.search(r"```python\n(.*?\boneshot\(.*?)```", text, re.S)[1]
    changes = {'strategy="tensor"': f'strategy="{strategy}"'}
    if with_q:
        changes["kv_cache_scheme=fp8"] = OF_ATTENTION
        program = SEE_QUERIES + program
    for old, new in changes.items():
        if program.count(old) != 1:
            raise AssertionError(f"docs/calibration.md: want {old} once in the recipe")
        program = program.replace(old, new)
    return program


def run(*command, **options):
    result = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, check=False, timeout=600, **options
    )
    if result.returncode != 0:
        raise AssertionError(f"{command[:2]} exits with {result.returncode}:\n{result.stdout}{result.stderr}")
    return result


def kvtier(*arguments):
    return run(os.environ["KVTIER_CLI"], *arguments).stdout


def per_kv_head(q):
    """kvtier's reading of a scale per query head: the largest of those that a KV head serves."""
    group = HEADS // KV_HEADS
    return [max(q[i : i + group]) for i in range(0, len(q), group)] if len(q) == HEADS else q


class LlmCompressorTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.checkpoint = self.folder / "calibrated"

    def calibrate(self, strategy, dtype, with_q=False):
        """Fills the checkpoint's folder; what the model makes of the same texts is in self.states."""
        tiny_model.write(self.folder, dtype)
        (self.folder / "recipe.py").write_text(recipe(strategy, with_q))
        done = run(sys.executable, "recipe.py", cwd=self.folder)
        log = done.stdout + done.stderr
        self.assertIn("Compression lifecycle finalized", log)  # else what is not there would prove nothing
        self.assertNotIn("without statistics", log)
        self.states = tiny_model.states(self.folder)

    def stored(self):
        """{tensor: values as fp32} of every scale of Q, K and V in the checkpoint."""
        tensors = {}
        for file in self.checkpoint.glob("*.safetensors"):
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():
                    if re.search(r"self_attn\.[qkv]_scale$", name):
                        tensors[name] = opened.get_tensor(name).float().flatten().tolist()
        return tensors

    def check(self, strategy, dtype, sides="kv"):
        """The file says what the model's own Q, K and V say, and kvtier what the file says."""
        scheme = json.loads((self.checkpoint / "config.json").read_text())["quantization_config"]["kv_cache_scheme"]
        self.assertEqual(scheme["strategy"], strategy)
        stored = self.stored()
        self.assertEqual(len(stored), len(sides) * LAYERS)
        scales = json.loads(kvtier("scales", self.checkpoint, "--json"))
        self.assertEqual((scales["calibrated"], scales["warnings"]), (LAYERS, []))
        for index, layer in enumerate(scales["layers"]):
            for side in sides:
                name = f"model.layers.{index}.self_attn.{side}_scale"
                amax = self.states[index][side].abs().amax(dim=(0, 2)).float()
                want = (amax if strategy == "attn_head" else amax.max().reshape(1)) / 448
                # Two roundings to bf16, or what another order of summing gives in fp32.
                rtol = 2**-7 if dtype == torch.bfloat16 else 1e-5
                torch.testing.assert_close(torch.tensor(stored[name]), want, rtol=rtol, atol=0, msg=name)
                self.assertEqual(layer[f"{side}_tensor"], name)
                self.assertEqual(layer[f"{side}_scale"], per_kv_head(stored[name]) if side == "q" else stored[name])
        return stored

    def check_ranks(self, stored, sides):
        for size in (2, 4, 8):
            for rank in range(size):
                flags = ("--json", f"--tp-size={size}", f"--tp-rank={rank}")
                first, count = rank * KV_HEADS // size, max(1, KV_HEADS // size)
                for index, layer in enumerate(json.loads(kvtier("scales", self.checkpoint, *flags))["layers"]):
                    for side in sides:
                        values = stored[f"model.layers.{index}.self_attn.{side}_scale"]
                        want = (per_kv_head(values) if side == "q" else values)[first : first + count]
                        self.assertEqual(layer[f"{side}_scale"], want, (size, rank, index, side))

    def check_lines(self):
        """The lines that docs/calibration.md calls proof, and that the scales hold what they were calibrated on."""
        proof = f"calibrated {LAYERS} of {LAYERS} layers (calibrated)"
        self.assertEqual(kvtier("scales", self.checkpoint).splitlines()[-1], proof)
        file = self.folder / "kv.safetensors"
        save_file({f"layers.{i}.{s}": x[s].contiguous() for i, x in enumerate(self.states) for s in "kv"}, file)
        server = LiveServer()
        self.addCleanup(server.stop)
        put = ("put", file, f"--server={server.address}", "--kv-cache-dtype=fp8", "--json")
        answer = json.loads(kvtier(*put, "--sequence=calibrated", f"--scales={self.checkpoint}"))
        self.assertEqual(answer["scales_line"], f"scales: {proof}")
        # A scale that was rounded down saturates the largest values, never many.
        self.assertLessEqual(answer["saturated_values"], 2 * LAYERS * KV_HEADS)
        answer = json.loads(kvtier(*put, "--sequence=not"))
        self.assertIn("Using KV cache scaling factor 1.0 for fp8_e4m3", answer["scales_line"])

    def test_a_scale_per_tensor(self):
        self.calibrate("tensor", torch.bfloat16)
        self.check("tensor", torch.bfloat16)
        self.check_lines()

    def test_a_scale_per_tensor_in_fp32(self):
        self.calibrate("tensor", torch.float32)
        self.check("tensor", torch.float32)

    def test_a_scale_per_head_and_its_ranks(self):
        self.calibrate("attn_head", torch.bfloat16)
        self.check_ranks(self.check("attn_head", torch.bfloat16), "kv")
        self.check_lines()

    def test_a_scale_per_query_head_and_its_ranks(self):
        self.calibrate("attn_head", torch.float32, with_q=True)
        self.check_ranks(self.check("attn_head", torch.float32, "qkv"), "qkv")


if __name__ == "__main__":
    unittest.main()
