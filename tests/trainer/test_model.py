"""Models by folder or by a name of the hub: fetched, pushed, and whole; code of a folder runs only if it is trusted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gateway.errors import ConfigError, OperatorError
from tests.forked_python import ForkedPopen
from tests.servers.hub_stand_in import SHA, TOKEN, Hub, running_hub
from tests.trainer import tiny_models
from tests.trainer.cli_data import RunCommand
from tests.trainer.train.trainings import write_config
from trainer.cli import app
from trainer.model import load_model
from trainer.pretrained import ModelCodeError, load_config, load_tokenizer, trust_code
from trainer.train.job import prepare_model
from trainer.train.settings import TrainSettings
from trainer.weight_files import INDEX_FILE, read_weight_files


@pytest.mark.parametrize(("config", "method"), [({"quant_method": "fp8"}, "fp8"), ({"bits": 4}, "unknown")])
async def test_quantised_weights_are_refused_by_name(config: dict[str, object], method: str, tmp_path: Path) -> None:
    tiny_models.load_model("llama").save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": config}))
    refusal = rf"its weights are quantised \({method}\) and cannot be trained; name the folder"
    with pytest.raises(OperatorError, match=refusal):
        load_model(tmp_path)
    with pytest.raises(OperatorError, match=refusal):  # Of ranks, of which each reads a part of the files.
        await prepare_model(TrainSettings.model_validate({"model": str(tmp_path), "data": "rows.jsonl"}))


def write_weights(file: Path, shape: tuple[int, int] = (3, 4)) -> None:
    size = 4 * shape[0] * shape[1]
    header = json.dumps({"w": {"dtype": "F32", "shape": shape, "data_offsets": [0, size]}, "__metadata__": {}}).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(size))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    names = ["model-1.safetensors", "model-2.safetensors"]
    for name in names:
        write_weights(tmp_path / name)
    index = {"weight_map": {f"layer{number}": name for number, name in enumerate(names)}}
    (tmp_path / INDEX_FILE).write_text(json.dumps(index))
    return tmp_path


def test_a_configuration_of_other_sizes_is_refused_but_a_transposed_or_renamed_tensor_is_not(model: Path) -> None:
    weights = read_weight_files(model)
    weights.require_shapes(model, {"w": (4, 3), "renamed": (7, 7)})
    with pytest.raises(ConfigError, match=r"config\.json: model: w is 3 x 8 by it, but 3 x 4 in the weight files"):
        weights.require_shapes(model, {"w": (3, 8)})


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda file: file.write_bytes(file.read_bytes()[:-7]), "is cut off or damaged"),
        (lambda file: file.write_bytes(b"<!doctype html> not found, or not signed in"), "header does not fit"),
        (lambda file: file.write_bytes((5).to_bytes(8, "little") + b"[1,2]"), "its header cannot be read"),
        (lambda file: file.unlink(), "is missing, but model.safetensors.index.json names it"),
    ],
)
def test_a_file_that_is_not_whole_is_named_with_its_remedy(
    model: Path, spoil: Callable[[Path], object], says: str
) -> None:
    spoil(model / "model-2.safetensors")
    with pytest.raises(ConfigError) as raised:
        read_weight_files(model)
    assert (
        "model-2.safetensors" in str(raised.value) and says in str(raised.value) and "remedy: copy" in str(raised.value)
    )


def test_an_index_that_cannot_be_read_and_a_folder_without_weights_are_told(model: Path) -> None:
    (model / INDEX_FILE).write_text("{")
    with pytest.raises(ConfigError, match=rf"{INDEX_FILE}.*cannot be read"):
        read_weight_files(model)
    for file in model.glob("*.safetensors*"):
        file.unlink()
    with pytest.raises(ConfigError, match="has no weights"):
        read_weight_files(model)
    (model / "pytorch_model.bin").write_bytes(b"")
    assert read_weight_files(model).parameters == 0, "other formats are not read"


CODE = """
from pathlib import Path

from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen2Tokenizer

Path({mark!r}).write_text("the folder's code ran")


class OwnConfig(Qwen3Config):
    model_type = "own"


class OwnModel(Qwen3ForCausalLM):
    config_class = OwnConfig


class OwnTokenizer(Qwen2Tokenizer):
    pass
"""


def _change(file: Path, **changes: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def own_model(folder: Path) -> None:
    classes = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    _change(folder / "config.json", model_type="own", auto_map=classes)


def own_tokenizer(folder: Path) -> None:
    classes = {"AutoTokenizer": ["own.OwnTokenizer", None]}
    _change(folder / "tokenizer_config.json", tokenizer_class="OwnTokenizer", auto_map=classes)


@pytest.fixture
def mark(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that the code writes; the code is in the folder of the model of `run.yaml`, which has been run."""
    from tests.trainer.model_folders import save_tiny_model

    mark = place / "mark"
    save_tiny_model(place / "model")
    (place / "model" / "own.py").write_text(CODE.format(mark=str(mark)))
    own_model(place / "model")
    own_tokenizer(place / "model")
    limits = {"rollout_tokens": 600, "turn_tokens": 8, "assistant_turns": 1}
    write_config(
        model=str(place / "model"), out=str(place / "run"), steps=1, limits=limits, trust_remote_code=True, record=True
    )
    monkeypatch.setenv("HF_MODULES_CACHE", str(place / "modules"))
    return mark


