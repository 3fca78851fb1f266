"""The table of docs/capacity.md is the one that its command prints."""
import os
import pathlib
import subprocess
import sys
import unittest

ROOT = pathlib.Path(__file__).parent.parent.parent


class CapacityTable(unittest.TestCase):
    def test_is_what_the_command_prints(self):
        command = [sys.executable, "-B", str(ROOT / "scripts/capacity_table.py"), os.environ["KVTIER_CLI"]]
        table = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        document = (ROOT / "docs/capacity.md").read_text()
        self.assertIn("\n\n" + table + "\n", document, "the table of docs/capacity.md should be:\n" + table)


if __name__ == "__main__":
    unittest.main()
