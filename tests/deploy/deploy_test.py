"""The manifests and the image: that their parts agree with each other and with kvtierd.

Run as a program this runs every test of the folder. KVTIER_KVTIERD names a built kvtierd that has
kvtier beside it; without it the tests that need them are skipped.
"""

import pathlib
import re
import sys
import tempfile
import unittest

import support


class ManifestsTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        yaml = support.yaml()
        cls.text = support.rendered_base()
        cls.objects = [o for o in yaml.safe_load_all(cls.text)]
        cls.pod = cls.one("StatefulSet")["spec"]["template"]
        cls.container = cls.pod["spec"]["containers"][0]
        cls.ports = {p["name"]: p["containerPort"] for p in cls.container["ports"]}

    @classmethod
    def all(cls, kind):
        return [o for o in cls.objects if o["kind"] == kind]

    @classmethod
    def one(cls, kind):
        (found,) = cls.all(kind)
        return found

    def test_container_listens_where_its_config_says(self):
        config = support.config()
        self.assertEqual(
            self.ports,
            {
                "grpc": support.port_of(config["listen"]),
                "health": support.port_of(config["health_listen"]),
                "metrics": support.port_of(config["metrics_listen"]),
            },
        )

    def test_probes_ask_the_health_port_for_names_that_kvtierd_serves(self):
        asked = {
            name: self.container[name + "Probe"]["grpc"]
            for name in ("startup", "liveness", "readiness")
        }
        health = self.ports["health"]
        self.assertEqual(
            asked,
            {
                "startup": {"port": health, "service": "liveness"},
                "liveness": {"port": health, "service": "liveness"},
                "readiness": {"port": health, "service": "readiness"},
            },
        )

    def test_config_is_mounted_where_the_arguments_look(self):
        (mount,) = self.container["volumeMounts"]
        (volume,) = self.pod["spec"]["volumes"]
        config_map = self.one("ConfigMap")
        self.assertEqual(mount["name"], volume["name"])
        self.assertEqual(volume["configMap"]["name"], config_map["metadata"]["name"])
        (file,) = config_map["data"]
        self.assertEqual(self.container["args"], ["--config", f"{mount['mountPath']}/{file}"])

    def test_ports_that_others_name_exist(self):
        named = [p["targetPort"] for s in self.all("Service") for p in s["spec"]["ports"]]
        named += [
            p["port"]
            for rule in self.one("NetworkPolicy")["spec"]["ingress"]
            for p in rule["ports"]
        ]
        self.assertLessEqual(set(named), set(self.ports))
        for service in self.all("Service"):
            for port in service["spec"]["ports"]:
                self.assertEqual(
                    port["port"], self.ports[port["targetPort"]], service["metadata"]["name"]
                )

    def test_selectors_select_the_pods(self):
        stateful_set = self.one("StatefulSet")["spec"]
        selectors = [
            stateful_set["selector"]["matchLabels"],
            self.one("PodDisruptionBudget")["spec"]["selector"]["matchLabels"],
            self.one("NetworkPolicy")["spec"]["podSelector"]["matchLabels"],
        ]
        selectors += [s["spec"]["selector"] for s in self.all("Service")]
        for selector in selectors:
            self.assertLessEqual(selector.items(), self.pod["metadata"]["labels"].items())
        (headless,) = [s for s in self.all("Service") if s["spec"].get("clusterIP") == "None"]
        self.assertEqual(stateful_set["serviceName"], headless["metadata"]["name"])

    def test_pod_is_restricted(self):
        self.assertEqual(
            self.one("Namespace")["metadata"]["labels"]["pod-security.kubernetes.io/enforce"],
            "restricted",
        )
        pod, container = self.pod["spec"]["securityContext"], self.container["securityContext"]
        self.assertTrue(pod["runAsNonRoot"])
        self.assertEqual(pod["seccompProfile"], {"type": "RuntimeDefault"})
        self.assertFalse(container["allowPrivilegeEscalation"])
        self.assertTrue(container["readOnlyRootFilesystem"])
        self.assertEqual(container["capabilities"], {"drop": ["ALL"]})
        self.assertFalse(self.pod["spec"]["automountServiceAccountToken"])

    def test_service_links_do_not_configure_kvtierd(self):
        self.assertFalse(self.pod["spec"]["enableServiceLinks"])

    def test_budget_leaves_room_under_the_memory_limit(self):
        limit = support.bytes_of(self.container["resources"]["limits"]["memory"])
        self.assertLess(support.bytes_of(support.config()["memory"]), 0.9 * limit)

    def test_fields_are_known_to_kubernetes(self):
        validate = support.tool("kubernetes-validate")
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
            file.write(self.text)
            file.flush()
            result = support.run(validate, "--strict", "-k", "1.32", file.name)
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)


