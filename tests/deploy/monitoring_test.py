"""The scrape configurations and the dashboard: that they are valid and show what they say."""

import json
import re
import tempfile
import unittest

import support

# Two servers, the second one empty but for a smaller budget; values as kvtierd would export them.
SERIES = {
    'kvtier_budget_bytes{instance="a"}': 1000,
    'kvtier_budget_bytes{instance="b"}': 600,
    'kvtier_memory_bytes{instance="a", part="codes"}': 700,
    'kvtier_memory_bytes{instance="a", part="free"}': 300,
    'kvtier_memory_bytes{instance="b", part="codes"}': 0,
    'kvtier_memory_bytes{instance="b", part="free"}': 600,
    'kvtier_tokens_held{instance="a", model="m", format="kivi2"}': 50,
    'kvtier_tokens_held{instance="b", model="m", format="kivi2"}': 0,
    'kvtier_tokens_that_still_fit{instance="a", as="one_sequence", model="m", format="kivi2"}': 20,
    'kvtier_tokens_that_still_fit{instance="b", as="one_sequence", model="m", format="kivi2"}': 40,
    'kvtier_tokens_that_still_fit{instance="a", as="mean_sequences", model="m", format="kivi2"}': 9,
    'kvtier_tokens_that_still_fit{instance="b", as="mean_sequences", model="m", format="kivi2"}': 8,
    'kvtier_source_bytes{instance="a", model="m", format="kivi2"}': 3500,
    'kvtier_source_bytes{instance="b", model="m", format="kivi2"}': 0,
    'kvtier_stored_bytes{instance="a", model="m", format="kivi2"}': 700,
    'kvtier_stored_bytes{instance="b", model="m", format="kivi2"}': 0,
}
MODEL = '{model="m", format="kivi2"}'
# {panel and target: (what it shows of both servers, what it shows of the first)}
SHOWN = {
    ("Budget in use", "A"): ({"{}": 1 - 900 / 1600}, {"{}": 0.7}),
    ("Memory by part", "A"): (
        {'{part="codes"}': 700, '{part="free"}': 900},
        {'{part="codes"}': 700, '{part="free"}': 300},
    ),
    ("Tokens held", "A"): ({MODEL: 50}, {MODEL: 50}),
    ("Tokens that still fit", "A"): ({MODEL: 40}, {MODEL: 20}),
    ("Tokens that still fit", "B"): ({MODEL: 17}, {MODEL: 9}),
    ("Compression ratio", "A"): ({MODEL: 5}, {MODEL: 5}),
}


class ScrapeTest(unittest.TestCase):
    FILES = ("prometheus.yml", "prometheus-kubernetes.yml")

    def job(self, file):
        (job,) = support.yaml().safe_load((support.DEPLOY / "prometheus" / file).read_text())[
            "scrape_configs"
        ]
        return job

    def test_prometheus_takes_the_files(self):
        promtool = support.tool("promtool")
        for file in self.FILES:
            with self.subTest(file):
                result = support.run(
                    promtool, "check", "config", support.DEPLOY / "prometheus" / file
                )
                self.assertEqual(result.returncode, 0, result.stdout + result.stderr)

    def test_targets_are_where_kvtierd_serves_metrics(self):
        port = support.port_of(support.config()["metrics_listen"])
        (target,) = self.job("prometheus.yml")["static_configs"][0]["targets"]
        self.assertEqual(support.port_of(target), port)
        (found,) = self.job("prometheus-kubernetes.yml")["dns_sd_configs"]
        self.assertEqual(found["port"], port)
        manifests = list(support.yaml().safe_load_all(support.rendered_base()))
        (headless,) = [
            m["metadata"]
            for m in manifests
            if m["kind"] == "Service" and m["spec"].get("clusterIP")
        ]
        self.assertEqual(found["names"], [f"{headless['name']}.{headless['namespace']}.svc"])


class DashboardTest(unittest.TestCase):
    def test_rows_fill_the_grid(self):
        rows = {}
        for panel in support.dashboard()["panels"]:
            rows.setdefault(panel["gridPos"]["y"], []).append(panel)
        self.assertEqual([row[0]["title"] for row in rows.values() if row[0]["type"] == "row"],
                         ["Capacity", "Traffic", "Quality", "Health"])
        below = 0
        for y, panels in sorted(rows.items()):
            self.assertEqual(y, below)
            x = 0
            for panel in panels:
                self.assertEqual(panel["gridPos"]["x"], x, panel["title"])
                x += panel["gridPos"]["w"]
            self.assertEqual(x, 24)
            below += panels[0]["gridPos"]["h"]
        ids = [p["id"] for p in support.dashboard()["panels"]]
        self.assertEqual(len(ids), len(set(ids)))

    def test_panels_show_what_they_say(self):
        promtool = support.tool("promtool")
        self.assertLess(set(SHOWN), set(support.dashboard_targets(".*")))  # the others are rates
        checks = []
        for which, instance in enumerate((".*", "a")):
            targets = support.dashboard_targets(instance)
            for name, expression in ((name, targets[name]) for name in SHOWN):
                samples = [
                    {"labels": labels, "value": value}
                    for labels, value in SHOWN[name][which].items()
                ]
                checks.append({"expr": expression, "eval_time": "1m", "exp_samples": samples})
        series = [{"series": name, "values": f"{value}x2"} for name, value in SERIES.items()]
        rules = {"tests": [{"interval": "1m", "input_series": series, "promql_expr_test": checks}]}
        with tempfile.NamedTemporaryFile("w", suffix=".yml") as file:
            json.dump(rules, file)  # JSON is YAML
            file.flush()
            result = support.run(promtool, "test", "rules", file.name)
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)

    def test_metrics_are_documented(self):
        document = support.ROOT / "docs" / "metrics.md"
        if not document.exists():
            self.skipTest("docs/metrics.md does not exist")
        used = set(re.findall(r"\bkvtier_[a-z0-9_]+", support.DASHBOARD.read_text()))
        used = {name.removesuffix("_bucket") for name in used}
        documented = set(re.findall(r"\bkvtier_[a-z0-9_]+", document.read_text()))
        self.assertTrue(used)
        self.assertLessEqual(used, documented)


if __name__ == "__main__":
    unittest.main()
