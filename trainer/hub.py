"""The Hugging Face hub: fetches models by name, pushes exported ones, and says why it could not.

Only what is not here is fetched, after a line that says what and how much; without a network, what was fetched before
is used. Code in a repository is fetched only for a model whose code may run.
"""

from __future__ import annotations

import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

from gateway.errors import ConfigError

HUB_NAME = re.compile(r"(?P<name>[\w-][\w.-]*/[\w.-]+)(@(?P<revision>[\w./-]+))?")
MODEL_FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model")
CODE_FILES = ("*.py",)
ACCESS = "`hf auth login`, or HF_TOKEN in the environment"
MEGABYTE = 1e6


@cache
def announce(text: str) -> None:
    """Says once, on standard error, what is about to be fetched."""
    sys.stderr.write(f"mtrl-train: {text}\n")


def find_model(name: str | Path, *, with_code: bool = False, field: str = "model") -> Path:
    """A model's folder: the one of this name, or one that the hub's model `org/name@revision` was fetched into."""
    folder, match = Path(name).expanduser(), HUB_NAME.fullmatch(str(name))
    if match is None or folder.exists() or folder.is_symlink():
        return folder
    import huggingface_hub as hub  # slow to import, and needed only here

    wanted: dict[str, Any] = {"revision": match["revision"], "allow_patterns": [*MODEL_FILES, *CODE_FILES * with_code]}
    try:
        try:
            files = hub.snapshot_download(match["name"], dry_run=True, **wanted)
        except hub.errors.DryRunError:  # No hub can be asked: what was fetched before will do.
            files = []
        if missing := sum(file.file_size for file in files if file.will_download):
            size = f"{missing / MEGABYTE:,.1f} MB, kept in {hub.constants.HF_HUB_CACHE}"
            announce(f"fetching {name} from {hub.constants.ENDPOINT} ({size})")
        return Path(hub.snapshot_download(match["name"], **wanted))
    except Exception as error:  # boundary: the network, the hub and its client may fail in any way
        problem, remedy = explain_hub_error(error, match["name"])
        raise ConfigError(f"{name} is no folder here, and {problem}", field=field, remedy=remedy) from error


def explain_hub_error(error: Exception, name: str) -> tuple[str, str]:
    """What went wrong at the hub, and what to do about it."""
    from huggingface_hub import constants, errors

    here = "or name what is on this machine"
    if isinstance(error, errors.GatedRepoError):
        return "its owners give access on request", f"ask for it at {constants.ENDPOINT}/{name}, then: {ACCESS}"
    if isinstance(error, errors.RevisionNotFoundError):
        return "the hub has no such revision of it", f"see {constants.ENDPOINT}/{name}, {here}"
    status = getattr(getattr(error, "response", None), "status_code", 0)
    if isinstance(error, errors.RepositoryNotFoundError) or status in (401, 403):
        return "the hub has none of this name that you may read", f"if it is private: {ACCESS}; {here}"
    if constants.HF_HUB_OFFLINE:
        return "no hub is asked, since HF_HUB_OFFLINE is set", f"fetch it where there is a network, {here}"
    cause = error.__cause__ if isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__ else error
    problem = f"the hub ({constants.ENDPOINT}) did not give it ({type(cause).__name__})"
    return problem, f"try again where there is a network, {here}"


def check_push(name: str) -> None:
    """Raises ConfigError if nothing should be pushed to a repository of this name, as far as reading tells."""
    import huggingface_hub as hub

    remedy = "write it as `org/name`"
    if (match := HUB_NAME.fullmatch(name)) is None or match["revision"]:
        raise ConfigError(f"{name!r} is no name of a repository", field="--push", remedy=remedy)
    if not hub.get_token():
        raise ConfigError("there is no token for the hub", field="--push", remedy=ACCESS)
    api = hub.HfApi()
    try:
        api.whoami()
        is_public = api.repo_exists(name) and not api.model_info(name).private
    except Exception as error:  # boundary
        problem, _ = explain_hub_error(error, name)
        remedy = f"use a token that may write there: {ACCESS}"
        raise ConfigError(f"{name} cannot be pushed to: {problem}", field="--push", remedy=remedy) from error
    if is_public:
        remedy = "name a private one, or a new one; `hf upload` uploads an exported folder anywhere"
        raise ConfigError(f"{name} is there already, and everybody can read it", field="--push", remedy=remedy)


def push_model(folder: Path, name: str) -> str:
    """Uploads an exported model into a private repository, which it makes if there is none; returns its address."""
    import huggingface_hub as hub

    try:
        hub.HfApi().create_repo(name, private=True, exist_ok=True)
        hub.HfApi().upload_folder(repo_id=name, folder_path=folder, commit_message="Upload a model trained with mtrl")
    except Exception as error:  # boundary
        problem, remedy = explain_hub_error(error, name)[0], f"push it again: hf upload {name} {folder} --private"
        raise ConfigError(f"{name} was not pushed: {problem}", field="--push", file=folder, remedy=remedy) from error
    return f"{hub.constants.ENDPOINT}/{name}"
