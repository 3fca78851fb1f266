"""Starts a kvtierd for the programs that measure or test one."""
import contextlib
import json
import os
import subprocess
import time


class Failed(Exception):
    """A command failed; the message says which and how."""


@contextlib.contextmanager
def server(binary, work, memory, *flags):
    """A kvtierd on host memory and free ports, with its files in the folder `work`; gives its addresses: listen, health, metrics."""
    ready = work / "ready.json"
    command = [binary, "--listen=127.0.0.1:0", "--health-listen=127.0.0.1:0", "--metrics-listen=127.0.0.1:0"]
    command += ["--device=host", f"--memory={memory}", f"--ready-file={ready}", *flags]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KVTIER_")}
    with open(work / "kvtierd.log", "w+", encoding="utf-8") as log:
        try:
            process = subprocess.Popen(command, stderr=log, env=environment)
        except OSError as error:
            raise Failed(f"{binary} can't be started: {error.strerror}; scripts/build makes it") from error
        try:
            deadline = time.monotonic() + 30
            while not ready.exists():
                if process.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    raise Failed(f"kvtierd did not get ready:\n{log.read()}")
                time.sleep(0.01)
            yield json.loads(ready.read_text())
        finally:
            process.terminate()
            process.wait(timeout=60)
