"""The pod's configuration as a process on this machine: what probes ask, what a Prometheus sees.

Needs KVTIER_KVTIERD; single tests need python3-grpcio or prometheus.
"""

import itertools
import json
import pathlib
import re
import signal
import socket
import subprocess
import tempfile
import time
import unittest
import urllib.parse
import urllib.request

import support

# Panels of what ought not to happen, or need not: they show zeros.
QUIET = {"Values that saturated", "FP8 range used", "Layers not calibrated", "Pages in fewer bits", "Evicted", "Held by clients"}
DATA = support.ROOT / "tests" / "data" / "smollm2-135m-kv.safetensors"
PATIENCE_S = 30


def until(condition, what):
    """The first true answer of `condition`, asked ten times a second."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        if answer := condition():
            return answer
        time.sleep(0.1)
    raise AssertionError(f"{what} did not happen within {PATIENCE_S} s")


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class LiveTest(unittest.TestCase):
    def setUp(self):
        kvtierd = support.binary("kvtierd")
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        ready = self.folder / "ready.json"
        # Flags over file: the file's ports may be taken here, and its memory more than there is.
        flags = {
            "--config": support.CONFIG,
            "--listen": "127.0.0.1:0",
            "--health-listen": "127.0.0.1:0",
            "--metrics-listen": "127.0.0.1:0",
            "--memory": "64MiB",
            "--ready-file": ready,
        }
        self.kvtierd = self.start(kvtierd, *itertools.chain(*flags.items()))
        until(lambda: ready.exists() or self.kvtierd.poll() is not None, "the ready file")
        log = (self.folder / "kvtierd.log").read_text()
        self.assertIsNone(self.kvtierd.poll(), f"kvtierd ended at start: {log}")
        self.addresses = json.loads(ready.read_text())

    def start(self, program, *arguments):
        with open(self.folder / f"{pathlib.Path(program).name}.log", "w") as log:
            process = subprocess.Popen(
                [str(word) for word in (program, *arguments)],
                env=support.environment(),
                stdout=log,
                stderr=log,
            )
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        return process

    def kvtier(self, *arguments):
        return support.run(support.binary("kvtier"), *arguments, "--server", self.addresses["listen"])

    def put(self, sequence="deploy"):
        if not DATA.exists():
            self.skipTest(f"{DATA.name} does not exist")
        result = self.kvtier("put", DATA, "--sequence", sequence, "--kv-cache-dtype", "kivi2")
        self.assertEqual(result.returncode, 0, result.stderr)

    def traffic(self, number):
        """A little of all that moves the panels, but for what ought not to happen."""
        self.put(f"traffic-{number}")
        self.assertEqual(self.kvtier("get", "--sequence", f"traffic-{number}", "--out", self.folder / f"{number}.safetensors").returncode, 0)
        self.assertNotEqual(self.kvtier("describe", "--sequence", "no such").returncode, 0)

    def scraped(self):
        with urllib.request.urlopen(
            f"http://{self.addresses['metrics']}/metrics", timeout=5
        ) as reply:
            return reply.read().decode()

    def test_health_answers_what_the_probes_ask(self):
        try:
            import grpc
        except ImportError:
            self.skipTest("python3-grpcio is not installed")
        channel = grpc.insecure_channel(self.addresses["health"])
        self.addCleanup(channel.close)
        check = channel.unary_unary("/grpc.health.v1.Health/Check")
        for service in ("liveness", "readiness"):
            with self.subTest(service):
                # HealthCheckRequest{1: service} and HealthCheckResponse{1: SERVING}, written out:
                # stubs are not worth it for two fields.
                request = bytes([0x0A, len(service)]) + service.encode()
                self.assertEqual(check(request, timeout=5), b"\x08\x01")

    def test_sigterm_ends_it_within_the_grace_period(self):
        grace_s = support.pod_spec()["terminationGracePeriodSeconds"]
        self.kvtierd.send_signal(signal.SIGTERM)
        self.assertEqual(self.kvtierd.wait(timeout=grace_s), 0)

    def test_metrics_pass_the_linter_of_prometheus(self):
        promtool = support.tool("promtool")
        self.put()
        result = support.run(promtool, "check", "metrics", input=self.scraped())
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)

    def test_every_panel_shows_something(self):
        prometheus = support.tool("prometheus")
        self.put()
        config = support.yaml().safe_load(
            (support.DEPLOY / "prometheus" / "prometheus.yml").read_text()
        )
        config["global"]["scrape_interval"] = "1s"
        config["global"]["evaluation_interval"] = "1s"
        config["rule_files"] = [str(support.DEPLOY / "prometheus" / "rules.yml")]
        config["scrape_configs"][0]["static_configs"] = [{"targets": [self.addresses["metrics"]]}]
        file = self.folder / "prometheus.json"
        file.write_text(json.dumps(config))  # JSON is YAML
        address = f"127.0.0.1:{free_port()}"
        self.start(
            prometheus,
            f"--config.file={file}",
            f"--storage.tsdb.path={self.folder / 'tsdb'}",
            f"--web.listen-address={address}",
        )
        until(lambda: self.series(address, 'up{job="kvtier"} == 1'), "a scrape")
        targets = support.dashboard_targets(".*")

        def shown():
            """{panel and target: values}"""
            return {name: [float(s["value"][1]) for s in self.series(address, expression)]
                    for name, expression in targets.items()}

        def moves(values):
            return all(any(value > 0 for value in values[name]) for name in targets if name[0] not in QUIET)

        # A rate needs two scrapes with something between them.
        numbers = itertools.count()
        until(lambda: self.traffic(next(numbers)) or moves(shown()), "something in every panel")
        for name, values in shown().items():
            with self.subTest(name):
                self.assertTrue(values, f"{targets[name]} gives nothing")
        # Rules, too: of what is recorded there is something, and nothing is wrong.
        for record in re.findall(r"record: (\S+)", (support.DEPLOY / "prometheus" / "rules.yml").read_text()):
            until(lambda: self.series(address, record), record)
        self.assertEqual(self.series(address, 'ALERTS{severity!="info"}'), [])

    def series(self, address, expression):
        query = urllib.parse.urlencode({"query": expression})
        try:
            with urllib.request.urlopen(
                f"http://{address}/api/v1/query?{query}", timeout=5
            ) as reply:
                return json.load(reply)["data"]["result"]
        except OSError:  # not up yet
            return []


if __name__ == "__main__":
    unittest.main()
