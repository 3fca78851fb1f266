"""A real kvtierd for tests, on ports of its own."""

import json
import os
import pathlib
import signal
import subprocess
import tempfile
import time


class LiveServer:
    def __init__(self, memory="64MiB", *flags):
        self._folder = tempfile.TemporaryDirectory()
        ready = pathlib.Path(self._folder.name) / "ready.json"
        command = [os.environ["KVTIER_KVTIERD"], "--listen=127.0.0.1:0", "--health-listen=127.0.0.1:0", "--metrics-listen="]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("KVTIER_")}
        command += [f"--memory={memory}", "--log-level=error", f"--ready-file={ready}", *flags]
        self._process = subprocess.Popen(command, env=environment)
        deadline = time.monotonic() + 30
        while not ready.exists():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("kvtierd did not get ready")
            time.sleep(0.01)
        addresses = json.loads(ready.read_text())
        self.address, self.health_address = addresses["listen"], addresses["health"]
        self.folder = self._folder.name

    def stop(self):
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(timeout=30)
        self._folder.cleanup()
