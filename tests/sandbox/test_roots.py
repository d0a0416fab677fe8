"""Roots are made of images, whatever an archive says; boxes with one need no Python in it, and leave it as it is."""

from __future__ import annotations

import gzip
import json
import lzma
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import anyio
import pytest
from pydantic import ValidationError
from typer.testing import CliRunner

from gateway.build import build_plan
from gateway.cli import app
from gateway.errors import ConfigError, Unavailable
from gateway.sandbox import bubblewrap
from gateway.sandbox.bubblewrap import Confined
from gateway.sandbox.confined_process import SandboxEnded
from gateway.sandbox.provider import BubblewrapProvider
from gateway.sandbox.root_interpreter import PLACE, interpreter_files
from gateway.sandbox.roots import add_root, find_root, list_roots, remove_root, roots_folder
from gateway.sandbox.sandbox_settings import SandboxSettings
from gateway.sandbox.sandbox_toolset import SandboxToolset
from gateway.state.state_hash import hash_state
from gateway.types import Outcome, Task, ToolCall
from tests.sandbox.roots import export, make_layer, make_link, make_root, make_tree, save, shell

LIMITS = {"memory_mb": 192, "processes": 40, "disk_mb": 16, "files": 500}


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    return make_root(tmp_path, monkeypatch)


def limited(root: str, **settings: object) -> SandboxSettings:
    return SandboxSettings.model_validate({**LIMITS, "root": root, **settings})


async def test_tools_work_in_a_root_that_has_no_python_and_leave_it_as_it_is(
    root: str, provider: BubblewrapProvider
) -> None:
    before = hash_state(find_root(root).files)
    toolset = SandboxToolset(("python", "shell", "files"), limited(root, env={"COLOUR": "red"}), provider)
    with anyio.fail_after(120):
        async with toolset.open(Task()) as session:

            async def call(name: str, **arguments: object) -> str:
                result = await session.call(ToolCall("1", name, json.dumps(arguments)))
                assert result.outcome is Outcome.OK, result
                return result.text

            assert await call("shell", command="pwd; echo $COLOUR; cat /etc/motd") == "/rollout\nred\nhello"
            assert (
                await call("shell", command="rm /etc/motd /bin/vi; echo new > /etc/new; ls /etc; ls /usr /home") != ""
            )
            assert await call("python", code="import json, ctypes\nopen('/etc/made', 'w').write('1')\n20 + 1") == "21"
            assert await call("files", action="read", path="/etc/made") == "1"
            assert "python" not in await call("shell", command="ls /bin")
    assert hash_state(find_root(root).files) == before


async def test_box_with_a_root_sees_nothing_of_the_machine_and_has_no_rights(
    root: str, provider: BubblewrapProvider
) -> None:
    box = await provider.start(limited(root))
    try:
        assert await shell(box, "ls /") == "app\nbin\ndev\netc\nproc\nrollout\nroot\ntmp"
        status = await shell(box, "cat /proc/self/status")
        assert "CapBnd:\t0000000000000000" in status and "NoNewPrivs:\t1" in status
        assert os.geteuid() != 0 or "Uid:\t0" not in status
        assert "permission denied" in await shell(box, "mount -t tmpfs none /tmp")
        assert "Read-only" in await shell(box, "touch /.mtrl/loader /dev/new")
        assert "No space left" in await shell(box, "for n in $(seq 600); do echo > /etc/$n; done")
        assert "No space left" in await shell(
            box, "rm -f /etc/*; for n in a b; do dd if=/dev/zero of=/$n bs=1M count=15; done"
        )
        assert "No space left" in await shell(box, "for n in $(seq 600); do echo > /dev/shm/$n; done")
    finally:
        await box.stop()


async def test_files_outlive_processes_and_boxes_that_follow_change_nothing_of_them(
    root: str, provider: BubblewrapProvider
) -> None:
    first = await provider.start(limited(root), keeps_files=True)
    await shell(first, "echo 1 > /app/one; rm /etc/motd; mv /bin/vi /app/vi; sleep 1000 &")
    kept = await first.freeze()
    try:
        for _ in range(2):
            second = await provider.start(limited(root), keeps_files=True, files_of=kept)
            assert await shell(second, "ls /app; ls /etc/motd; ps | grep -c '[s]leep'") == (
                "one\nvi\nls: /etc/motd: No such file or directory\n0"
            )
            await shell(second, "echo 2 > /app/two; rm /app/one")
            later = await second.freeze()
            third = await provider.start(limited(root), files_of=later)
            assert await shell(third, "ls /app") == "two\nvi"
            await third.stop()
            await later.close()
    finally:
        await kept.close()