def test_no_command_runs_code_of_a_models_folder(run: RunCommand, mark: Path) -> None:
    trusting = [sys.executable, "-m", "trainer.cli", "--config", "run.yaml"]
    with ForkedPopen(trusting, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=os.environ) as process:
        output = process.communicate(timeout=300)[0].decode()
    assert process.returncode == 0 and mark.exists(), output
    mark.unlink()
    for file in ("run.yaml", "run/run.json"):
        untrusted = Path(file).read_text().replace('"trust_remote_code": true', '"trust_remote_code": false')
        Path(file).write_text(untrusted)

    data = "--data", "rows.jsonl"
    Path("rows.jsonl").write_text('{"prompt": "Who?", "ground_truth": "You."}\n')
    for code, *words in (
        (2, "--config", "run.yaml", "--out", "other", "--dry-run"),
        (2, "--config", "run.yaml", "--out", "other"),
        (2, "eval", "run"),
        (2, "replay", "run", "1"),
        (2, "rollout", "--tools", "tools", "--model", "model", *data, "--out", "rolled"),
        (2, "export", "run", "--out", "exported"),
        (2, "--config", "run.yaml", "--resume"),
    ):
        output = " ".join(run(*words, code=code).output.split())
        assert not mark.exists(), words
        assert "auto_map" in output and "set `trust_remote_code: true`" in output, (words, output)


def test_trust_in_a_folder_is_trust_in_those_below_it_and_in_no_other(tmp_path: Path) -> None:
    from tests.trainer.model_folders import save_tiny_model

    for name in ("trusted/model", "other"):
        save_tiny_model(tmp_path / name)
        (tmp_path / name / "own.py").write_text(CODE.format(mark=str(tmp_path / "mark")))
        own_model(tmp_path / name)
        own_tokenizer(tmp_path / name)
    trust_code(tmp_path / "trusted")
    for read in (load_config, load_tokenizer):
        with pytest.raises(ModelCodeError, match=r"own\.Own"):
            read(tmp_path / "other")
    assert not (tmp_path / "mark").exists()
    assert load_config(tmp_path / "trusted" / "model").model_type == "own" and (tmp_path / "mark").exists()


ROWS = [{"prompt": f"{number} + 1?", "ground_truth": str(number + 1)} for number in range(3)]
ASK = """
import sys
from gateway.errors import ConfigError
from trainer.data.dataset import open_rows
from trainer.hub import find_model
from trainer.cli.run_file import fetch_model
from trainer.train.settings import TrainSettings
for name in sys.argv[1:]:
    try:
        if name.startswith("data:"):
            rows = open_rows(name.removeprefix("data:"), "train")
            print(len(rows), rows[2]["prompt"], rows.location(2))
        elif name.startswith("teacher:"):
            kl = {"reference": {"model": name.removeprefix("teacher:")}}
            given = TrainSettings.model_validate({"data": "rows", "model": "m", "algorithm": {"kl": kl}})
            print(fetch_model(given).algorithm.kl.reference.model)
        else:
            folder = find_model(name)
            print(folder, sorted(file.name for file in folder.iterdir()))
    except ConfigError as error:
        print(" ".join(str(error).split()))
"""


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    files = {"config.json": b"{}", "model.safetensors": b"0" * 100_000}
    rows = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
    card = b"---\nconfigs:\n- config_name: main\n  data_files: rows.jsonl\n---\n"
    repos = {
        "models/org/tiny": {**files, "evil.py": b"raise SystemExit"},
        "datasets/org/sums": {"README.md": card, "rows.jsonl": rows},
    }
    with running_hub(repos) as hub:
        yield hub


def ask(hub: Hub, home: Path, *names: str, **environment: str) -> tuple[list[str], str]:
    """What a process prints that asks for these names, line by line, and what it says on standard error."""
    words = [sys.executable, "-c", ASK, *names]
    return run(words, hub, home, environment)


