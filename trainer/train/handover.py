"""Finds the files of a run that was handed over: moved, or continued from another folder or by another account.

The files are those that the run was started with where they still are, and the copies in `RUN/origin/` elsewhere.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import chdir, contextmanager, suppress
from pathlib import Path

from rich.console import Console

from gateway.errors import ConfigError
from trainer.setup import SERVERS_FILE
from trainer.storage.run_files import read_run_info
from trainer.train.hidden_secrets import hide_in_config
from trainer.train.origin import FILES, MODEL, ORIGIN_FOLDER, read_origin
from trainer.train.origin_files import TOO_LARGE, map_files, original_of, place_of
from trainer.train.run_folder import load_run_settings
from trainer.train.settings import TrainSettings

SHOWN_FILES = 5


@contextmanager
def in_work_folder(run: Path, console: Console) -> Iterator[Path]:
    """Works in the folder in which a run's files are, and says which that is; yields the run's path from there.

    That is the folder in which the run was started, or that of the copies if a file that the settings name is gone from
    there, or may not be read. Runs of older versions have no copies: they work where the command is called.
    """
    origin = read_origin(run)
    if not origin:
        yield run
        return
    absolute, first = run.absolute(), Path(str(origin.get("folder")))
    copies = absolute / ORIGIN_FOLDER / FILES
    gone = _find_gone_file(absolute, copies, first)
    if gone is not None:
        _print(console, f"{gone} is gone, or may not be read: the run uses the copies in {copies}")
        _print_left_out(origin.get("not_copied"), copies, first, console)
    else:
        for text in _find_changed_files(copies, first):
            _print(console, f"changed since the run was started: {text}")
    folder = first if gone is None else copies
    with suppress(OSError):
        if folder.samefile(Path.cwd()):
            yield run
            return
    if gone is None:
        _print(console, f"the run uses the files in {first}, where it was started")
    with chdir(folder):
        yield absolute


def locate_settings(run: Path, settings: TrainSettings) -> TrainSettings:
    """A run's settings with the model that it started from, and paths to its copies where those are used."""
    if _uses_copies(run):
        first = Path(str(read_origin(run).get("folder", "/")))

        def locate(_: str, path: str) -> str:
            original = Path(os.path.normpath(first / path))
            copy = place_of(original, first)
            if copy.exists():
                return str(copy)
            return str(original) if _is_readable(original) else path

        settings = TrainSettings.model_validate(map_files(settings, locate))
    model = find_start_model(run, settings.model)
    return settings if model is None else settings.model_copy(update={"model": str(model)})


def find_start_model(run: Path, named: str) -> Path | None:
    """The model that a run started from: the folder that the run remembers, the copy in its own, or what settings name.

    A demo's model is not made again: a newer version could make another one. None for a run of an older version whose
    model is gone.
    """
    origin = read_origin(run)
    known, copy = str(read_run_info(run).get("model", "")), run.absolute() / ORIGIN_FOLDER / MODEL
    remembered = Path(str(origin.get("folder", ""))) / known
    places = (copy, remembered) if _uses_copies(run) else (remembered, copy)
    for folder in (*places, Path(named)):
        if known and os.access(folder / "config.json", os.R_OK):
            return folder
    if not origin:
        return None
    problem = f"the model that the run started from is not at {known}, or may not be read"
    raise ConfigError(problem, file=run, field="model", remedy=f"copy it, or link to it, as {copy}")


def _uses_copies(run: Path) -> bool:
    """Whether the working folder is that of the copies of the run's files."""
    with suppress(OSError):
        return (run.absolute() / ORIGIN_FOLDER / FILES).samefile(Path.cwd())
    return False


def _find_gone_file(run: Path, copies: Path, first: Path) -> Path | None:
    """A file that was copied, is named by a setting, and cannot be read any more."""
    if not _is_readable(first):
        return first
    named: list[str] = []

    def add(name: str, path: str) -> str:
        named.append(path)
        if name == "tools":
            named.append(str(Path(path).parent / SERVERS_FILE))
        return path

    map_files(load_run_settings(run), add)
    originals = (Path(os.path.normpath(first / path)) for path in named)
    is_copied = ((original, (copies / place_of(original, first)).exists()) for original in originals)
    return next((original for original, has_copy in is_copied if has_copy and not _is_readable(original)), None)


def _find_changed_files(copies: Path, first: Path) -> Iterator[str]:
    """Files that differ from their copies, at most a few by name; secrets, which copies lack, are not compared."""
    changed = []
    for copy in sorted(file for file in copies.rglob("*") if file.is_file()):
        original = original_of(copy.relative_to(copies), first)
        with suppress(OSError):
            content, kept = original.read_bytes(), copy.read_bytes()
            if content != kept and (hide_in_config(original) or "").encode() != kept:
                changed.append(str(original))
    yield from changed[:SHOWN_FILES]
    if len(changed) > SHOWN_FILES:
        yield f"{len(changed) - SHOWN_FILES} more files"


def _print_left_out(left_out: object, copies: Path, first: Path, console: Console) -> None:
    """Prints what was not copied when the run was started, and where it can be put; first what is gone now."""

    def is_gone(file: str) -> bool:
        return os.path.isabs(file) and not _is_readable(Path(file))

    reasons = [*left_out.items()] if isinstance(left_out, Mapping) else []
    reasons.sort(key=lambda pair: (not is_gone(pair[0]), pair[1] != TOO_LARGE))
    for file, reason in reasons[:SHOWN_FILES]:
        is_missing = is_gone(file)
        remedy = f"; put it, or a link to it, at {copies / place_of(Path(file), first)}" if is_missing else ""
        _print(console, f"not copied when the run was started: {file} ({reason}){remedy}")
    if len(reasons) > SHOWN_FILES:
        _print(
            console, f"not copied when the run was started: {len(reasons) - SHOWN_FILES} more files, see origin.json"
        )


def _is_readable(path: Path) -> bool:
    return os.access(path, os.R_OK | os.X_OK if path.is_dir() else os.R_OK)


def _print(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
