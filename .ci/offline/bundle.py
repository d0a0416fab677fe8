"""Packs what a machine without a network needs: mtrl's packages, SGLang with its kernels, and a model, in parts.

make offline-bundle DIR=bundle                                   # for a machine with torch 2.11 and Python 3.12
make offline-bundle DIR=bundle SIZE=64M HELD=packages.txt        # nothing that the machine holds; parts of 64 MB
make offline-bundle DIR=bundle MODEL=models/qwen WITH=trl==1.16.0
make offline-bundle DIR=bundle WITHOUT=sglang                    # for the embedded engine alone

Carry DIR to the machine, whole or part by part, and run `bash DIR/install.sh TARGET` there: docs/scaling.md.

What is packed follows from `pyproject.toml` (extras `train` and `lora`, or EXTRAS) and from SGLang's needs for that
torch: nothing is listed twice. torch and what it brings stay out, since they belong to the machine and its driver.
HELD names a file like `pip freeze` writes on the machine: what it holds in a fitting version stays out, too.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
MIB = 1024 * 1024
UNITS = {"K": 1024, "M": MIB, "G": 1024 * MIB}
EXTRAS = "train,lora"
BELONGS_TO_MACHINE = re.compile(r"(torch|torchvision|torchaudio|triton|nvidia-.*|cuda-.*)$")
GLIBC = "2_34"
"""The oldest for which SGLang's kernels are built."""
XZ_LEVEL = 6
"""Of SGLang's tree, level 9 saves another 6 % and takes half as long again."""

SGLANG = "sglang>=0.5.17,<0.6"
"""The oldest that is accepted."""
SGLANG_DOES_WITHOUT = (
    *("anthropic", "blobfile", "datasets", "easydict", "mistral-common", "modelscope", "smg-grpc-servicer", "timm"),
    *("flash-attn-4", "helion", "humming-kernels", "kernels", "llguidance", "outlines", "quack-kernels"),
    *("sgl-deep-gemm", "tilelang", "tokenspeed-mla", "torchao", "torchcodec", "torchaudio", "watchfiles", "zstandard"),
    *("nvidia-cutlass-dsl", "nvidia-mathdx", "nvidia-cudnn-frontend", "nccl4py", "cuda-tile", "cuda-python"),
    *("ipython-pygments-lexers", "jedi", "matplotlib-inline", "pexpect", "prompt-toolkit", "stack-data", "py-spy"),
)
"""Needs of other models, attention kernels, hubs and interfaces, none of which a text model's server imports."""
SGLANG_ALSO = ("dill", "jsonschema")
"""Imported, though not declared, or declared only by what is left out."""
SGLANG_LEAVE_OUT = (
    *("sgl_kernel/flash_ops.abi3.so", "sgl_kernel/flashmla_ops.abi3.so", "sgl_kernel/spatial_ops.abi3.so"),
    *("sgl_kernel/infllm_ops*.so", "sgl_kernel/sm100/*", "xgrammar/lib/libxgrammar.a"),
    *("sglang/multimodal_gen/*", "sglang/test/*", "sglang/benchmark/*"),
)
"""Kernels for other GPUs than Hopper, and for attention other than Triton's: 1.5 GB."""
SGLANG_OPTIONS = (
    *("--attention-backend", "triton", "--mm-attention-backend", "triton_attn", "--sampling-backend", "pytorch"),
)
"""For what is left: on Hopper SGLang would choose the first file above, and compile another sampler first."""


class BundleError(Exception):
    """A failure that its message explains."""


@dataclass(frozen=True)
class Target:
    """The machine: its Python and torch, mtrl's extras there, and packages that it holds, with versions where known."""

    python: str
    torch: str
    cuda: str
    extras: tuple[str, ...]
    held: dict[str, str]

    @property
    def platform(self) -> str:
        return f"x86_64-manylinux_{GLIBC}"


@dataclass(frozen=True)
class Environment:
    """A virtual environment on the machine: what it needs, what stays out, and what is imported before it is ready."""

    name: str
    requirements: tuple[str, ...]
    """Empty: those of `pyproject.toml`, and mtrl itself."""
    imports: tuple[str, ...]
    """Modules; `NAME.*` is a package with all that is in it."""
    imports_on_gpu: tuple[str, ...] = ()
    does_without: tuple[str, ...] = ()
    leave_out: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    """With which SGLang starts there, unless others are given."""


def read_held(file: Path | None) -> dict[str, str]:
    """Lines of `pip freeze`: name and version; a line of a name alone is a version unknown, and is believed."""
    if file is None:
        return {}
    lines = (line.partition("#")[0].strip() for line in file.read_text(encoding="utf-8").splitlines())
    pairs = (line.partition("==") for line in lines if line and " @ " not in line)
    return {canonical(name): version.partition("+")[0] for name, _, version in pairs}  # without "+cu130"


def canonical(name: str) -> str:
    """A package's name as indexes compare it."""
    return name.strip().lower().replace("_", "-").replace(".", "-")