async def test_files_outlive_a_box_that_its_processes_ended_or_filled(root: str, provider: BubblewrapProvider) -> None:
    first = await provider.start(limited(root), keeps_files=True)
    await shell(
        first, "echo done > /app/answer; for n in $(seq 600); do echo > /etc/$n; done; head -c 20m /dev/zero > /b"
    )
    with pytest.raises(SandboxEnded):
        await first.run(("sh", "-c", "kill -9 -1"), b"", 20.0)
    kept = await first.freeze()
    second = await provider.start(limited(root), files_of=kept)
    assert await shell(second, "cat /app/answer; head -c 10m /dev/zero > /app/room && echo room") == "done\nroom"
    await second.stop()
    await kept.close()


async def test_files_of_boxes_without_a_root_outlive_them_with_their_state(
    tmp_path: Path, provider: BubblewrapProvider
) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state/a").write_text("first")
    archive = Path(shutil.make_archive(str(tmp_path / "packed"), "tar", tmp_path / "state"))
    for state in (None, tmp_path / "state", archive):
        box = await provider.start(SandboxSettings.model_validate(LIMITS), state, keeps_files=True)
        await shell(box, "cat a; echo mine > a; echo new > b; sleep 1000 &")
        kept = await box.freeze()
        again = await provider.start(SandboxSettings.model_validate(LIMITS), state, files_of=kept)
        assert await shell(again, "cat a b; pwd; ps ax | grep -c '[s]leep'") == "mine\nnew\n/rollout\n0"
        await again.stop()
        await kept.close()


def test_boxes_of_a_gateway_that_is_not_roots_keep_their_files_too() -> None:
    """The tests above, in a namespace in which nobody is root."""
    words = ("unshare", "--user", "--map-user=1001", "--map-group=1001", sys.executable, "-m", "pytest", "-q", "-x")
    done = subprocess.run(
        [*words, "-p", "no:cacheprovider", __file__, "-k", "no_rights or outlive"],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]


async def test_policy_cannot_lead_the_mounts_of_a_box_that_follows_elsewhere(
    root: str, tmp_path: Path, provider: BubblewrapProvider
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o777)
    shared.chmod(0o777)
    settings = limited(root, writable=[str(shared)])
    first = await provider.start(settings, keeps_files=True)
    parts = shared.parts[1]
    traps = f"rm -rf /{parts} /tmp /rollout; for n in tmp rollout {parts}; do ln -s /oldroot/etc /$n; done; ls -la /"
    await shell(first, f"cd /; {traps}; rm -rf /app; mkfifo /app")
    kept = await first.freeze()
    second = await provider.start(settings, files_of=kept)
    assert await shell(second, f"echo here > {shared}/file; cd /tmp && pwd; cd /rollout && pwd") == "/tmp\n/rollout"
    await second.stop()
    await kept.close()
    assert (shared / "file").read_text() == "here\n"


async def test_folders_of_any_depth_are_no_hindrance_to_the_mounts_of_a_box_that_follows(
    root: str, tmp_path: Path, provider: BubblewrapProvider
) -> None:
    data = tmp_path / "data.txt"
    data.write_text("data")
    settings = limited(root, readable=[str(data)], files=4000)
    first = await provider.start(settings, keeps_files=True)
    code = f"""
import os
parent = {str(data.parent)!r}
os.rename(parent, parent + ".away")
os.makedirs({str(data)!r})
os.chdir({str(data)!r})
for _ in range(2500): os.mkdir("d"), os.chdir("d")
"""
    assert (await first.run_python(code, 20.0)).stderr == ""
    kept = await first.freeze()
    second = await provider.start(settings, files_of=kept)
    assert await shell(second, f"cat {data}") == "data"
    await second.stop()
    await kept.close()


def test_files_of_a_state_lie_beside_the_interpreter_wherever_that_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bubblewrap, "interpreter_files", lambda: {f"{PLACE}/python": "/mnt/python"})
    assert bubblewrap._state_place(Confined((), SandboxSettings(), root="/roots/a")) != "/mnt"
    monkeypatch.setattr(bubblewrap, "MASKED_FILES", (Path("/mnt/checkout/stat"),))
    assert bubblewrap._state_place(Confined((), SandboxSettings())) != "/mnt"


