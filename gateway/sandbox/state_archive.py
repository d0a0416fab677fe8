"""Packs the working folder of a sandbox, run inside as its user: with files of its own that it may not read.

Permissions are no part of a state but the executable bit, so that a file of mode 000 counts by its bytes as others do.
"""

import os
import sys
import tarfile
from typing import BinaryIO

READ_FILE, READ_FOLDER = 0o400, 0o500


def pack(folder: str, file: BinaryIO) -> None:
    """Writes an archive of the folder. What its owner may not read is readable meanwhile; raises OSError."""
    changed: list[tuple[str, int]] = []

    def make_readable(member: tarfile.TarInfo) -> tarfile.TarInfo:
        path, needed = os.path.join(folder, member.name), READ_FOLDER if member.isdir() else READ_FILE
        if (member.isdir() or member.isreg()) and member.mode & needed != needed:
            os.chmod(path, member.mode | needed)
            changed.append((path, member.mode))
        return member

    try:
        with tarfile.open(fileobj=file, mode="w") as tar:
            tar.add(folder, "", filter=make_readable)
    finally:
        for path, mode in reversed(changed):
            os.chmod(path, mode)


if __name__ == "__main__":
    with open(sys.argv[2], "wb") as archive:
        pack(sys.argv[1], archive)
