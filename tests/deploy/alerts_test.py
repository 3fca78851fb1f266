"""The alert rules: each fires for the server that has what it is about, and for no other; and docs say what to do."""

import json
import re
import tempfile
import unittest

import support

RULES = support.DEPLOY / "prometheus" / "rules.yml"
# Two servers: {alert: (series of the one that has it, of the one that has not, eval time, labels beside severity)}. Values
# are as in promtool's tests: start+stepxcount, a minute each.
REJECTED = 'kvtier_rejected_total{{job="kvtier", instance="{}", rpc="Append", reason="{}"}}'
MODEL = 'job="kvtier", instance="{}", model="m", format="fp8_e4m3"'


def rejected(reason, bad, good):
    return {REJECTED.format("bad", reason): bad}, {REJECTED.format("good", reason): good}


def each(name, labels, bad, good):
    return tuple({f"{name}{{{labels.format(server)}}}": values} for server, values in (("bad", bad), ("good", good)))


def tokens(bad, good):
    """Appended and read tokens."""
    names = ("kvtier_append_tokens_total", "kvtier_read_tokens_total")
    return tuple({f"{name}{{{MODEL.format(server)}}}": values for name, values in zip(names, of)}
                 for server, of in (("bad", bad), ("good", good)))


def evicted(bad, good):
    name = 'kvtier_evicted_tokens_total{{job="kvtier", instance="{}", reason="memory"}}'
    return tuple({f"kvtier_append_tokens_total{{{MODEL.format(server)}}}": "0+6000x60", name.format(server): values}
                 for server, values in (("bad", bad), ("good", good)))


def slow(bad, good):
    """Reads, of which so many a minute took at most a second, and all at most ten."""
    name = 'kvtier_read_duration_seconds_bucket{{job="kvtier", instance="{}", le="{}"}}'
    return tuple({name.format(server, "1"): values, name.format(server, "10"): "0+100x60", name.format(server, "+Inf"): "0+100x60"}
                 for server, values in (("bad", bad), ("good", good)))


SERVER = 'job="kvtier", instance="{}"'
ALERTS = {
    "KvtierDown": (*each("up", SERVER, "0x60", "1x60"), "5m", {}),
    "KvtierDeviceLost": (*rejected("DEVICE_LOST", "0x5 1x60", "0x60"), "10m", {}),
    "KvtierDamagedPages": (*rejected("CHECKSUM", "0x5 1x60", "0x60"), "30m", {}),
    "KvtierRefusesForRoom": (*rejected("BUDGET", "0+5x60", "5x60"), "20m", {"reason": "BUDGET"}),
    "KvtierEvictsWhatItTakes": (*evicted("0+5900x60", "0+600x60"), "50m", {}),
    "KvtierOverloaded": (*rejected("OVERLOADED", "0+5x60", "5x60"), "20m", {}),
    "KvtierSlowReads": (*slow("0+50x60", "0+100x60"), "30m", {}),
    "KvtierTransportsFail": (*rejected("TRANSPORT_LOST", "0+1x60", "0x20 1x60"), "30m", {}),
    "KvtierDescriptorsRunOut": (
        {'process_open_fds{job="kvtier", instance="bad"}': "900x60", 'process_max_fds{job="kvtier", instance="bad"}': "1000x60"},
        {'process_open_fds{job="kvtier", instance="good"}': "50x60", 'process_max_fds{job="kvtier", instance="good"}': "1000x60"},
        "20m", {}),
    "KvtierDrainsForLong": (*each("kvtier_draining", SERVER, "1x60", "0x30 1x60"), "40m", {}),
    "KvtierValuesSaturate": (*each("kvtier_saturated_values_total", MODEL, "0+1x60", "7x60"), "30m",
                             {"model": "m", "format": "fp8_e4m3"}),
    "KvtierScalesNotCalibrated": (*each("kvtier_unit_scale_layers", MODEL, "4x60", "0x60"), "30m",
                                  {"model": "m", "format": "fp8_e4m3"}),
    "KvtierWritesThatNobodyReads": (*tokens(("0+9x120", "5x120"), ("0+9x120", "0+1x120")), "110m", {}),
}


def alerts():
    """Of the file: name -> rule."""
    groups = support.yaml().safe_load(RULES.read_text())["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"] if "alert" in rule}


class AlertsTest(unittest.TestCase):

    def fired(self, name, found):
        """What promtool says where `found` alerts of that name are expected."""
        bad, good, at, _ = ALERTS[name]
        series = [{"series": key, "values": values} for key, values in {**bad, **good}.items()]
        test = {"rule_files": [str(RULES)],
                "tests": [{"interval": "1m", "input_series": series,
                           "alert_rule_test": [{"alertname": name, "eval_time": at, "exp_alerts": found}]}]}
        with tempfile.NamedTemporaryFile("w", suffix=".yml") as file:
            json.dump(test, file)  # JSON is YAML
            file.flush()
            return support.run(support.tool("promtool"), "test", "rules", file.name)

    def test_each_fires_for_who_has_it_and_for_no_other(self):
        self.assertEqual(set(ALERTS), set(alerts()))
        for name, rule in alerts().items():
            with self.subTest(name):
                labels = {"severity": rule["labels"]["severity"], "job": "kvtier", "instance": "bad", **ALERTS[name][3]}
                # What the summary says depends on the value: promtool tells, and it names nothing but the server that has it.
                result = self.fired(name, [])
                self.assertNotEqual(result.returncode, 0, f"{name} does not fire")
                got = re.search(r"got:\[(.*)\]", result.stdout + result.stderr, re.S).group(1)
                for key, value in labels.items():
                    self.assertIn(f'{key}="{value}"', got)
                self.assertNotIn('instance="good"', got)
                self.assertNotIn("<no value>", got)

    def test_recorded_and_alerting_expressions_are_of_documented_metrics(self):
        documented = set(re.findall(r"\b(?:kvtier|process)_[a-z_]+", (support.ROOT / "docs" / "metrics.md").read_text()))
        used = set(re.findall(r"\b(?:kvtier|process)_[a-z_]+", RULES.read_text()))
        used = {name.removesuffix("_bucket") for name in used}
        self.assertTrue(used)
        self.assertLessEqual(used, documented)

    def test_docs_say_for_each_what_to_do(self):
        sections = re.findall(r"^## (Kvtier\w+)$", (support.ROOT / "docs" / "operations.md").read_text(), re.M)
        self.assertEqual(sections, list(alerts()))

    def test_prometheus_reads_them(self):
        for file in ("prometheus.yml", "prometheus-kubernetes.yml"):
            loaded = support.yaml().safe_load((support.DEPLOY / "prometheus" / file).read_text())
            self.assertEqual(loaded["rule_files"], [RULES.name])


if __name__ == "__main__":
    unittest.main()
