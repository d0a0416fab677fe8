"""Measures the first commands of the README in a fresh clone: an empty home, no caches, no environment of its own.

python bench/first_run.py                  # pip, make train, make test-quick; writes bench/results/first_run.json
python bench/first_run.py --only train     # one of them, as CI does; writes nothing without --out
python bench/first_run.py --debian         # within a bare Debian made by mmdebstrap: Python, make and git; needs root
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
TIMEOUT_S = 3600.0
PYTEST = ".venv/bin/python -m pytest --quick --reruns 1 --numprocesses auto --dist loadfile"
SYSTEM_TESTS = (
    "tests/config tests/native tests/sandbox tests/state tests/trainer/distributed tests/trainer/policy "
    "tests/trainer/test_parse*"
)
"""What another patch release of Python broke before: archives, expressions, files of checkpoints; and boxes."""
COMMANDS: Mapping[str, Mapping[str, str]] = {
    "pip": {
        "pip install '.[train]'": "python3 -m venv .pip && .pip/bin/pip install --quiet '.[train]' -c .ci/cpu.txt",
        "mtrl-train --config default": "mkdir job && cd job && ../.pip/bin/mtrl-train --config default",
    },
    "train": {"make install": "make install", "make train": "make train"},
    "test-quick": {"make test-quick": "make test-quick"},
    "test-system": {
        "tests of what a system decides": f".ci/packages && make .peers/installed && {PYTEST} {SYSTEM_TESTS}"
    },
}
"""By name: what the README says, and what is run. `make train` installs before, which is measured on its own; the pip
install takes the releases that were tested on machines without CUDA, as `make` does."""
FULL_RUN = ("pip", "train", "test-quick")
KEPT = ("PIP_", "SSL_", "REQUESTS_", "NODE_", "NPM_", "HTTP", "http", "https", "no_proxy", "NO_PROXY")
"""How the names of variables begin that say where packages come from."""
PACKAGES = "python3,python3-venv,make,git,ca-certificates"
PIP_CONFIG = Path(".config/pip/pip.conf")
"""In a home: also where packages come from."""
NETWORK_FILES = ("/etc/resolv.conf", "/etc/ssl/certs/ca-certificates.crt", "/etc/pip.conf")
"""A Debian of its own reaches the network as this machine does."""
ENTER = """
set -e; cd {root}; mount --rbind . .; cd .
mount --rbind /dev dev; mount --rbind /sys sys; mount -t proc proc proc; mount -t tmpfs tmpfs tmp
for folder in {folders}; do mkdir -p ".$folder"; mount --bind -o ro "$folder" ".$folder"; done
mkdir -p .before; pivot_root . .before; umount -l /.before
"$@"
exit $?
"""
"""The shell stays: like any first process, it ends what other processes leave behind."""


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--only", nargs="+", choices=COMMANDS)
    options.add_argument("--debian", action="store_true", help="in a Debian of its own")
    options.add_argument("--out", type=Path, metavar="FILE", help="a full run: bench/results/first_run.json")
    args = options.parse_args()
    out = args.out or (None if args.only else RESULTS / "first_run.json")
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR", "/var/tmp")) as folder:
        root = make_debian(Path(folder) / "debian") if args.debian else None
        home = root / "root" if root else Path(folder) / "home"
        (home / PIP_CONFIG).parent.mkdir(parents=True, exist_ok=True)
        if (Path.home() / PIP_CONFIG).exists():
            shutil.copyfile(Path.home() / PIP_CONFIG, home / PIP_CONFIG)
        clone = home / "mtrl"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True, timeout=TIMEOUT_S)
        for name in args.only or FULL_RUN:
            for title, command in COMMANDS[name].items():
                rows.append({"command": title, **measure(command, clone, home, root)})
                print(f"{title}: {rows[-1]['cpu_s']} s of CPU, {rows[-1]['wall_s']} s", file=sys.stderr, flush=True)
                if rows[-1]["status"]:
                    return 1
    if out is not None:
        out.write_text(json.dumps({"about": describe_machine(root is not None), "rows": rows}, indent=1) + "\n")
    return 0


def measure(command: str, clone: Path, home: Path, root: Path | None) -> dict[str, object]:
    """Runs a command as on a machine with nothing; CPU seconds of all its processes, and seconds by the clock."""
    inside = Path("/") / home.relative_to(root) if root else home
    kept = {name: value for name, value in os.environ.items() if name.startswith(KEPT)}
    env = kept | {"HOME": str(inside), "PATH": "/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}
    script = f"cd {shlex.quote(str(inside / clone.name))} && {command}"
    words = ["env", "-i", *(f"{name}={value}" for name, value in env.items()), "bash", "-c", script]
    if root:
        enter = ENTER.format(root=shlex.quote(str(root)), folders=shlex.join(find_package_folders()))
        words = ["unshare", "-mpf", "bash", "-c", enter, "enter", *words]
    before, began = getrusage(RUSAGE_CHILDREN), time.monotonic()
    status = subprocess.run(words, stdout=sys.stderr, timeout=TIMEOUT_S, check=False).returncode
    after = getrusage(RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"cpu_s": round(cpu_s), "wall_s": round(time.monotonic() - began), "status": status}


def find_package_folders() -> list[str]:
    """Where pip finds packages on this machine, beside its index."""
    return [word for word in os.environ.get("PIP_FIND_LINKS", "").split() if Path(word).is_dir()]


def make_debian(root: Path) -> Path:
    """A bare Debian with Python, make and git."""
    words = ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={PACKAGES}", "bookworm", str(root)]
    subprocess.run(words, check=True, timeout=TIMEOUT_S)
    for file in map(Path, NETWORK_FILES):
        if file.exists():
            shutil.copyfile(file, root / file.relative_to("/"))
    return root


def describe_machine(is_debian: bool) -> dict[str, str]:
    """Date, machine, and what was there before."""
    load = os.getloadavg()[0]
    return {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}; load {load:.1f} at the end",
        "there before": f"a bare Debian: {PACKAGES}" if is_debian else "this machine's packages; an empty home",
    }


if __name__ == "__main__":
    raise SystemExit(main())
