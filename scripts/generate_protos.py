"""Generate ampd/v1 and ampd/worker/v1 from protos/, or `--check` that they are fresh."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GENERATED = ("*_pb2.py", "*_pb2.pyi", "*_pb2_grpc.py", "*_pb2_grpc.pyi")
PACKAGES = ("ampd/v1", "ampd/worker/v1")


def generate(out: Path) -> None:
    """Write the generated modules below `out`: proto path == Python path."""
    protos = sorted(
        str(path.relative_to(ROOT / "protos")) for path in ROOT.glob("protos/**/*.proto")
    )
    bin_dir = Path(sys.executable).parent
    subprocess.run(
        [
            sys.executable,
            *("-m", "grpc_tools.protoc", f"--proto_path={ROOT / 'protos'}"),
            f"--plugin=protoc-gen-mypy={bin_dir / 'protoc-gen-mypy'}",
            f"--plugin=protoc-gen-mypy_grpc={bin_dir / 'protoc-gen-mypy_grpc'}",
            f"--python_out={out}",
            f"--grpc_python_out={out}",
            f"--mypy_out=quiet:{out}",
            f"--mypy_grpc_out=quiet:{out}",
            *protos,
        ],
        check=True,
        cwd=ROOT,
    )


def modules(base: Path) -> dict[str, str]:
    """Generated files below `base` by relative path."""
    return {
        str(path.relative_to(base)): path.read_text()
        for package in PACKAGES
        for pattern in GENERATED
        for path in (base / package).glob(pattern)
    }


def main() -> int:
    """Write in place, or with --check compare; 1 when the committed code is stale."""
    if sys.argv[1:] == ["--check"]:
        with tempfile.TemporaryDirectory() as folder:
            generate(Path(folder))
            fresh, committed = modules(Path(folder)), modules(ROOT)
        stale = sorted(
            name
            for name in fresh.keys() | committed.keys()
            if fresh.get(name) != committed.get(name)
        )
        for name in stale:
            print(f"stale: {name} (run `make protos`)", file=sys.stderr)
        return 1 if stale else 0
    for name in modules(ROOT):
        (ROOT / name).unlink()
    generate(ROOT)
    return 0


if __name__ == "__main__":
    sys.exit(main())
