"""Attempts to get out of a sandbox, or to use more than it has: Python code that prints SUCCEEDED if it does.

Names in braces are what the tests have made outside: a secret file, a process, a listening socket, and so on.
"""

from __future__ import annotations

from typing import NamedTuple

LIBC = "import ctypes, os; libc = ctypes.CDLL(None, use_errno=True)\n"
CHECK = "\nif result < 0: raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))\nprint('SUCCEEDED')"
X86_CALLS = {"keyctl": 250, "bpf": 321, "perf_event_open": 298, "userfaultfd": 323, "io_uring_setup": 425}
ARM_CALLS = {"keyctl": 219, "bpf": 280, "perf_event_open": 241, "userfaultfd": 282, "io_uring_setup": 425}


class Attack(NamedTuple):
    """Code, what its error says in the sandbox, and whether it is run outside too, where it must succeed."""

    code: str
    reason: str
    runs_outside: bool = True


def _socket(family: str, kind: str = "SOCK_STREAM") -> str:
    return f"import socket; socket.socket(socket.{family}, socket.{kind}); print('SUCCEEDED')"


def _system_call(name: str) -> Attack:
    number = f"({X86_CALLS[name]} if os.uname().machine == 'x86_64' else {ARM_CALLS[name]})"
    return Attack(_calls(f"libc.syscall({number}, 0, 0, 0, 0, 0)"), "PermissionError", False)


def _calls(call: str) -> str:
    return f"{LIBC}result = {call}{CHECK}"


def _unmasked(condition: str) -> Attack:
    return Attack(f"if {condition}: print('SUCCEEDED')\nraise OSError('is masked')", "is masked")


def _reads(path: str) -> str:
    return f"print(open({path}).read(1), 'SUCCEEDED')"


def _writes(path: str) -> str:
    return f"open({path}, 'w').write('1'); print('SUCCEEDED')"


NO_FAMILY, NOT_THERE, DENIED, READ_ONLY = "Address family not supported", "FileNotFound", "Permission", "Read-only file"
NOT_PERMITTED = "Operation not permitted"
FULL = "No space left on device"
NO_CALL = "Function not implemented"
FILL = "for n in range(6):\n  with open(f'{folder}/fill{{n}}', 'wb') as f: f.write(bytes(2**22))\nprint('SUCCEEDED')"