def run_uv(*arguments: str, cwd: Path = ROOT) -> str:
    """Runs uv, which resolves for another Python than the one that runs it, as pip does not."""
    environment = {"UV_NATIVE_TLS": "true", **os.environ}  # the machine's certificates: an index may have its own
    command = [sys.executable, "-m", "uv", *arguments]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BundleError(f"uv {arguments[0]} {arguments[1]} failed:\n{done.stderr[-3000:]}")
    return done.stdout


def resolve(requirements: Sequence[str], target: Target, without: Iterable[str] = ()) -> list[str]:
    """The pins of what these requirements need, what the machine holds where it fits, without `without`."""
    with tempfile.TemporaryDirectory() as folder:
        needs, constraints, overrides, pins = (
            Path(folder) / name for name in ("needs.in", "constraints.txt", "overrides.txt", "pins.txt")
        )
        needs.write_text("\n".join(requirements) + "\n")
        project = () if requirements else (str(ROOT / "pyproject.toml"), *(f"--extra={name}" for name in target.extras))
        constraints.write_text(f"torch=={target.torch}.*\n")
        overrides.write_text("".join(f"{name} ; python_version < '0'\n" for name in without))  # needed by nobody
        pins.write_text("".join(f"{name}=={version}\n" for name, version in target.held.items() if version))
        run_uv(
            *("pip", "compile", str(needs), *project, "--output-file", str(pins), "--constraints", str(constraints)),
            *("--overrides", str(overrides), "--python-version", target.python, "--python-platform", target.platform),
            *("--prerelease", "if-necessary-or-explicit", "--no-header", "--no-annotate", "--quiet"),
        )
        return pins.read_text().split()


def choose_pins(environment: Environment, target: Target) -> list[str]:
    """What is carried: all that is needed, less torch and its CUDA libraries, less what the machine holds."""
    pins = resolve(environment.requirements, target, environment.does_without)
    carried = []
    for name, _, version in (pin.partition("==") for pin in pins):
        if BELONGS_TO_MACHINE.match(name):
            continue
        held = target.held.get(canonical(name))
        if held is None or held not in ("", version):
            carried.append(f"{name}=={version}")
    return carried


def fill_tree(environment: Environment, pins: Sequence[str], target: Target, tree: Path) -> None:
    """Unpacks the wheels of these pins into `tree`, and takes away what is left out."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(pins) + "\n")
        file.flush()
        run_uv(
            *("pip", "install", "--requirements", file.name, "--target", str(tree), "--no-deps", "--quiet"),
            *("--only-binary", ":all:", "--python-version", target.python, "--python-platform", target.platform),
            *("--prerelease", "allow", "--link-mode", "copy"),
        )
    shutil.rmtree(tree / "bin", ignore_errors=True)  # scripts for this machine's Python
    for pattern in environment.leave_out:
        matches = list(tree.glob(pattern))
        if not matches:
            tell(f"{environment.name}: no {pattern} to leave out; the machine holds it, or a release moved it")
        for match in matches:
            shutil.rmtree(match) if match.is_dir() else match.unlink()


def add_own_wheel(tree: Path) -> None:
    """Unpacks mtrl itself, as it is in this checkout, into `tree`."""
    with tempfile.TemporaryDirectory() as folder:
        run_uv("build", "--wheel", "--quiet", "--out-dir", folder, str(ROOT))
        (wheel,) = Path(folder).glob("*.whl")
        run_uv("pip", "install", "--target", str(tree), "--no-deps", "--quiet", "--link-mode", "copy", str(wheel))
    shutil.rmtree(tree / "bin", ignore_errors=True)


def find_optional(extras: Sequence[str]) -> list[str]:
    """Packages of the extras that are not carried: a module that needs one of them need not import there."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    needs = (need for extra, needs in declared.items() if extra not in extras for need in needs)
    return sorted({canonical(re.match(r"[\w.-]+", need)[0]) for need in needs})  # type: ignore[index]


def pack(tree: Path, archive: Path, size: int, level: int) -> list[dict[str, Any]]:
    """Writes a folder as a compressed archive in parts of `size` bytes; returns each part's name and hash."""
    files = sorted((path for path in tree.rglob("*") if path.is_file()), key=lambda path: (path.suffix, str(path)))
    with archive.open(
        "wb"
    ) as sink:  # Files of a kind beside each other, and the filter for machine code, pack smaller.
        xz = subprocess.Popen(
            ["xz", "-T0", "--x86", f"--lzma2=preset={level}", "-c"], stdin=subprocess.PIPE, stdout=sink
        )
        assert xz.stdin is not None
        with xz.stdin, tarfile.open(fileobj=xz.stdin, mode="w|", bufsize=MIB) as tar:
            for path in files:
                tar.add(path, path.relative_to(tree).as_posix(), filter=_without_owner)
        if xz.wait():
            raise BundleError(f"xz ended with {xz.returncode}")
    parts: list[dict[str, Any]] = []
    with archive.open("rb") as source:
        while block := source.read(size):
            part = archive.with_name(f"{archive.name}.{len(parts):02d}")
            part.write_bytes(block)
            parts.append({"file": part.name, "bytes": len(block), "sha256": hashlib.sha256(block).hexdigest()})
    archive.unlink()
    return parts