def run(words: list[str], hub: Hub, home: Path, environment: dict[str, str], code: int = 0) -> tuple[list[str], str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    env |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", **environment}
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout.splitlines(), done.stderr


def test_a_model_is_fetched_by_its_name_told_before_and_found_again_without_the_hub(hub: Hub, tmp_path: Path) -> None:
    hub.asked.clear()
    (line,), told = ask(hub, tmp_path, "org/tiny@v2")
    assert f"snapshots/{SHA} [" in line and "model.safetensors" in line and "evil.py" not in line
    assert f"mtrl-train: fetching org/tiny@v2 from {hub.url} (" in told and "MB, kept in" in told
    assert any("resolve" in request for request in hub.asked) and not any("evil.py" in request for request in hub.asked)
    (again,), told = ask(hub, tmp_path, "org/tiny@v2", HF_ENDPOINT="http://127.0.0.1:9")
    assert again == line and "fetching" not in told


def test_a_data_set_is_read_and_what_the_hub_does_not_give_refused_with_the_way_to_it(hub: Hub, tmp_path: Path) -> None:
    names = ("data:org/sums@v2:main", "org/gated", "org/missing", "org/tiny@v9", "data:org/missing")
    (read, gated, missing, revision, data), told = ask(hub, tmp_path, *names)
    assert read == "3 2 + 1? org/sums@v2:main:3"
    assert f"mtrl-train: data set org/sums@v2:main: from {hub.url}, unless it was fetched before" in told
    assert "org/gated is no folder here, and its owners give access on request" in gated
    assert f"ask for it at {hub.url}/org/gated, then: `hf auth login`" in gated
    assert "org/missing is no folder here, and the hub has none of this name that you may read" in missing
    assert "the hub has no such revision of it" in revision
    assert "org/missing: is not a file or folder here, and no data set of this name can be loaded" in data


def test_a_teacher_is_fetched_by_its_name(hub: Hub, tmp_path: Path) -> None:
    (found, missing), told = ask(hub, tmp_path, "teacher:org/tiny", "teacher:org/missing")
    assert f"snapshots/{SHA}" in found and f"fetching org/tiny from {hub.url} (" in told
    assert missing.startswith("algorithm.kl.reference.model: org/missing is no folder here, and the hub has none")


def test_without_a_network_names_are_refused_by_name(hub: Hub, tmp_path: Path) -> None:
    lines, _ = ask(hub, tmp_path, "org/tiny", "data:org/sums", HF_HUB_OFFLINE="1")
    assert "model: org/tiny is no folder here, and no hub is asked, since HF_HUB_OFFLINE is set" in lines[0]
    assert "org/sums: is not a file or folder here" in lines[1] and "(HF_HUB_OFFLINE is set)" in lines[1]
    (line,), _ = ask(hub, tmp_path, "org/tiny", HF_ENDPOINT="http://127.0.0.1:9")
    assert "the hub (http://127.0.0.1:9) did not give it (ConnectError)" in line


@pytest.mark.parametrize("command", ["", "rollout", "sft"])
@pytest.mark.parametrize(("model", "is_asked"), [("org/missing@v2", True), ("./models/mine", False)])
def test_commands_ask_the_hub_for_a_model_unless_it_is_written_as_a_folder(
    command: str, model: str, is_asked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    Path("tools").mkdir()
    more = {"": ["--tools", "tools", "--dry-run"], "rollout": ["--out", "o"], "sft": ["--steps", "1", "--dry-run"]}
    done = CliRunner().invoke(app, [*command.split(), "--model", model, "--data", "d", *more[command]])
    assert done.exit_code in (1, 2), done.output
    assert (f"model: {model} is no folder here, and no hub is asked" in done.output) is is_asked, done.output


def test_an_export_is_pushed_into_a_private_repository_with_a_token(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}")
    code = "from pathlib import Path; from trainer.hub import *; check_push('org/mine'); "
    code += "print(push_model(Path(sys.argv[1]), 'org/mine'))"
    words = [sys.executable, "-c", code, str(tmp_path / "mine")]
    for token, problem in (("", "--push: there is no token"), ("hf_bad", "--push: org/mine cannot be pushed to")):
        _, told = run(words, hub, tmp_path, {"HF_TOKEN": token}, code=1)
        assert problem in told and "hf auth login" in told and not hub.made
    lines, _ = run(words, hub, tmp_path, {"HF_TOKEN": TOKEN})
    assert lines == [f"{hub.url}/org/mine"]
    assert [wanted["visibility"] for wanted in hub.made] == ["private"]
    assert hub.repos["models/org/mine"]["config.json"] == b"{}"


def test_nothing_is_pushed_where_everybody_can_read_it(hub: Hub, tmp_path: Path) -> None:
    code = "from trainer.hub import check_push; check_push('org/new'); check_push('org/tiny')"
    _, told = run([sys.executable, "-c", code], hub, tmp_path, {"HF_TOKEN": TOKEN}, code=1)
    assert "org/tiny is there already, and everybody can read it" in told and "org/new" not in hub.repos


def test_a_push_without_a_token_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    words = ["export", str(tmp_path), "--out", str(tmp_path / "mine"), "--push", "org/mine"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 2 and "--push: there is no token for the hub" in done.output
    assert not (tmp_path / "mine").exists()
