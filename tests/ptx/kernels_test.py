"""The kernels as compiled: every float operation says how it rounds, and rounds as the host does. That none spills the compiler
itself sees to: it's an error."""
import os
import pathlib
import re
import unittest

FOLDER = os.environ.get("KVTIER_PTX")
# Modes that change values, and operations that ptxas may fuse because they don't say how they round.
INEXACT = re.compile(r"\.(ftz|approx|full)\b|\b(add|sub|mul|fma|mad|div|rcp|sqrt)\.f(16|32|64)|\bfma\.r[zmp]")


def inexact(ptx):
    """Lines of PTX whose result may differ from the host's."""
    return [line.strip() for line in ptx.splitlines() if INEXACT.search(line)]


class KernelsTest(unittest.TestCase):

    def test_operations_round_as_the_hosts(self):
        if not FOLDER:
            self.skipTest("no CUDA compiler: no kernels were compiled")
        files = sorted(pathlib.Path(FOLDER).glob("*.ptx"))
        self.assertEqual([file.stem for file in files], ["cuda_decode", "cuda_encode", "cuda_memory"])
        for file in files:
            ptx = file.read_text()
            self.assertEqual(inexact(ptx)[:5], [], file.name)
            if file.stem != "cuda_memory":  # which has none
                self.assertIn("div.rn.f32", ptx)

    def test_what_does_not_is_found(self):
        exact = "\tadd.rn.f32 %f1, %f2, %f3;\n\tcvt.rzi.s32.f32 %r1, %f1;\n\tld.v4.f32 {%f1, %f2, %f3, %f4}, [%rd1];"
        self.assertEqual(inexact(exact), [])
        for line in ("add.ftz.f32 %f1, %f2, %f3;", "add.f32 %f1, %f2, %f3;", "rcp.approx.f32 %f1, %f2;",
                     "div.full.f32 %f1, %f2, %f3;", "fma.rz.f32 %f1, %f2, %f3, %f4;"):
            self.assertEqual(inexact("\t" + line), [line])


if __name__ == "__main__":
    unittest.main()
