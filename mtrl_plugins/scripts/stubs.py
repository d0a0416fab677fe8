"""Programs of the confined bash: stubs that record their arguments and do nothing, and a few that only print text."""

from __future__ import annotations

from collections.abc import Mapping

TEXT_COMMANDS = (
    "awk", "basename", "cat", "cut", "date", "dirname", "env", "expr", "grep", "head", "mkdir", "realpath", "sed",
    "seq", "sort", "tail", "tee", "tr", "uniq", "wc",
)  # fmt: skip
"""Programs of the system that scripts prepare arguments with. They may do what bash itself may: nothing outside."""
LAUNCHERS = (
    "accelerate", "conda", "deepspeed", "ionice", "megatron", "mpirun", "nice", "nohup", "numactl", "python", "python3",
    *(f"python3.{minor}" for minor in range(9, 15)), "ray", "setsid", "srun", "stdbuf", "sudo", "swift", "taskset",
    "timeout", "torchrun", "uv", "vllm", "xargs",
)  # fmt: skip
"""Programs that train, or start a program that does."""
QUIET_COMMANDS = (
    "aria2c", "apt", "apt-get", "arch", "chmod", "chown", "cp", "curl", "df", "docker", "du", "find", "free", "fuser",
    "getconf", "git", "hf", "hostname", "huggingface-cli", "id", "ifconfig", "ip", "ldconfig", "ln", "ls", "lscpu",
    "lsof", "md5sum", "mktemp", "modelscope", "mv", "nc", "netstat", "nproc", "npu-smi", "nvcc", "nvidia-smi", "pgrep",
    "pip", "pip3", "pkill", "ping", "ps", "readlink", "rm", "rmdir", "rocm-smi", "scontrol", "sha256sum", "sleep", "ss",
    "stat", "swanlab", "sync", "sysctl", "tar", "telnet", "touch", "tput", "uname", "unzip", "wandb", "wget", "which",
    "whoami",
)  # fmt: skip
"""Programs that scripts call beside the training. They are not run, succeed, and their output is not known."""

RECORDS_FD = 200
"""Where stubs write their records."""
PRELUDE_FILE, SETTINGS_PREFIX = "/mtrl/prelude", "MTRL_"

STUB = r"""#!/bin/bash -p
p=$BASHPID
{
    printf '%s run %s\0' "$p" "${0##*/}"
    printf '%s line %s\0' "$p" "${MTRL_LINE-0}"
    for word; do printf '%s word %s\0' "$p" "$word"; done
    for name in $(compgen -e); do printf '%s env %s=%s\0' "$p" "$name" "${!name}"; done
    printf '%s end \0' "$p"
} >&RECORDS_FD
printf '%s' 'OUTPUT'
"""
PRELUDE = r"""
command_not_found_handle() {
    printf '%s missing %s:%s\0' "$BASHPID" "${MTRL_LINE-0}" "$1" >&RECORDS_FD
    printf '%s' 'OUTPUT'
}
source() {
    if [[ -r ${1-} ]]; then builtin source "$@"; return; fi
    printf '%s source %s:%s\0' "$BASHPID" "${MTRL_LINE-0}" "${1-}" >&RECORDS_FD
}
function . { source "$@"; }
cd() {
    if [[ $# -gt 0 && -n ${!#} && ${!#} != - && ! -d ${!#} ]]; then command mkdir -p -- "${!#}" 2>/dev/null || :; fi
    builtin cd "$@" && return
    printf '%s folder %s:%s\0' "$BASHPID" "${MTRL_LINE-0}" "${!#}" >&RECORDS_FD
}
mkdir() { command mkdir "$@" 2>/dev/null || :; }
ulimit() { return 0; }
set -o functrace
note_missing() { printf '%s missing %s:\0' "$BASHPID" "${MTRL_LINE-0}" >&RECORDS_FD; }
trap '[[ $? != 127 ]] || note_missing; [[ ${BASH_SOURCE[0]-} != "$MTRL_SCRIPT" ]] || export MTRL_LINE=$LINENO' DEBUG
"""
"""Read by bash before the script: unknown commands are recorded and not run, and the current line is exported."""
LAUNCHER = """\
ulimit -HSc 0; ulimit -HSf FILE_BLOCKS; ulimit -HSn 256; ulimit -HSt SECONDS; ulimit -HSv MEMORY; ulimit -HSu PROCESSES
exec 199>&1
bash -- "$@" RECORDS_FD>&1 >/dev/null 199>&- | cat >&199
"""
"""Starts the script with limits, and waits for all processes that can still record something."""


def fill_in(text: str, values: Mapping[str, object]) -> str:
    """The text of a program with its constants."""
    for name, value in {"RECORDS_FD": RECORDS_FD, **values}.items():
        text = text.replace(name, str(value))
    return text