class ConfigTest(unittest.TestCase):
    def check(self, text):
        with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
            file.write(text)
            file.flush()
            return support.run(support.binary("kvtierd"), "--check-config", "--config", file.name)

    def test_kvtierd_takes_the_config(self):
        result = self.check(support.CONFIG.read_text())
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)

    def test_kvtierd_refuses_an_unknown_key(self):
        result = self.check(support.CONFIG.read_text() + 'healht_listen = "0.0.0.0:7072"\n')
        self.assertEqual(result.returncode, 2, result.stdout + result.stderr)
        self.assertIn("healht_listen", result.stdout + result.stderr)


class ImageTest(unittest.TestCase):
    # Part of every Debian image: apt itself needs them.
    IN_THE_BASE_IMAGE = {"libc6", "libgcc-s1", "libstdc++6"}
    # Of the executables that tests run, perhaps; of the image's never.
    SANITIZERS = {"libasan8", "libubsan1"}

    @classmethod
    def setUpClass(cls):
        cls.path = support.DEPLOY / "Dockerfile"
        cls.text = re.sub(r"^\s*#.*\n", "", cls.path.read_text(), flags=re.MULTILINE).replace(
            "\\\n", " "
        )

    def arguments(self, instruction):
        return re.findall(rf"^{instruction} (.*)$", self.text, flags=re.MULTILINE)

    def installed(self):
        (install,) = re.findall(r"apt-get install (.*?)&&", self.text)
        return {word for word in install.split() if not word.startswith("-")}

    def linked(self, name):
        """The packages of the libraries that an executable names itself."""
        path = support.binary(name)
        needed = re.findall(
            r"\(NEEDED\).*\[(.*)\]", support.run(support.tool("readelf"), "-d", path).stdout
        )
        found = dict(re.findall(r"(\S+) => (/\S+)", support.run(support.tool("ldd"), path).stdout))
        libraries = [str(pathlib.Path(found[n]).resolve()) for n in needed if n in found]
        self.assertTrue(libraries, f"{name} links no library")
        # dpkg knows a file by the name it was packed with: with or without the tree's merged /usr.
        names = [n for library in libraries for n in (library, library.removeprefix("/usr"))]
        known = support.run(support.tool("dpkg"), "-S", *names).stdout.splitlines()
        self.assertEqual(len(known), len(libraries), f"{libraries} are of {known}")
        return {line.partition(":")[0] for line in known}

    def test_packages_are_those_that_the_executables_link(self):
        linked = self.linked("kvtierd") | self.linked("kvtier")
        self.assertEqual(self.installed(), linked - self.IN_THE_BASE_IMAGE - self.SANITIZERS)

    def test_runs_as_the_user_of_the_pod(self):
        security = support.pod_spec()["securityContext"]
        self.assertEqual(
            self.arguments("USER"), [f"{security['runAsUser']}:{security['runAsGroup']}"]
        )

    def test_exposes_and_listens_on_the_ports_of_the_config(self):
        config = support.config()
        addresses = [config["listen"], config["health_listen"], config["metrics_listen"]]
        self.assertEqual(
            self.arguments("EXPOSE"), [" ".join(str(support.port_of(a)) for a in addresses)]
        )
        (command,) = self.arguments("CMD")
        self.assertEqual(re.findall(r"\d+\.\d+\.\d+\.\d+:\d+", command), addresses)

    def test_kvtierd_takes_the_default_arguments(self):
        (command,) = self.arguments("CMD")
        result = support.run(
            support.binary("kvtierd"), *re.findall(r'"([^"]*)"', command), "--check-config"
        )
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)

    def test_hadolint(self):
        result = support.run(
            support.tool("hadolint"), "-c", support.DEPLOY / ".hadolint.yaml", self.path
        )
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)


if __name__ == "__main__":
    folder = str(pathlib.Path(__file__).parent)
    unittest.main(
        module=None, argv=[sys.argv[0], "discover", "-v", "-s", folder, "-p", "*_test.py"]
    )
