"""The overlays: that they render, and say what their parts say elsewhere."""

import tempfile
import tomllib
import unittest

import support


def objects(overlay):
    """Of an overlay: {(kind, name): object}."""
    found = support.yaml().safe_load_all(support.rendered(support.OVERLAYS / overlay))
    return {(each["kind"], each["metadata"]["name"]): each for each in found}


class OverlaysTest(unittest.TestCase):

    def test_all_have_the_base(self):
        base = {(each["kind"], each["metadata"]["name"].split("-config")[0])
                for each in support.yaml().safe_load_all(support.rendered_base())}
        for folder in support.OVERLAYS.iterdir():
            with self.subTest(folder.name):
                self.assertLessEqual(base, {(kind, name.split("-config")[0]) for kind, name in objects(folder.name)})

    def test_rules_are_those_that_are_tested(self):
        rules = support.yaml().safe_load((support.DEPLOY / "prometheus" / "rules.yml").read_text())
        self.assertEqual(objects("monitoring")["PrometheusRule", "kvtier"]["spec"], rules)

    def test_the_monitor_finds_one_service_and_its_port(self):
        found = objects("monitoring")
        spec = found["ServiceMonitor", "kvtier"]["spec"]
        wanted = spec["selector"]["matchLabels"].items()
        services = [each for (kind, _), each in found.items()
                    if kind == "Service" and wanted <= each["metadata"]["labels"].items()]
        self.assertEqual([each["metadata"]["name"] for each in services], ["kvtier-headless"])
        self.assertIn(spec["endpoints"][0]["port"], [port["name"] for port in services[0]["spec"]["ports"]])
        self.assertEqual(services[0]["metadata"]["labels"][spec["jobLabel"]], "kvtier")

    def test_the_gpu_server_has_one(self):
        found = objects("gpu")
        container = found["StatefulSet", "kvtier"]["spec"]["template"]["spec"]["containers"][0]
        self.assertEqual(container["resources"]["limits"]["nvidia.com/gpu"], "1")
        (config,) = (each["data"]["kvtier.toml"] for (kind, _), each in found.items() if kind == "ConfigMap")
        self.assertEqual(tomllib.loads(config)["device"], "cuda:0")
        base = support.config()
        for key in ("listen", "health_listen", "metrics_listen"):
            self.assertEqual(tomllib.loads(config)[key], base[key])

    def test_the_gpus_config_is_one_that_kvtierd_takes(self):
        config = support.OVERLAYS / "gpu" / "kvtier.toml"
        result = support.run(support.binary("kvtierd"), "--check-config", "--config", config)
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)

    def test_fields_are_known_to_kubernetes(self):
        validate = support.tool("kubernetes-validate")
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
            file.write(support.rendered(support.OVERLAYS / "gpu"))
            file.flush()
            result = support.run(validate, "--strict", "-k", "1.32", file.name)
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)


if __name__ == "__main__":
    unittest.main()