NETWORK = {
    "connects to a port of the machine": Attack(
        "import socket; socket.create_connection(('127.0.0.1', {port})); print('SUCCEEDED')", NO_FAMILY
    ),
    "opens an IPv6 socket": Attack(_socket("AF_INET6"), NO_FAMILY),
    "opens a datagram socket": Attack(_socket("AF_INET", "SOCK_DGRAM"), NO_FAMILY),
    "opens a raw socket": Attack(_socket("AF_INET", "SOCK_RAW"), NO_FAMILY, False),
    "opens a packet socket": Attack(_socket("AF_PACKET", "SOCK_RAW"), NO_FAMILY, False),
    "asks the kernel for interfaces": Attack(_socket("AF_NETLINK", "SOCK_RAW"), NO_FAMILY),
    "opens a socket to the hypervisor": Attack(_socket("AF_VSOCK"), NO_FAMILY, False),
    "connects to an abstract socket": Attack(
        "import socket; s = socket.socket(socket.AF_UNIX); s.connect(chr(0) + {abstract!r}); print('SUCCEEDED')",
        "Connection refused",
    ),
    "connects to a socket file": Attack(
        "import socket; s = socket.socket(socket.AF_UNIX); s.connect({socket!r}); print('SUCCEEDED')", NOT_THERE
    ),
}
FILES = {
    "reads a secret file": Attack(_reads("{secret!r}"), NOT_THERE),
    "reads the list of users": Attack(_reads("'/etc/passwd'"), NOT_THERE),
    "reads the command line of the kernel": _unmasked("open('/proc/cmdline').read()"),
    "reads the load of the machine": _unmasked("open('/proc/loadavg').read().split()[3] != '1/1'"),
    "reads the memory of the machine": _unmasked("open('/proc/meminfo').read().split()[1] != '524288'"),
    "reads the processor time of the machine": _unmasked("any(map(int, open('/proc/stat').readline().split()[1:]))"),
    "leaves its control group": Attack(_writes("'/sys/fs/cgroup/cgroup.procs'"), NOT_THERE, False),
    "reads a disk": Attack(
        "import os, stat\nfor n in os.listdir('/dev'):\n"
        " if stat.S_ISBLK(os.lstat('/dev/' + n).st_mode): print('SUCCEEDED')\nraise OSError('there is none')",
        "there is none",
        False,
    ),
    "follows a symbolic link": Attack("import os; os.symlink({secret!r}, 'soft'); " + _reads("'soft'"), NOT_THERE),
    "makes a hard link to a program": Attack(
        "import os; os.link('/bin/sh', 'hard'); print('SUCCEEDED')", "cross-device", False
    ),
    "goes through the root of another process": Attack(_reads("'/proc/1/root' + {secret!r}"), DENIED, False),
    "reads another rollout's file": Attack(_reads("{victim_file!r}"), NOT_THERE, False),
    "writes among the system's programs": Attack(_writes("'/usr/bin/mtrl-attack'"), READ_ONLY, False),
    "writes to the root": Attack(_writes("'/mtrl-attack'"), READ_ONLY, False),
    "has a library loaded into each program": Attack(_writes("'/etc/ld.so.preload'"), READ_ONLY, False),
    "gives a file away": Attack("import os; open('f', 'w'); os.chown('f', 1, 1); print('SUCCEEDED')", NOT_PERMITTED),
    "opens a file by its handle": Attack(
        _calls("libc.open_by_handle_at(-100, ctypes.create_string_buffer(64), 0)"), DENIED, False
    ),
    "uses inherited descriptors": Attack(
        "import os, stat\nfor n in range(3, 256):\n try: mode = os.fstat(n).st_mode\n except OSError: continue\n"
        " if stat.S_ISREG(mode) and b'secret' in os.pread(n, 9, 0): print('SUCCEEDED')\nraise OSError('there is none')",
        "there is none",
    ),
}
PROCESSES = {
    "signals the gateway": Attack("import os; os.kill({pid}, 0); print('SUCCEEDED')", "ProcessLookup"),
    # Its number may be that of a group inside, where processes are counted anew.
    "signals the gateway's group": Attack(
        "import os; os.killpg({group}, 0); os.getpgid({pid}); print('SUCCEEDED')", "ProcessLookup"
    ),
    "reads the gateway's environment": Attack(_reads("'/proc/{pid}/environ'"), NOT_THERE),
    "finds another rollout's process": Attack(
        "import pathlib\nfor p in pathlib.Path('/proc').glob('[0-9]*/cmdline'):\n"
        " if b'{marker}' in p.read_bytes(): print('SUCCEEDED')\nraise OSError('there is none')",
        "there is none",
    ),
    "signals the sandbox's first process": Attack(
        "import os, time\nfor number in (2, 9, 15, 19):\n try: os.kill(1, number)\n except PermissionError: pass\n"
        "time.sleep(0.1)\nraise OSError('it lives')",
        "it lives",
        False,
    ),
    "limits the first process": Attack(
        "import resource as r; r.prlimit(1, r.RLIMIT_CPU, (0, 0)); print('SUCCEEDED')", NOT_PERMITTED, False
    ),
    "opens the pipes of the first process": Attack(
        "for n in range(9):\n try: open(f'/proc/1/fd/{{n}}')\n except FileNotFoundError: continue\n print('SUCCEEDED')",
        DENIED,
        False,
    ),
    "opens the memory of the first process": Attack("open('/proc/1/mem', 'rb+'); print('SUCCEEDED')", DENIED, False),
    "takes disk in no time": Attack(
        "import os; os.posix_fallocate(os.open('f', os.O_CREAT | os.O_RDWR), 0, 2**20); print(os.stat('f').st_size)\n"
        + LIBC
        + "result = libc.fallocate(os.open('f', os.O_RDWR), 0, ctypes.c_long(0), ctypes.c_long(2**20))"
        + CHECK,
        "not supported",
        False,
    ),
    "opens the pipes of the server of commands": Attack(
        "import os\nfor n in range(9):\n try: os.open(f'/proc/{{os.getppid()}}/fd/{{n}}', os.O_WRONLY)\n"
        " except FileNotFoundError: continue\n print('SUCCEEDED')",
        DENIED,
    ),
    "opens the memory of the server of commands": Attack(
        "import os; open(f'/proc/{{os.getppid()}}/mem', 'rb+'); print('SUCCEEDED')", DENIED, False
    ),
    "reads the first process's environment": Attack(_reads("'/proc/1/environ'"), DENIED, False),
    "traces a process": Attack(_calls("libc.ptrace(16, 1, 0, 0)"), DENIED, False),
    "reads another process's memory": Attack(_calls("libc.process_vm_readv(1, None, 0, None, 0, 0)"), DENIED, False),
    "opens shared memory": Attack(_reads("{shared!r}"), NOT_THERE),
    "attaches System V memory": Attack(_calls("libc.shmget({key}, 0, 0)"), NOT_THERE),
}
PRIVILEGES = {
    "becomes root": Attack("import os; os.setuid(0); print('SUCCEEDED')", NOT_PERMITTED),
    "has capabilities": Attack(
        "caps = [l for l in open('/proc/self/status') if l.startswith(('CapEff', 'CapBnd', 'CapPrm'))]\n"
        "if any(int(l.split()[1], 16) for l in caps): print('SUCCEEDED')\nraise OSError('it has none')",
        "it has none",
    ),
    "gains rights from a program": Attack(
        LIBC + "if libc.prctl(39, 0, 0, 0, 0) == 0: print('SUCCEEDED')\nraise OSError('no new privileges')",
        "no new privileges",
    ),
    "runs a program as its owner": Attack(
        "import os, subprocess\n"  # Of such a program, the loader shows nothing; outside, root owns it.
        "shown = subprocess.run(['mount', '-V'], env={{**os.environ, 'LD_SHOW_AUXV': '1'}}, capture_output=True)\n"
        "users = [l.split()[1] for l in shown.stdout.decode().splitlines() if l.startswith('AT_EUID')]\n"
        "if users in ([], ['0']): print('SUCCEEDED')\nraise OSError('it stays the user')",
        "it stays the user",
    ),
    "traces its own child": Attack(_calls("libc.ptrace(0, 0, 0, 0)"), DENIED),
    "mounts": Attack(_calls("libc.mount(b'none', b'/tmp', b'tmpfs', 0, None)"), DENIED, False),
    "unmounts": Attack(_calls("libc.umount2(b'/rollout', 2)"), DENIED, False),
    "changes its root": Attack("import os; os.chroot('/tmp'); print('SUCCEEDED')", NOT_PERMITTED, False),
    "makes a user namespace": Attack(_calls("libc.unshare(0x10000000)"), DENIED, False),
    "makes a mount namespace": Attack(_calls("libc.unshare(0x20000)"), DENIED, False),
    "enters another namespace": Attack(_calls("libc.setns(os.open('/proc/self/ns/net', 0), 0)"), DENIED, False),
    "types into its terminal": Attack(
        "import fcntl, os, pty\nprocess, terminal = pty.fork()\nif process == 0:\n"
        " try: fcntl.ioctl(0, 0x5412, b'x')\n except OSError as error: os._exit(error.errno)\n os._exit(0)\n"
        "number = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])\n"
        "if number: raise OSError(number, os.strerror(number))\nprint('SUCCEEDED')",
        NOT_PERMITTED,
        False,
    ),
    "types into the console": Attack(
        "import fcntl, pty; fcntl.ioctl(pty.openpty()[1], 0x541C, b'x'); print('SUCCEEDED')", NOT_PERMITTED, False
    ),
    "reads the kernel's log": Attack(_calls("libc.klogctl(10, None, 0)"), DENIED),
    "raises its priority": Attack("import os; os.nice(-5); print('SUCCEEDED')", DENIED),
    "raises its limits": Attack(
        "import resource as r; r.setrlimit(r.RLIMIT_CORE, (1, 1)); print('SUCCEEDED')", "not allowed to raise"
    ),
    "sets a parameter of the kernel": Attack(_writes("'/proc/sys/kernel/core_pattern'"), "Errno", False),
    "loads a module": Attack(_calls("libc.init_module(None, 0, b'')"), "Errno", False),
    **{f"calls {name}": _system_call(name) for name in X86_CALLS},
}
DISK = {
    "fills its folder": Attack(FILL.replace("{folder}", "."), FULL),
    "fills the folder for temporary files": Attack(FILL.replace("{folder}", "/tmp"), FULL, False),
    "fills shared memory": Attack(FILL.replace("{folder}", "/dev/shm"), FULL, False),
    "makes files without end": Attack(
        "import os\nos.mkdir('d')\nfor n in range(2000): open(f'd/{n}', 'w')\nprint('SUCCEEDED')".replace(
            "{n}", "{{n}}"
        ),
        FULL,
    ),
    "prints without end": Attack("for _ in range(99): print('x' * 10_000)\nprint('SUCCEEDED')", "it printed more than"),
}
MEMORY_AND_PROCESSES = {
    "takes memory": Attack(
        "data = []\nfor _ in range(20): data.append(bytearray(b'x' * 2**24))\nprint('SUCCEEDED')", "emory"
    ),
    "forks without end": Attack(
        "import os, time\nme = os.getpid()\nfor n in range(60):\n if os.fork() == 0: time.sleep(60); os._exit(0)\n"
        "if os.getpid() == me: print('SUCCEEDED')",
        "temporarily unavailable",
        False,
    ),
    "starts threads without end": Attack(
        "import threading, time\nfor _ in range(90): threading.Thread(target=time.sleep, args=(9,), daemon=True)"
        ".start()\nprint('SUCCEEDED')",
        "can't start new thread",
    ),
}
UNCOUNTED = {
    "keeps memory in a file without a name": Attack("import os; os.memfd_create('a'); print('SUCCEEDED')", NO_CALL),
    "keeps memory in a queue": Attack(_calls("libc.msgget(0, 0o1600)"), NO_CALL),
    "keeps memory in semaphores": Attack(_calls("libc.semget(0, 32000, 0o1600)"), NO_CALL),
    "keeps memory in a secret file": Attack(_calls("libc.syscall(447, 0)"), NO_CALL),
}
"""What takes memory that is in no process and no folder, where there are no control groups, which count it."""
TIME = {
    "ignores being interrupted": Attack(
        "import signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: time.sleep(1)",
        "time limit",
        False,
    )
}
ATTACKS = NETWORK | FILES | PROCESSES | PRIVILEGES | DISK | MEMORY_AND_PROCESSES | TIME