@pytest.mark.parametrize(("kind", "packed"), [("docker", bytes), ("oci", gzip.compress), ("oci", lzma.compress)])
async def test_images_are_flattened_with_whiteouts_links_and_one_owner(
    kind: str, packed: type[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, provider: BubblewrapProvider
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    base = export(make_tree(tmp_path / "tree"), tmp_path / "tree.tar").read_bytes()
    suid = tarfile.TarInfo("bin/suid")
    suid.mode, suid.uid, suid.gid = 0o6755, 1234, 1234
    second = [("data/old", b"old"), ("data/more", b""), ("lib/one", b"1"), make_link("link", "/lib"), suid]
    third = [
        ("data/.wh..wh..opq", b""), ("data/new", b"new"), ("etc/.wh.motd", b""), ("link/two", b"2"),
        make_link("hard", "./lib/one", tarfile.LNKTYPE), make_link("null", "", tarfile.CHRTYPE),
        make_link("pipe", "", tarfile.FIFOTYPE),
    ]  # fmt: skip
    layers = [packed(base), packed(make_layer(second)), packed(make_layer(third))]
    root, left_out = add_root("image", save(tmp_path / "image.tar", layers, kind))
    assert left_out == "2 devices and pipes were left out"
    assert sorted(os.listdir(root.files / "data")) == ["new"] and not (root.files / "etc/motd").exists()
    assert sorted(os.listdir(root.files / "lib")) == ["one", "two"] and (root.files / "hard").read_text() == "1"
    state = (root.files / "bin/suid").stat()
    assert (state.st_mode & 0o7777, state.st_uid) == (0o755, os.geteuid())
    box = await provider.start(limited("image"))
    assert await shell(box, "pwd; echo $PLACE; cat /link/two") == "/app\nimage\n2"
    await box.stop()


def make_preloading_layer() -> bytes:
    """A layer that has a library loaded into each program."""
    library = Path(interpreter_files()[f"{PLACE}/libraries"], "libm.so.6").read_bytes()
    return make_layer([("etc/ld.so.preload", b"/lib/hostile.so\n"), ("lib/hostile.so", library)])


def test_entrypoint_of_an_image_is_told_and_what_it_keeps_from_others_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def member(name: str, mode: int, kind: bytes = tarfile.REGTYPE, user: int = 0) -> tarfile.TarInfo:
        header = tarfile.TarInfo(name)
        header.mode, header.type, header.uid, header.gid = mode, kind, user, 50
        return header

    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    shell = ("bin/sh", (make_tree(tmp_path / "tree") / "bin/busybox").read_bytes())
    first = [
        member("root", 0o700, tarfile.DIRTYPE), member("key", 0o640), member("opened", 0o600), member("gone", 0),
        member("program", 0o711), member("data/key", 0o600), member("shared/key", 0o644),
    ]  # fmt: skip
    second = [
        member("opened", 0o644), member(".wh.gone", 0o644), member("own", 0o600, user=7), member(".wh.data", 0o644),
        make_link("data", "/shared"),
    ]  # fmt: skip
    archive = save(
        tmp_path / "image.tar", [make_layer([shell, *first]), make_layer(second)],
        config={"Entrypoint": ["/start.sh", "now"]},
    )  # fmt: skip
    root, told = add_root("served", archive)
    assert told == "its entrypoint is not run: /start.sh now"
    assert root.image["closed"] == {"/root": [0, -1], "/key": [0, 50], "/own": [7, -1]}
    assert not (root.files / "gone").exists()


async def test_libraries_that_an_image_preloads_are_loaded_into_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, provider: BubblewrapProvider
) -> None:
    """The loader that reads this file starts the box, with rights on the machine."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    base = export(make_tree(tmp_path / "tree"), tmp_path / "tree.tar").read_bytes()
    add_root("image", save(tmp_path / "image.tar", [base, make_preloading_layer()]))
    box = await provider.start(limited("image"))
    maps = await box.run_python("print(open('/proc/self/maps').read())", 20.0)
    assert "libc" in maps.stdout and "hostile" not in maps.stdout
    assert await shell(box, 'cat /etc/ld.so.preload; echo "$LANG $LC_ALL"') == "C.UTF-8"
    await box.stop()


def bomb() -> bytes:
    member = tarfile.TarInfo("etc/zeros")
    member.type = tarfile.GNUTYPE_SPARSE
    header = bytearray(member.tobuf(tarfile.GNU_FORMAT))
    header[483:495] = b"%012o" % (2**35 + 2**30)  # Its size, of which the archive has nothing.
    header[148:155] = b"%06o\0" % tarfile.calc_chksums(header)[0]  # type: ignore[attr-defined]
    return bytes(header) + bytes(1024)


def header_bomb() -> bytes:
    member = tarfile.TarInfo("long")
    member.type, member.size = tarfile.GNUTYPE_LONGNAME, 10**12
    return member.tobuf(tarfile.GNU_FORMAT) + bytes(1024)


HOSTILE: dict[str, tuple[bytes, str]] = {
    "leads up": (make_layer([("../out", b"x")]), "leads out"),
    "leads up below": (make_layer([("etc/../../out", b"x")]), "leads out"),
    "whiteout that leads up": (make_layer([("etc/.wh...", b"x")]), "leads out"),
    "hard link to the machine": (
        make_layer([make_link("etc/stolen", "/../../etc/passwd", tarfile.LNKTYPE)]),
        "leads out",
    ),
    "hard link to nothing": (make_layer([make_link("etc/stolen", "etc/none", tarfile.LNKTYPE)]), "is no file of it"),
    "hard link to the root itself": (make_layer([make_link("etc/all", "/", tarfile.LNKTYPE)]), "names no file"),
    "whiteout of nothing": (make_layer([("etc/.wh.", b"")]), "names no file"),
    "links in a circle": (make_layer([make_link("a", "b"), make_link("b", "a"), ("a/file", b"")]), "lead nowhere"),
    "bomb": (bomb(), "more than 32 GB"),
    "bomb of a header": (header_bomb(), "header of"),
    "deep": (make_layer([("d/" * 300 + "file", b"")]), "leads out"),
    "no Linux": (make_layer([("Files/Windows/system.ini", b"")]), "no /bin/sh"),
    "no program of this machine": (make_layer([("bin/sh", b"MZ")]), "no program for Linux"),
    "no archive": (b"hello" * 1000, r"no \.tar"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_archives_make_no_root_and_write_nothing_elsewhere(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    (tmp_path / "image.tar").write_bytes(HOSTILE[name][0])
    with pytest.raises(ConfigError, match=HOSTILE[name][1]) as error:
        add_root("image", tmp_path / "image.tar")
    assert "image.tar" in str(error.value) and "remedy" in str(error.value)
    assert [*roots_folder().iterdir()] == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "image.tar"]


def test_links_of_an_image_are_never_followed_out_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    (tmp_path / "machine").mkdir()
    (tmp_path / "machine/kept").write_text("kept")
    base = export(make_tree(tmp_path / "tree"), tmp_path / "tree.tar").read_bytes()
    out = str(tmp_path / "machine")
    links = [make_link("away", out), make_link("up", "../" * 20 + out[1:]), make_link("file", f"{out}/kept")]
    trap = make_layer([*links, ("away/kept", b"stolen"), ("up/new", b"stolen"), ("away/.wh.kept", b"")])
    opaque = make_layer([("up/.wh..wh..opq", b""), ("file", b"own")])
    root, _ = add_root("image", save(tmp_path / "image.tar", [base, trap, opaque]))
    assert os.listdir(tmp_path / "machine") == ["kept"] and (tmp_path / "machine/kept").read_text() == "kept"
    assert (root.files / "file").read_text() == "own"


@pytest.mark.parametrize(
    ("about", "problem"),
    [({"os": "windows"}, "image of windows"), ({"architecture": "s390x"}, "on s390x"), ({"config": 7}, "no root can")],
)
def test_images_for_other_machines_are_refused_by_name(
    about: dict[str, object], problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match=problem):
        add_root("image", save(tmp_path / "image.tar", [make_layer([("bin/sh", b"")])], "docker", **about))
    assert list_roots() == []


def test_commands_add_list_and_remove_roots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    archive = str(export(make_tree(tmp_path / "tree"), tmp_path / "tree.tar"))

    def run(*words: str) -> tuple[int, str]:
        result = CliRunner().invoke(app, ["roots", *words])
        return result.exit_code, result.output

    assert run("list") == (0, "")
    assert run("add", "small", archive)[1].startswith("small: ")
    assert run("add", "small", archive)[0] == 2 and run("add", "../small", archive)[0] == 2
    assert run("list")[1].startswith("small: ")
    assert run("remove", "small") == (0, "") and run("remove", "small")[0] == 2
    assert os.listdir(roots_folder()) == []


def write_tools(folder: Path, **sandbox: object) -> Path:
    file = folder / "box.yaml"
    file.write_text(json.dumps({"tools": [{"sandbox_tools": ["shell"], "sandbox": sandbox}]}))
    return file


async def test_root_that_is_not_there_is_told_with_its_place_and_the_remedy(
    tmp_path: Path, root: str, provider: BubblewrapProvider
) -> None:
    with pytest.raises(ConfigError, match=r"box.yaml.*sandbox.root.*no root 'other'(.|\n)*roots add other"):
        build_plan([write_tools(tmp_path, root="other")], None)
    build_plan([write_tools(tmp_path, root=root)], None)
    remove_root(root)
    with pytest.raises(Unavailable, match="no root 'busybox'"):
        await provider.start(limited(root))
    for settings in ({"root": "../up"}, {"workdir": "/app"}, {"root": root, "workdir": "app"}):
        with pytest.raises(ValidationError):
            SandboxSettings.model_validate(settings)


def test_roots_are_for_the_tools_of_sandboxes_alone(tmp_path: Path, root: str) -> None:
    entry = {"function": "math:sqrt", "isolation": "sandbox", "sandbox": {"root": root}}
    (tmp_path / "tools.yaml").write_text(json.dumps({"tools": [entry]}))
    with pytest.raises(ConfigError, match="`root` is for the tools"):
        build_plan([tmp_path / "tools.yaml"], None)
