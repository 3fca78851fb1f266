"""Prefix keys of the Python client: the same as the server's, in every process."""

import json
import os
import pathlib
import subprocess
import sys
import unittest

try:
    import numpy  # noqa: F401
except ImportError as missing:
    raise unittest.SkipTest(f"{missing.name} is not installed") from None

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "python"))
from kvtier import Prompt, prefix_keys, root_key

VECTORS = ROOT / "tests" / "data" / "prefix_keys.json"


def prompt_of(vector):
    return Prompt(
        token_ids=vector.get("token_ids", ()),
        block_hashes=tuple(map(bytes.fromhex, vector.get("block_hashes", ()))),
        salt=bytes.fromhex(vector.get("salt", "")),
        adapter=vector.get("adapter", ""),
        extra_keys={int(block): bytes.fromhex(key) for block, key in vector.get("extra_keys", {}).items()},
    )


class PrefixKeyTest(unittest.TestCase):
    def test_golden_vectors(self):
        for vector in json.loads(VECTORS.read_text()):
            with self.subTest(vector=vector):
                prompt = prompt_of(vector)
                keys = prefix_keys(vector["namespace"], vector["model_id"], prompt, vector["hash_block_tokens"])
                self.assertEqual([key.hex() for key in keys], vector["prefix_keys"])
                self.assertEqual(root_key(vector["namespace"], vector["model_id"], prompt).hex(), vector["root_key"])

    def test_hash_seeds_change_nothing(self):
        program = (
            "import sys; sys.path.insert(0, sys.argv[1])\n"
            "from kvtier import Prompt, prefix_keys\n"
            "print(prefix_keys('', 'm', Prompt(token_ids=range(64), salt='s', extra_keys={1: b'x'}))[-1].hex())"
        )
        printed = {
            subprocess.run(
                [sys.executable, "-B", "-c", program, str(ROOT / "python")],
                env={**os.environ, "PYTHONHASHSEED": seed},
                capture_output=True,
                text=True,
                timeout=60,
                check=True,
            ).stdout
            for seed in ("0", "1", "12345")
        }
        self.assertEqual(len(printed), 1)

    def test_both_kinds_of_content_are_refused(self):
        with self.assertRaisesRegex(ValueError, "want one of the two"):
            prefix_keys("", "m", Prompt(token_ids=[1], block_hashes=(b"h",)))


if __name__ == "__main__":
    unittest.main()
