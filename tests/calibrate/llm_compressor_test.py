"""Checkpoints that the real LLM Compressor calibrates, read by kvtier. Run by scripts/test-calibrate."""

import json
import os
import pathlib
import subprocess
import tempfile
import unittest

import datasets
import torch
from compressed_tensors.quantization import QuantizationArgs
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import QuantizationModifier
from safetensors import safe_open
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

LAYERS, HEADS, KV_HEADS, VOCABULARY, TOKENS, SAMPLES = 3, 8, 4, 256, 64, 8


def tiny_model(dtype):
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=4 * TOKENS,
    )
    return LlamaForCausalLM(config).to(dtype)


def tokenizer():
    """oneshot wants one, though the samples are tokens already."""
    words = models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0")
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), pad_token="w0")


def calibrate(model, strategy, folder):
    tokens = torch.randint(VOCABULARY, (SAMPLES, TOKENS), generator=torch.Generator().manual_seed(5)).tolist()
    dataset = datasets.Dataset.from_dict({"input_ids": tokens, "attention_mask": [[1] * TOKENS] * SAMPLES})
    scheme = QuantizationArgs(
        num_bits=8, type="float", strategy=strategy, dynamic=False, symmetric=True, observer="static_minmax"
    )
    oneshot(
        model=model,
        dataset=dataset,
        processor=tokenizer(),
        recipe=QuantizationModifier(kv_cache_scheme=scheme),
        max_seq_length=TOKENS,
        num_calibration_samples=SAMPLES,
    )
    model.save_pretrained(folder)
    return tokens


def largest_magnitudes(model, tokens):
    """{layer: (K, V)}: the largest |x| by KV head of what the model caches."""
    with torch.no_grad():
        cache = model(torch.tensor(tokens), use_cache=True).past_key_values
    return [tuple(x.abs().amax(dim=(0, 2, 3)).float() for x in (layer.keys, layer.values)) for layer in cache.layers]


def scales_of(folder, *flags):
    command = [os.environ["KVTIER_CLI"], "scales", str(folder), "--json", *flags]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise AssertionError(result.stderr)
    return json.loads(result.stdout)


class LlmCompressorTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def stored(self):
        """{tensor: values as fp32} of every scale of K and V in the checkpoint."""
        tensors = {}
        for file in self.folder.glob("*.safetensors"):
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():
                    if name.endswith(("self_attn.k_scale", "self_attn.v_scale")):
                        tensors[name] = opened.get_tensor(name).float().flatten().tolist()
        return tensors

    def check(self, strategy, dtype):
        exact = largest_magnitudes(tiny_model(dtype), calibrate(tiny_model(dtype), strategy, self.folder))
        scheme = json.loads((self.folder / "config.json").read_text())["quantization_config"]["kv_cache_scheme"]
        self.assertEqual(scheme["strategy"], strategy)
        stored = self.stored()
        self.assertEqual(len(stored), 2 * LAYERS)
        scales = scales_of(self.folder)
        self.assertEqual(scales["calibrated"], LAYERS)
        self.assertEqual(scales["warnings"], [])
        for index, layer in enumerate(scales["layers"]):
            for side, amax in zip("kv", exact[index]):
                name = f"model.layers.{index}.self_attn.{side}_scale"
                self.assertEqual(layer[f"{side}_tensor"], name)
                self.assertEqual(layer[f"{side}_scale"], stored[name])
                self.assertEqual(len(stored[name]), KV_HEADS if strategy == "attn_head" else 1)
                # What a scale means, not only that it was copied: amax / 448, rounded to the model's type.
                want = (amax if strategy == "attn_head" else amax.max(dim=0, keepdim=True).values) / 448
                torch.testing.assert_close(torch.tensor(stored[name]), want, rtol=0.02, atol=0)
        return stored

    def test_a_scale_per_tensor(self):
        self.check("tensor", torch.bfloat16)

    def test_a_scale_per_tensor_in_fp32(self):
        self.check("tensor", torch.float32)

    def test_a_scale_per_head_and_its_ranks(self):
        stored = self.check("attn_head", torch.bfloat16)
        for size in (2, 4, 8):
            for rank in range(size):
                first, last = rank * KV_HEADS // size, max(1, KV_HEADS // size)
                layer = scales_of(self.folder, f"--tp-size={size}", f"--tp-rank={rank}")["layers"][1]
                want = stored["model.layers.1.self_attn.k_scale"][first : first + last]
                self.assertEqual(layer["k_scale"], want, (size, rank))


if __name__ == "__main__":
    unittest.main()
