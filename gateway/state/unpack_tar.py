"""Unpacks a tar archive: files, folders, and links that stay inside. Imports nothing of ours: it runs alone, too."""

from __future__ import annotations

import os
import tarfile


def unpack_tar(archive: tarfile.TarFile, folder: str | os.PathLike[str]) -> None:
    """Unpacks it into a folder. Raises TarError for members that lead out of it, and for devices."""
    if hasattr(tarfile, "data_filter"):
        archive.extractall(folder, filter="data")
        return
    top = os.path.realpath(folder)
    for member in archive:  # Python before 3.11.4 has no filters.
        place = os.path.join(top, member.name)
        leads = [place]
        if member.issym():
            leads.append(os.path.join(os.path.dirname(place), member.linkname))
        elif member.islnk():
            leads.append(os.path.join(top, member.linkname))
        elif not (member.isreg() or member.isdir()):
            raise tarfile.TarError(f"{member.name} is no file, folder or link")
        for lead in leads:
            if os.path.commonpath([top, os.path.realpath(lead)]) != top:
                raise tarfile.TarError(f"{member.name} leads out of the archive")
        member.mode &= 0o755
        archive.extract(member, top)
