"""Pods of written manifests as real processes: each in a network of its own, with its own files, user and names.

A kubelet in a small way. A pod is one process that holds a namespace of networks and one of mounts; init containers,
the container and its probes are started in there, with the command, environment and mounts that the manifest says, by
the user that it says. All pods are on one bridge, which is in a namespace as well, and names are in each pod's
/etc/hosts. Nothing of it is left once the processes have ended. NetworkPolicies are not enforced.
"""

import base64
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

READY_TIMEOUT_S = 240.0
SUBNET = "10.231.0"
GROWN = ("/etc", "/run", "/var/lib", "/srv")  # folders in which pods have folders of their own
INTERPRETER = Path(sys.executable)
SOURCES = os.environ.get("PYTHONPATH", "")

type Object = dict[str, Any]


def why_not() -> str | None:
    """Why no pods can be made here."""
    if os.geteuid() != 0:
        return "only root makes namespaces of networks and mounts"
    made = subprocess.run(["unshare", "--net", "--mount", "ip", "link"], capture_output=True, check=False)
    return None if made.returncode == 0 else f"no namespaces here: {made.stderr.decode().strip()}"


@dataclass
class Namespaces:
    """A process that does nothing in a network and mounts of its own; it ends with its input."""

    process: subprocess.Popen[bytes]

    @classmethod
    def make(cls, prepare: str) -> "Namespaces":
        """`prepare` is run in there by a shell, before anything else."""
        script = f"set -eu; {prepare}\necho made; exec cat"
        command = ["unshare", "--net", "--mount", "--propagation", "private", "sh", "-c", script]
        made = cls(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        assert made.process.stdout is not None
        assert made.process.stdout.readline() == b"made\n"
        return made

    def entered(self, *command: str) -> list[str]:
        return ["nsenter", "--target", str(self.process.pid), "--net", "--mount", *command]

    def run(self, *command: str) -> None:
        subprocess.run(self.entered(*command), check=True, capture_output=True)

    def end(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait(timeout=10)


class Network:
    """A bridge, and the addresses that are given out on it."""

    def __init__(self) -> None:
        self._switch = Namespaces.make("ip link add br0 type bridge; ip link set br0 up")
        self._num_ports = 0

    def plug_in(self, pod: Namespaces, address: str) -> None:
        self._num_ports += 1
        port = f"port{self._num_ports}"
        pair = ("ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", str(pod.process.pid))
        self._switch.run(*pair)
        self._switch.run("ip", "link", "set", port, "master", "br0", "up")
        pod.run("ip", "address", "add", f"{address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            pod.run("ip", "link", "set", device, "up")

    def end(self) -> None:
        self._switch.end()


@dataclass
class Pod:
    """One pod: `spec` is its manifest's. Objects are found in `cluster`."""

    name: str
    address: str
    spec: Object
    log_path: Path
    namespaces: Namespaces
    fields: Mapping[str, str] = field(default_factory=dict)
    main: subprocess.Popen[bytes] | None = None

    @property
    def container(self) -> Object:
        return self.spec["containers"][0]

    def start(self) -> None:
        """Init containers one after the other, then the container."""
        for container in self.spec["initContainers"]:
            done = subprocess.run(self._inside(container, self._expanded(container)), capture_output=True, check=False)
            assert done.returncode == 0, done.stderr.decode()
        with self.log_path.open("wb") as log:
            command = self._inside(self.container, self._expanded(self.container))
            self.main = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def run(self, *command: str, timeout_s: float = 60.0) -> subprocess.CompletedProcess[bytes]:
        """In the container, as `kubectl exec` does."""
        inside = self._inside(self.container, command)
        return subprocess.run(inside, capture_output=True, check=False, timeout=timeout_s)

    def is_well(self, probe: str) -> bool:
        """What a kubelet would find."""
        asked = self.container[probe]
        if "exec" in asked:
            return self.run(*asked["exec"]["command"]).returncode == 0
        get = asked["httpGet"]
        [port] = [each["containerPort"] for each in self.container["ports"] if each["name"] == get["port"]]
        headers = {each["name"]: each["value"] for each in get["httpHeaders"]}
        url = f"http://{self.address}:{port}{get['path']}"
        ask = f"import httpx; print(httpx.get({url!r}, headers={headers}).status_code)"
        return self.run("python", "-c", ask).stdout.strip() == b"200"

    def wait_for(self, probe: str) -> None:
        assert self.main is not None
        deadline = time.monotonic() + READY_TIMEOUT_S
        while not self.is_well(probe):
            assert self.main.poll() is None, f"{self.name} ended:\n{self.log()}"
            assert time.monotonic() < deadline, f"{self.name} is not well:\n{self.log()}"

    def terminate(self) -> int:
        """SIGTERM, and the exit code within the time that the pod is given."""
        assert self.main is not None
        self.main.send_signal(signal.SIGTERM)  # nsenter and setpriv have become the container's process
        return self.main.wait(self.spec["terminationGracePeriodSeconds"])

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def end(self) -> None:
        if self.main is not None and self.main.poll() is None:
            self.main.kill()
            self.main.wait()
        self.namespaces.end()

    def _inside(self, container: Object, command: Sequence[str]) -> list[str]:
        """The user that the manifest says, without rights, with nothing in the environment but what it says."""
        user = self.spec["securityContext"]
        ids = (f"--reuid={user['runAsUser']}", f"--regid={user['runAsGroup']}", f"--groups={user['fsGroup']}")
        rights = ("--inh-caps=-all", "--bounding-set=-all", "--no-new-privs")
        environment = [f"{name}={value}" for name, value in self._environment(container).items()]
        return self.namespaces.entered("setpriv", *ids, *rights, "env", "-i", *environment, *command)

    def _environment(self, container: Object) -> dict[str, str]:
        """The image's, then the manifest's."""
        image = {"PATH": f"{INTERPRETER.parent}:/usr/bin:/bin", "PYTHONPATH": SOURCES, "JAX_PLATFORMS": "cpu"}
        image["XLA_FLAGS"] = "--xla_backend_optimization_level=0"
        own = {
            each["name"]: each["value"] if "value" in each else self.fields[each["valueFrom"]["fieldRef"]["fieldPath"]]
            for each in container.get("env", [])
        }
        return image | own

    def _expanded(self, container: Object) -> list[str]:
        """`$(NAME)` is a variable of the container."""
        command = list(container["command"])
        for name, value in self._environment(container).items():
            command = [word.replace(f"$({name})", value) for word in command]
        return command


class Cluster:
    """The pods of manifests. `claims`: by name, the folders that they are."""

    def __init__(self, folder: Path, objects: Sequence[Object], claims: Mapping[str, Path]):
        self._folder = folder
        self._objects = {(each["kind"], each["metadata"]["name"]): each for each in objects}
        self._claims = claims
        self._network = Network()
        self.pods: dict[str, Pod] = {}
        planned = {name: (f"{SUBNET}.{10 + number}", spec) for number, (name, spec) in enumerate(self._planned())}
        self._hosts = self._names({name: address for name, (address, _) in planned.items()})
        for name, (address, spec) in planned.items():
            self.pods[name] = self._make(name, address, spec)

    def end(self) -> None:
        for pod in self.pods.values():
            pod.end()
        self._network.end()

    def _planned(self) -> Iterator[tuple[str, Object]]:
        """The pods that controllers would make, by the names that these give."""
        for (kind, name), each in self._objects.items():
            spec = each.get("spec", {})
            if kind == "LeaderWorkerSet":
                assert spec["leaderWorkerTemplate"]["size"] == 1
                template = spec["leaderWorkerTemplate"]["workerTemplate"]["spec"]
                yield from ((f"{name}-{index}", template) for index in range(spec["replicas"]))
            elif kind == "Deployment":
                yield from ((f"{name}-{index:x}", spec["template"]["spec"]) for index in range(spec["replicas"]))

    def _names(self, addresses: Mapping[str, str]) -> str:
        """/etc/hosts as the cluster's DNS would have it: pods of headless Services, and a Service by its first pod."""
        rows = ["127.0.0.1 localhost"]
        for (kind, service), each in self._objects.items():
            if kind != "Service":
                continue
            own = {name: address for name, address in addresses.items() if name.startswith(f"{service}-")}
            domain = f"{service}.{each['metadata']['namespace']}.svc"
            if each["spec"].get("clusterIP") == "None":
                rows += [f"{address} {name}.{domain}" for name, address in own.items()]
            else:
                rows.append(f"{next(iter(own.values()))} {domain}")
        return "\n".join(rows) + "\n"

    def _make(self, name: str, address: str, spec: Object) -> Pod:
        folder = self._folder / name
        folder.mkdir()
        (folder / "hosts").write_text(self._hosts)
        group = spec["securityContext"]["fsGroup"]
        sources = {each["name"]: self._source(folder, each, group) for each in spec["volumes"]}
        mounts = {
            each["mountPath"]: sources[each["name"]]
            for container in (*spec["initContainers"], *spec["containers"])
            for each in container["volumeMounts"]
        }
        namespaces = Namespaces.make(_mounting(mounts, folder / "hosts"))
        self._network.plug_in(namespaces, address)
        fields = {"status.podIP": address, "metadata.name": name}
        return Pod(name, address, spec, self._folder / f"{name}.log", namespaces, fields)

    def _source(self, folder: Path, volume: Object, group: int) -> Path:
        """The folder that a volume is, for a pod."""
        if "persistentVolumeClaim" in volume:
            return self._claims[volume["persistentVolumeClaim"]["claimName"]]
        source = folder / volume["name"]
        source.mkdir()
        os.chown(source, 0, group)
        source.chmod(0o2777)
        if "configMap" in volume:
            data = self._objects["ConfigMap", volume["configMap"]["name"]]["data"]
            _fill(source, {name: text.encode() for name, text in data.items()}, 0o644, group)
        if "secret" in volume:
            data = self._objects["Secret", volume["secret"]["secretName"]]["data"]
            _fill(
                source,
                {name: base64.b64decode(text) for name, text in data.items()},
                volume["secret"]["defaultMode"],
                group,
            )
        return source


def _fill(folder: Path, files: Mapping[str, bytes], mode: int, group: int) -> None:
    for name, content in files.items():
        path = folder / name
        path.write_bytes(content)
        os.chown(path, 0, group)
        path.chmod(mode)


def _mounting(mounts: Mapping[str, Path], hosts: Path) -> str:
    """Shell commands. Folders that the system has not are made in a layer over it, which is the pod's; it also lets the
    pod's user find the interpreter, wherever that is.
    """
    hidden = [str(folder) for folder in INTERPRETER.resolve().parents if not folder.stat().st_mode & 0o001]
    lines = ["mount -t tmpfs none /mnt"]
    for number, folder in enumerate([*GROWN, *hidden]):
        layer = f"lowerdir={folder},upperdir=/mnt/{number}/up,workdir=/mnt/{number}/work"
        lines += [f"mkdir -p /mnt/{number}/up /mnt/{number}/work", f"mount -t overlay overlay -o {layer} {folder}"]
    lines += [f"chmod a+x {folder}" for folder in hidden]
    for path, source in mounts.items():
        lines += [f"mkdir -p {shlex.quote(path)}", f"mount --bind {shlex.quote(str(source))} {shlex.quote(path)}"]
    lines.append(f"mount --bind {shlex.quote(str(hosts))} /etc/hosts")
    return "; ".join(lines)


@contextmanager
def running(folder: Path, objects: Sequence[Object], claims: Mapping[str, Path]) -> Iterator[Cluster]:
    """All pods started and ready; killed after the block where they still run."""
    with ExitStack() as stack:
        cluster = Cluster(folder, objects, claims)
        stack.callback(cluster.end)
        for pod in cluster.pods.values():
            pod.start()
        for pod in cluster.pods.values():
            pod.wait_for("readinessProbe")
        yield cluster
