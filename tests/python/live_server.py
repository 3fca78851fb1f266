"""A real kvtierd for tests, on ports of its own."""

import contextlib
import os
import pathlib
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "scripts"))
from kvtierd_process import server


class LiveServer:
    def __init__(self, memory="64MiB", *flags):
        with contextlib.ExitStack() as stack:
            self.folder = stack.enter_context(tempfile.TemporaryDirectory())
            work = pathlib.Path(self.folder)
            addresses = stack.enter_context(
                server(os.environ["KVTIER_KVTIERD"], work, memory, "--log-level=error", *flags)
            )
            self.address, self.health_address = addresses["listen"], addresses["health"]
            self._stack = stack.pop_all()

    def stop(self):
        self._stack.close()