def _without_owner(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """Equal trees give equal archives, so that an unchanged part need not travel again."""
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    entry.mtime = 1_700_000_000
    return entry


def list_environments(sglang: bool, further: Sequence[str]) -> list[Environment]:
    """What the machine will get: mtrl's environment, SGLang's, and one for peers to compare with."""
    found = [Environment("mtrl", (), ("gateway.*", "trainer.*"))]
    if sglang:
        imports = ("sglang.srt.entrypoints.http_server", "sglang.srt.models.qwen2", "sglang.srt.models.llama")
        needs = (SGLANG, *SGLANG_ALSO)
        lacks = (SGLANG_DOES_WITHOUT, SGLANG_LEAVE_OUT, SGLANG_OPTIONS)
        found.append(Environment("sglang", needs, imports, ("sgl_kernel",), *lacks))
    if further:
        names = tuple(canonical(need.partition("==")[0]).replace("-", "_") for need in further)
        found.append(Environment("with", tuple(further), names))
    return found


def make_bundle(arguments: argparse.Namespace) -> None:
    """Writes the parts, the manifest and the installer into the folder."""
    extras = tuple(arguments.extras.split(","))
    target = Target(arguments.python, arguments.torch, arguments.cuda, extras, read_held(arguments.held))
    out: Path = arguments.dir
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("*.tar.xz.[0-9][0-9]"):
        old.unlink()
    manifest: dict[str, Any] = {
        "python": target.python,
        "torch": target.torch,
        "cuda": target.cuda,
        "optional": find_optional(extras),
    }
    contents: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for environment in list_environments(not arguments.without_sglang, arguments.with_):
            pins = choose_pins(environment, target)
            tree = Path(folder) / environment.name
            tell(f"{environment.name}: {len(pins)} packages")
            fill_tree(environment, pins, target, tree)
            if not environment.requirements:
                add_own_wheel(tree)
            parts = pack(tree, out / f"{environment.name}.tar.xz", arguments.size, arguments.xz_level)
            contents[environment.name] = {
                "parts": parts,
                "imports": environment.imports,
                "imports_on_gpu": environment.imports_on_gpu,
                "options": environment.options,
                "packages": sorted(pins),
            }
            size = sum(part["bytes"] for part in parts)
            tell(f"{environment.name}: {size / MIB:.1f} MiB in {len(parts)} parts")
        if arguments.model is not None:
            contents["model"] = {
                "parts": pack(arguments.model, out / "model.tar.xz", arguments.size, arguments.xz_level)
            }
    (out / "manifest.json").write_text(json.dumps(manifest | {"contents": contents}, indent=1) + "\n")
    for name in ("install.sh", "install.py"):
        shutil.copyfile(HERE / name, out / name)
    total = sum(path.stat().st_size for path in out.iterdir())
    tell(f"{out}: {total / MIB:.1f} MiB. There: bash {out.name}/install.sh TARGET")


def tell(line: str) -> None:
    """Prints progress at once."""
    print(line, flush=True)


def parse_size(text: str) -> int:
    """`64M` as bytes."""
    unit = UNITS.get(text[-1:].upper())
    try:
        size = int(text[:-1]) * unit if unit else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write 64M") from None
    if size < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write 64M")
    return size


def folder_of_model(text: str) -> Path:
    """A model's folder."""
    folder = Path(text)
    if not (folder / "config.json").is_file():
        raise argparse.ArgumentTypeError(f"{text} holds no config.json: name a model's folder")
    return folder


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--dir", type=Path, required=True, help="folder for the parts")
    options.add_argument("--size", type=parse_size, default=parse_size("1G"), help="the largest part, such as 64M")
    options.add_argument("--python", default="3.12", help="the machine's Python")
    options.add_argument("--torch", default="2.11", help="the machine's torch")
    options.add_argument("--cuda", default="13.0", help="the CUDA that its torch is built for")
    options.add_argument("--held", type=Path, metavar="FILE", help="what `pip freeze` prints on the machine")
    options.add_argument("--extras", default=EXTRAS, help="of pyproject.toml, with commas; by default %(default)s")
    options.add_argument("--model", type=folder_of_model, metavar="FOLDER", help="a model to carry")
    options.add_argument(
        "--with", dest="with_", nargs="*", default=[], metavar="PACKAGE", help="an environment of these"
    )
    options.add_argument("--without-sglang", action="store_true", help="for the embedded engine alone")
    options.add_argument("--xz-level", type=int, default=XZ_LEVEL, choices=range(10), metavar="0-9")
    return options.parse_args(words)


def main() -> int:
    arguments = parse_arguments()
    try:
        if shutil.which("xz") is None:
            raise BundleError("xz is not installed (Debian: xz-utils)")
        make_bundle(arguments)
    except BundleError as error:
        print(f"offline-bundle: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
