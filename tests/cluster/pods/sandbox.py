"""Pods of written manifests as real processes: each in a network of its own, with its own files, user and names.

A kubelet in a small way. A pod is one process that holds namespaces of networks, mounts and the host's name; init
containers, the container and its probes are started in there, with the command, environment and mounts that the
manifest says, by the user that it says. All pods are on one bridge, which is in a namespace as well, and names are in
each pod's /etc/hosts. Nothing of it is left once the processes have ended. NetworkPolicies are not enforced, and a
process that ends is not started again: only a group is made anew, where a test asks for it.
"""

import base64
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.pods.controllers import Object, Planned, names, planned

READY_TIMEOUT_S = 600.0
ASKED_EVERY_S = 1.0  # of pods that are not ready yet
SUBNET = "10.231.0"
GROWN = ("/etc", "/run", "/var/lib", "/srv")  # folders in which pods have folders of their own
INTERPRETER = Path(sys.executable)
SOURCES = os.environ.get("PYTHONPATH", "")


def why_not() -> str | None:
    """Why no pods can be made here."""
    if os.geteuid() != 0:
        return "only root makes namespaces of networks and mounts"
    made = subprocess.run(["unshare", "--net", "--mount", "--uts", "ip", "link"], capture_output=True, check=False)
    return None if made.returncode == 0 else f"no namespaces here: {made.stderr.decode().strip()}"


