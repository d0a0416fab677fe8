"""A stand-in for the command line of a container engine: records its arguments, and has bubblewrap for containers.

Run as `python container_engine.py FOLDER run|rm|image ...`. A file `fails` in the folder has the exit code to end with.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

folder, words = Path(sys.argv[1]), sys.argv[2:]
with (folder / "calls").open("a") as calls:
    calls.write(json.dumps(words) + "\n")
(folder / "environment").write_text(json.dumps(dict(os.environ)))
if (folder / "fails").exists() and words[0] != "rm":
    sys.stderr.write("the engine is down\n")
    sys.exit(int((folder / "fails").read_text()))
if words[0] == "run":
    options = [word.removeprefix("--").partition("=")[::2] for word in words if word.startswith("--")]
    places = ("/usr", "/lib", "/lib64", "/bin", sys.base_prefix, sys.prefix)
    line = ["bwrap", "--unshare-pid", "--as-pid-1", "--unshare-net", "--clearenv", "--proc", "/proc", "--dev", "/dev"]
    for name, value in options:
        outside, _, rest = value.partition(":")
        if name == "volume":
            line += ["--ro-bind" if rest.endswith(":ro") else "--bind", outside, rest.partition(":")[0]]
        elif name == "tmpfs":
            line += ["--tmpfs", outside]
        elif name == "env":
            key, is_given, given = value.partition("=")
            line += ["--setenv", key, given if is_given else os.environ[key]]
        elif name == "workdir":
            line += ["--chdir", value]
    for place in filter(os.path.exists, places):  # After `/tmp`, below which they may be.
        line += ["--ro-bind", place, place]
    name = next(value for key, value in options if key == "name")
    with subprocess.Popen([*line, "--die-with-parent", "--", *words[words.index("an-image") + 1 :]]) as container:
        (folder / name).write_text(str(container.pid))
    sys.exit(container.returncode)
if words[0] == "kill":
    outer = (folder / words[-1]).read_text()
    for child in Path(f"/proc/{outer}/task/{outer}/children").read_text().split():
        os.kill(int(child), signal.SIGKILL)
