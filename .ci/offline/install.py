"""Installs an offline bundle on top of this Python's torch: verifies parts, makes environments, imports all of it.

bash install.sh TARGET [PYTHON], run by the Python that has torch; no network, no pip, nothing written outside TARGET.

Each environment is a virtual environment of its own, in which this Python's packages can be seen behind its own: no
PYTHONPATH, which MCP servers would not inherit. Parts may arrive one by one; those that came are kept in TARGET.
"""

from __future__ import annotations

import ctypes
import hashlib
import io
import json
import lzma
import os
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path

SOURCE = Path(__file__).resolve().parent
IMPORT_DEADLINE_S = 300
STARTED = time.monotonic()

IMPORT_ALL = """
import importlib, json, pkgutil, sys
names, optional = json.loads(sys.argv[1])
def walk(name, whole):
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = (error.name or "").replace("_", "-").replace(".", "-")
        if any(f"{missing}-".startswith(f"{package}-") for package in optional):
            return
        raise
    yield name
    for info in pkgutil.iter_modules(getattr(module, "__path__", ()) if whole else (), name + "."):
        if not info.name.endswith("__main__"):
            yield from walk(info.name, whole)
print(sum(1 for name in names for _ in walk(name.removesuffix(".*"), name.endswith(".*"))))
"""
"""Imports modules and all that is in them, but for what needs a package that was not asked for."""
SCRIPT = "#!{python}\nimport sys\nfrom {module} import main\nsys.exit(main())\n"
SCRIPTS = {"mtrl-train": "trainer.cli", "mtrl-gateway": "gateway.cli"}


class InstallError(Exception):
    """A failure that its message explains."""


def tell(line: str) -> None:
    """A line with the seconds since the start."""
    print(f"{time.monotonic() - STARTED:7.1f} s  {line}", flush=True)


def check_machine(manifest: dict) -> Path:
    """Refuses another Python or torch than the bundle is for; returns the folder that holds torch."""
    python = ".".join(map(str, sys.version_info[:2]))
    if python != manifest["python"]:
        raise InstallError(f"this is Python {python}, the bundle is for {manifest['python']}: name another Python")
    try:
        import torch
    except ImportError as error:
        raise InstallError(f"{sys.executable} has no torch ({error}): name the Python that has it") from None
    if not f"{torch.__version__}.".startswith(f"{manifest['torch']}."):
        raise InstallError(f"torch is {torch.__version__}, the bundle is for {manifest['torch']}: pack it with TORCH=…")
    cuda = torch.version.cuda
    if cuda and cuda != manifest["cuda"]:
        raise InstallError(f"torch is built for CUDA {cuda}, the bundle for {manifest['cuda']}: pack it with CUDA=…")
    device = torch.cuda.get_device_name() if has_gpu() else "no GPU"
    tell(f"Python {python}, torch {torch.__version__}, {device}")
    return Path(torch.__file__).parent.parent


def has_gpu() -> bool:
    """Whether torch sees a GPU: compiled kernels are imported only where one is."""
    import torch

    return torch.cuda.is_available()


def gather_parts(name: str, parts: list, target: Path) -> list[Path] | None:
    """The verified parts of an archive; None while some have not arrived."""
    kept = target / "parts"
    kept.mkdir(parents=True, exist_ok=True)
    found, absent = [], []
    for part in parts:
        file, stored = SOURCE / part["file"], kept / part["sha256"]
        if file.is_file():
            if sha256(file) != part["sha256"]:
                raise InstallError(f"{file} is damaged: its hash is not the manifest's; carry it again")
            found.append(file)
        elif stored.is_file():
            found.append(stored)
        else:
            absent.append(part["file"])
    if not absent:
        return found
    for file, part in ((file, part) for file in found for part in parts if file == SOURCE / part["file"]):
        shutil.copyfile(file, kept / f"{part['sha256']}.partial")
        os.replace(kept / f"{part['sha256']}.partial", kept / part["sha256"])
    tell(f"{name}: still to come: {', '.join(absent)}")
    return None


def sha256(file: Path) -> str:
    """A file's hash."""
    with file.open("rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()


class Joined(io.RawIOBase):
    """Files read as one."""

    def __init__(self, files: list[Path]) -> None:
        self._files = [file.open("rb") for file in files]

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray) -> int:
        while self._files:
            if count := self._files[0].readinto(buffer):
                return count
            self._files.pop(0).close()
        return 0


def unpack(files: list[Path], folder: Path) -> None:
    """Unpacks the joined parts into a folder, which exists only when it is whole."""
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    joined = lzma.LZMAFile(io.BufferedReader(Joined(files), 1 << 20))
    with joined, tarfile.open(fileobj=joined, mode="r|") as tar:
        tar.extractall(partial, filter="data")
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