@dataclass
class Namespaces:
    """A process that does nothing in a network, mounts and a host's name of its own; it ends with its input."""

    process: subprocess.Popen[bytes]

    @classmethod
    def make(cls, prepare: str) -> "Namespaces":
        """`prepare` is run in there by a shell, before anything else."""
        script = f"set -eu; {prepare}\necho made; exec cat"
        command = ["unshare", "--net", "--uts", "--mount", "--propagation", "private", "sh", "-c", script]
        made = cls(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        assert made.process.stdout is not None
        assert made.process.stdout.readline() == b"made\n"
        return made

    def entered(self, *command: str) -> list[str]:
        return ["nsenter", "--target", str(self.process.pid), "--net", "--uts", "--mount", *command]

    def run(self, *command: str) -> None:
        subprocess.run(self.entered(*command), check=True, capture_output=True)

    def end(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait(timeout=10)


def plug_in(there: Namespaces, address: str, port: str, run: Callable[..., None]) -> None:
    """A cable from `port` of the bridge `br0` to `there`. `run` runs a command where the bridge is."""
    run("ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", str(there.process.pid))
    run("ip", "link", "set", port, "master", "br0", "up")
    there.run("ip", "address", "add", f"{address}/24", "dev", "eth0")
    for device in ("lo", "eth0"):
        there.run("ip", "link", "set", device, "up")


class Network:
    """A bridge, and the addresses that are given out on it."""

    def __init__(self) -> None:
        self._switch = Namespaces.make("ip link add br0 type bridge; ip link set br0 up")
        self._num_ports = 0

    def plug_in(self, pod: Namespaces, address: str) -> None:
        self._num_ports += 1
        plug_in(pod, address, f"port{self._num_ports}", self._switch.run)

    def end(self) -> None:
        self._switch.end()


@dataclass
class Pod:
    """One pod. It is known to others by what is in their /etc/hosts; its own lies at `hosts_path`."""

    planned: Planned
    address: str
    namespaces: Namespaces
    log_path: Path
    hosts_path: Path
    main: subprocess.Popen[bytes] | None = None

    @property
    def name(self) -> str:
        return self.planned.name

    @property
    def spec(self) -> Object:
        return self.planned.spec

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

    def wait_ready(self) -> None:
        """One that is not asked is ready as soon as it runs."""
        deadline = time.monotonic() + READY_TIMEOUT_S
        while "readinessProbe" in self.container and not self.is_well("readinessProbe"):
            assert self.is_running, f"{self.name} ended:\n{self.log()}"
            assert time.monotonic() < deadline, f"{self.name} is not well:\n{self.log()}"
            time.sleep(ASKED_EVERY_S)

    @property
    def is_running(self) -> bool:
        return self.main is not None and self.main.poll() is None

    def send(self, number: int) -> None:
        if self.main is not None:
            self.main.send_signal(number)  # nsenter and setpriv have become the container's process

    def wait_ended(self, timeout_s: float) -> int:
        """The exit code."""
        assert self.main is not None
        return self.main.wait(timeout_s)

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def end(self) -> None:
        if self.is_running:
            self.send(signal.SIGKILL)
            self.wait_ended(10)
        self.namespaces.end()

    def _inside(self, container: Object, command: Sequence[str]) -> list[str]:
        """The user that the manifest says, without rights, with nothing in the environment but what it says."""
        user = self.spec["securityContext"]
        ids = (f"--reuid={user['runAsUser']}", f"--regid={user['runAsGroup']}", f"--groups={user['fsGroup']}")
        rights = ("--inh-caps=-all", "--bounding-set=-all", "--no-new-privs")
        environment = [f"{name}={value}" for name, value in self._environment(container).items()]
        return self.namespaces.entered("setpriv", *ids, *rights, "env", "-i", *environment, *command)

    def _environment(self, container: Object) -> dict[str, str]:
        """The image's, what controllers add, then the manifest's."""
        image = {"PATH": f"{INTERPRETER.parent}:/usr/bin:/bin", "PYTHONPATH": SOURCES, "JAX_PLATFORMS": "cpu"}
        image["XLA_FLAGS"] = "--xla_backend_optimization_level=0"
        fields = {"status.podIP": self.address, "metadata.name": self.name}
        own = {
            each["name"]: each["value"] if "value" in each else fields[each["valueFrom"]["fieldRef"]["fieldPath"]]
            for each in container.get("env", [])
        }
        return image | dict(self.planned.variables) | own

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
        self._num_made = 0
        self.pods: dict[str, Pod] = {}

    def start(self) -> None:
        """Returns once all are ready."""
        self._make_all(list(planned(self._objects.values())))

    def recreate(self, group: str) -> None:
        """As LeaderWorkerSet's controller does once a container of the group has ended: all its pods are deleted, and
        others made, which have their names and no address of theirs. Returns once they are ready.
        """
        pods = [pod for pod in self.pods.values() if pod.planned.group == group]
        terminated(pods)
        for pod in pods:
            pod.end()
        self._make_all([pod.planned for pod in pods])

    def end(self) -> None:
        for pod in self.pods.values():
            pod.end()
        self._network.end()

    def _make_all(self, wanted: Sequence[Planned]) -> None:
        made = {pod.name: self._make(pod) for pod in wanted}
        self.pods |= made
        self._publish()
        for pod in made.values():
            pod.start()
        for pod in reversed(made.values()):  # gateways wait for workers
            pod.wait_ready()

    def _publish(self) -> None:
        """Every pod knows its own name, and what DNS says of the others."""
        pods = [(pod.planned, pod.address) for pod in self.pods.values()]
        known = ["127.0.0.1 localhost", *names(self._objects.values(), pods)]
        for pod in self.pods.values():
            pod.hosts_path.write_text("\n".join([*known, f"{pod.address} {pod.name}"]) + "\n")

    def _make(self, pod: Planned) -> Pod:
        address = f"{SUBNET}.{10 + self._num_made}"
        self._num_made += 1
        folder = self._folder / f"{pod.name}-{address}"
        folder.mkdir()
        hosts = folder / "hosts"
        hosts.touch()
        group = pod.spec["securityContext"]["fsGroup"]
        sources = {each["name"]: self._source(folder, each, group) for each in pod.spec["volumes"]}
        mounts = {
            each["mountPath"]: sources[each["name"]]
            for container in (*pod.spec["initContainers"], *pod.spec["containers"])
            for each in container["volumeMounts"]
        }
        namespaces = Namespaces.make(f"hostname {pod.name}; {_mounting(mounts, hosts)}")
        self._network.plug_in(namespaces, address)
        return Pod(pod, address, namespaces, log_path=folder / "log", hosts_path=hosts)

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


def terminated(pods: Iterable[Pod]) -> dict[str, int]:
    """SIGTERM to all of them; by their names the exit codes within the time that each is given."""
    pods = list(pods)
    for pod in pods:
        pod.send(signal.SIGTERM)
    return {pod.name: pod.wait_ended(pod.spec["terminationGracePeriodSeconds"]) for pod in pods}


@contextmanager
def running(folder: Path, objects: Sequence[Object], claims: Mapping[str, Path]) -> Iterator[Cluster]:
    """All pods started and ready; killed after the block where they still run."""
    with ExitStack() as stack:
        cluster = Cluster(folder, objects, claims)
        stack.callback(cluster.end)
        cluster.start()
        yield cluster
