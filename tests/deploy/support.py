"""Where deploy/ lies and how it is read. What is not installed skips a test, with the reason."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import tomllib
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
BASE = DEPLOY / "kustomize" / "base"
OVERLAYS = BASE.parent / "overlays"
CONFIG = BASE / "kvtier.toml"
DASHBOARD = DEPLOY / "grafana" / "kvtier.json"


def environment():
    """The caller's, without KVTIER_*: to kvtierd that is configuration."""
    return {k: v for k, v in os.environ.items() if not k.startswith("KVTIER_")}


def run(*command, **options):
    """Runs a command and keeps its output."""
    return subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=120,
        **options,
    )


def tool(name):
    path = shutil.which(name)
    if path is None:
        raise unittest.SkipTest(f"{name} is not installed")
    return path


def binary(name):
    """An executable of the build that KVTIER_KVTIERD points into."""
    kvtierd = os.environ.get("KVTIER_KVTIERD")
    if not kvtierd:
        raise unittest.SkipTest("KVTIER_KVTIERD names no kvtierd")
    path = pathlib.Path(kvtierd).resolve().with_name(name)
    if not path.exists():
        raise FileNotFoundError(f"KVTIER_KVTIERD is {kvtierd}, but {path} does not exist")
    return path


def yaml():
    try:
        import yaml as module
    except ImportError:
        raise unittest.SkipTest("python3-yaml is not installed") from None
    return module


def config():
    return tomllib.loads(CONFIG.read_text())


def port_of(address):
    return int(address.rpartition(":")[2])


def bytes_of(size):
    """ "6GiB" as kvtier writes it, "8Gi" as Kubernetes does."""
    number, unit = re.fullmatch(r"(\d+)([KMGT]i)B?", size).groups()
    return int(number) << {"Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40}[unit]


def rendered_base():
    """The manifests of the base: the text that would be applied."""
    return rendered(BASE)


def rendered(folder):
    """The same of the base or an overlay."""
    result = run(tool("kubectl"), "kustomize", folder)
    if 'unknown field "labels"' in result.stderr:
        raise unittest.SkipTest("kubectl is older than 1.22, as Debian 12's own is")
    if result.returncode != 0:
        raise AssertionError(f"kubectl kustomize: {result.stderr}")
    return result.stdout


def pod_spec():
    """As written: without kubectl."""
    stateful_set = yaml().safe_load((BASE / "statefulset.yaml").read_text())
    return stateful_set["spec"]["template"]["spec"]


def dashboard():
    return json.loads(DASHBOARD.read_text())


def dashboard_targets(instance):
    """{(panel title, refId): expression}, with the instance chosen as Grafana would."""
    return {
        (panel["title"], target["refId"]): target["expr"].replace("$instance", instance)
        for panel in dashboard()["panels"]
        for target in panel.get("targets", [])
    }