def make_environment(name: str, files: list[Path], target: Path, machine: Path) -> Path:
    """A virtual environment with these packages, and the machine's behind them; returns its Python."""
    folder = target / name
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (site,) = folder.glob("lib/python3.*/site-packages")
    unpack(files, site)
    (site / "machine.pth").write_text(f"{machine}\n")
    python = folder / "bin" / "python"
    for script, module in SCRIPTS.items():
        if (site / module.partition(".")[0]).is_dir():
            path = folder / "bin" / script
            path.write_text(SCRIPT.format(python=python, module=module))
            path.chmod(0o755)
    return python


def import_everything(python: Path, names: list[str], optional: list[str]) -> str:
    """Imports these modules in that environment; returns how many they were, or raises."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(
        [str(python), "-c", IMPORT_ALL, json.dumps([names, optional])],
        env=environment,
        cwd=python.parent,
        capture_output=True,
        text=True,
        timeout=IMPORT_DEADLINE_S,
        check=False,
    )
    if done.returncode:
        raise InstallError(f"{python} cannot import all that will be run:\n{done.stderr[-2500:]}")
    return done.stdout.strip()


def install(target: Path) -> bool:
    """Installs what has arrived; returns whether that is everything."""
    manifest = json.loads((SOURCE / "manifest.json").read_text())
    machine = check_machine(manifest)
    whole = True
    for name, content in manifest["contents"].items():
        stamp = target / name / ".installed"
        identity = " ".join([*(part["sha256"] for part in content["parts"]), *content.get("options", ())])
        if stamp.is_file() and stamp.read_text() == identity:
            tell(f"{name}: installed before")
            continue
        files = gather_parts(name, content["parts"], target)
        if files is None:
            whole = False
            continue
        tell(f"{name}: verified")
        if "imports" in content:
            python = make_environment(name, files, target, machine)
            (target / name / "launch_options.txt").write_text(" ".join(content["options"]))  # Read by `launch.py`.
            tell(f"{name}: unpacked")
            names = content["imports"] + (content["imports_on_gpu"] if has_gpu() else [])
            count = import_everything(python, names, manifest["optional"])
            tell(f"{name}: {count} modules imported")
        else:
            unpack(files, target / name)
            tell(f"{name}: unpacked")
        stamp.write_text(identity)
        for part in content["parts"]:
            (target / "parts" / part["sha256"]).unlink(missing_ok=True)
    write_settings(target, machine)
    return whole


def find_driver() -> list[Path]:
    """The driver's library, wherever the loader finds it; none on a machine without a GPU."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [Path(line.split()[-1]) for line in lines if "libcuda.so" in line][:1]


def write_settings(target: Path, machine: Path) -> None:
    """`env.sh`: where SGLang's Python is, and where kernels compiled on first use find headers and libraries."""
    lines = [f"export PATH={target / 'mtrl' / 'bin'}:$PATH HF_HUB_OFFLINE=1"]
    if (target / "sglang").is_dir():
        lines.append(f"export MTRL_SGLANG_PYTHON={target / 'sglang' / 'bin' / 'python'}")
    toolkit = next(machine.glob("nvidia/cu[0-9]*/include"), None)
    if toolkit is not None:
        links = target / "cuda_link"
        links.mkdir(exist_ok=True)
        for library in [*(toolkit.parent / "lib").glob("lib*.so.*"), *find_driver()]:
            link = links / f"{library.name.partition('.so')[0]}.so"
            link.unlink(missing_ok=True)
            link.symlink_to(library)
        lines += [
            f"export CPATH=${{CPATH:+$CPATH:}}{toolkit}",
            f"export LIBRARY_PATH=${{LIBRARY_PATH:+$LIBRARY_PATH:}}{links}",
        ]
    for variable, folder in (
        ("FLASHINFER_WORKSPACE_BASE", ""),
        ("TVM_FFI_CACHE_DIR", "tvm_ffi"),
        ("TRITON_CACHE_DIR", "triton"),
    ):
        lines.append(f"export {variable}={target / 'jit' / folder}")
    (target / "env.sh").write_text("\n".join(lines) + "\n")


def main() -> int:
    target = Path(sys.argv[1]).resolve()
    try:
        whole = install(target)
    except (InstallError, OSError, lzma.LZMAError, tarfile.TarError, subprocess.SubprocessError) as error:
        print(f"install: {error}", file=sys.stderr)
        return 1
    if not whole:
        return 3
    tell(f"ready: source {target}/env.sh")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
