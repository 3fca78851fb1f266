"""What is committed under python/ is what the contract generates."""

import pathlib
import re
import shutil
import subprocess
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]


class StubsTest(unittest.TestCase):
    def test_stubs_are_those_of_the_contract(self):
        if shutil.which("protoc") is None or shutil.which("grpc_python_plugin") is None:
            self.skipTest("protoc or grpc_python_plugin is not installed")
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run([ROOT / "scripts/python-stubs", folder], check=True, timeout=60)
            for fresh in pathlib.Path(folder).rglob("*.py*"):
                committed = ROOT / "python" / fresh.relative_to(folder)
                self.assertEqual(fresh.read_text(), committed.read_text(), f"{committed}: run scripts/python-stubs")

    def test_version_is_that_of_the_project(self):
        version = re.search(r"project\(kvtier VERSION ([\d.]+)", (ROOT / "CMakeLists.txt").read_text()).group(1)
        self.assertIn(f'version = "{version}"', (ROOT / "python/pyproject.toml").read_text())
