"""Exits 1 naming every generated gRPC file in rpc/ that is not what rpc/*.proto generates today.

Run by `make check`; `make proto` brings the files up to date. Compared byte for byte: the generator is pinned.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GENERATED = ("*_pb2.py", "*_pb2.pyi", "*_pb2_grpc.py")


def stale_files(rpc: Path) -> list[str]:
    """Names of files in `rpc` that differ from what its protos generate, are missing, or have no proto any more."""
    with tempfile.TemporaryDirectory() as out:
        generate(rpc, Path(out))
        fresh = read_generated(Path(out) / "moonshard" / "rpc")
    committed = read_generated(rpc)
    return sorted(name for name in fresh.keys() | committed.keys() if fresh.get(name) != committed.get(name))


def generate(rpc: Path, out: Path) -> None:
    """Raises CalledProcessError where the compiler refuses a proto."""
    protos = [f"moonshard/rpc/{proto.name}" for proto in sorted(rpc.glob("*.proto"))]
    outputs = [f"--{kind}_out={out}" for kind in ("python", "pyi", "grpc_python")]
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-Imoonshard/rpc={rpc}", *outputs, *protos]
    subprocess.run(command, check=True)


def read_generated(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for pattern in GENERATED for path in folder.glob(pattern)}


def main() -> int:
    stale = stale_files(ROOT / "rpc")
    for name in stale:
        print(f"rpc/{name} is not current: run `make proto`", file=sys.stderr)  # noqa: T201
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
