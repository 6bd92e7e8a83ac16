"""The scripts of the repository, as far as they can be tried without building or installing anything."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted(path for path in (ROOT / "scripts").iterdir() if path.is_file() and os.access(path, os.X_OK))
#: A guard against hanging, nowhere a measure.
PATIENCE = 60


@pytest.mark.parametrize("flag", ["-h", "--help"])
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_every_script_tells_what_it_is_for_and_does_nothing(script: Path, flag: str, tmp_path: Path) -> None:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "TMPDIR": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [str(script), flag],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert script.name in done.stdout and len(done.stdout.splitlines()) > 3
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "script",
    [script for script in SCRIPTS if b"python" in script.read_bytes().partition(b"\n")[0]],
    ids=lambda path: path.name,
)
def test_the_help_of_a_script_needs_no_environment(script: Path, tmp_path: Path) -> None:
    # Without the packages of any environment.
    command = [sys.executable, "-I", "-S", str(script), "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert script.name in done.stdout


def test_check_refuses_an_option_that_it_does_not_know() -> None:
    words = [str(ROOT / "scripts" / "check"), "--nodocs"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "check: there is one option, --no-docs, and not '--nodocs'\n"


@pytest.fixture(scope="module")
def release() -> ModuleType:
    loader = importlib.machinery.SourceFileLoader("release", str(ROOT / "scripts" / "release"))
    spec = importlib.util.spec_from_loader("release", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def test_a_release_deletes_the_files_of_the_last_one_alone(release: ModuleType, tmp_path: Path) -> None:
    names = ["flintmq-1.0-cp311-cp311-linux_x86_64.whl", "flintmq-1.0.tar.gz", "flintmq-1.0.cdx.json", "SHA256SUMS"]
    for name in names:
        (tmp_path / name).write_text("old")
    release.empty(tmp_path)
    assert list(tmp_path.iterdir()) == []
    release.empty(tmp_path / "new" / "folder")
    assert (tmp_path / "new" / "folder").is_dir()


@pytest.mark.parametrize("other", ["thesis.txt", "flintmq-notes", "SHA256SUMS/x", "flintmq-1.0.tar.gz/x"])
def test_a_release_spares_a_folder_with_other_files(release: ModuleType, tmp_path: Path, other: str) -> None:
    (tmp_path / "flintmq-0.9.tar.gz").write_text("old")
    (tmp_path / other).parent.mkdir(exist_ok=True)
    (tmp_path / other).write_text("mine")
    with pytest.raises(SystemExit, match="which is no file of a release: choose another folder with --to"):
        release.empty(tmp_path)
    assert (tmp_path / other).read_text() == "mine" and (tmp_path / "flintmq-0.9.tar.gz").exists()


# --- scripts/up -------------------------------------------------------------------------------------------------------

#: As in tests/test_permissions.py: root without its privileges.
AS_A_USER = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"] if os.geteuid() == 0 else []


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A clone, as far as the preparation looks before it needs a Python."""
    (tmp_path / "a clone" / "scripts").mkdir(parents=True)
    shutil.copy2(ROOT / "scripts" / "up", tmp_path / "a clone" / "scripts" / "up")
    return tmp_path / "a clone"


def prepare(clone: Path, *before: str, **environment: str) -> tuple[str, str]:
    """Run the preparation where no Python can be found; return its output and its error."""
    tools = clone.parent / "tools"
    tools.mkdir()
    for name in ("basename", "dirname", "grep", "id", "rm"):
        (tools / name).symlink_to(shutil.which(name) or name)
    # With a path: the programs before it are not among the tools.
    words = [*(shutil.which(word) or word for word in before), shutil.which("bash") or "bash"]
    done = subprocess.run(
        [*words, str(clone / "scripts" / "up"), "--no-spark"],
        cwd=clone,
        env={"PATH": str(tools)} | environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 1
    return done.stdout, done.stderr


def environment_of(clone: Path, place: Path) -> Path:
    """Make what tells the preparation that the clone has an environment, which was made in some place."""
    programs = clone / ".venv" / "bin"
    programs.mkdir(parents=True)
    (clone / ".venv" / ".flintmq").write_text("a key compiled\n")
    (programs / "python").symlink_to(sys.executable)
    (programs / "flintmq").write_text(f"#!{place}/.venv/bin/python\n")
    return clone / ".venv"


def test_an_environment_of_a_clone_that_was_moved_is_made_again(clone: Path) -> None:
    environment = environment_of(clone, clone.parent / "elsewhere")
    said, error = prepare(clone)
    assert "was moved" in said and "needed, and none was found" in error
    assert not environment.exists()


def test_an_environment_whose_python_was_removed_is_made_again(clone: Path) -> None:
    environment = environment_of(clone, clone)
    (environment / "bin" / "python").unlink()
    (environment / "bin" / "python").symlink_to("/nowhere/python3")
    assert "was removed" in prepare(clone)[0]
    assert not environment.exists()


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="needs root and setpriv")
@pytest.mark.parametrize("mode", [0o700, 0o777])
def test_an_environment_of_another_user_is_neither_used_nor_deleted(clone: Path, mode: int) -> None:
    environment = environment_of(clone, clone)
    (environment / "bin" / "python").unlink()
    (environment / "bin" / "python").symlink_to("/root/of/its/owner/python3")
    os.chown(environment, 65534, 65534)
    environment.chmod(mode)
    said, error = prepare(clone, *AS_A_USER)
    assert said == "" and (environment / "bin" / "flintmq").exists()
    assert error.startswith(f"up: {environment} belongs to another user, and root cannot use it: clone ")
    assert error.count("\n") == 1


def test_without_a_package_index_pip_is_told_in_a_sentence(tmp_path: Path) -> None:
    pip = tmp_path / "pip"
    pip.write_text(
        "#!/bin/bash\n"
        "echo \"WARNING: Retrying (Retry(total=0, connect=None)) after connection broken by 'NewConnectionError('\"\n"
        "echo 'ERROR: No matching distribution found for setuptools<84,>=77'\n"
        '[[ $PIP_RETRIES == 2 ]] || echo "retries: $PIP_RETRIES"\nexit 1\n'
    )
    pip.chmod(0o755)
    command = ["bash", "-c", "source scripts/up; python=$1; pip_install flintmq", "bash", str(pip)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "no package index can be reached: check the network, or name an index with PIP_INDEX_URL\n"


def test_an_environment_in_its_place_stays(clone: Path) -> None:
    environment = environment_of(clone, clone)
    said, _ = prepare(clone)
    assert said == "" and (environment / "bin" / "flintmq").exists()


def test_an_active_environment_that_was_deleted_is_named(clone: Path) -> None:
    _, error = prepare(clone, VIRTUAL_ENV="/nowhere/venv")
    assert error.startswith("up: the active virtual environment /nowhere/venv does not exist any more")


@pytest.mark.skipif(bool(AS_A_USER) and shutil.which("setpriv") is None, reason="needs setpriv")
def test_a_read_only_clone_is_named(clone: Path) -> None:
    clone.chmod(0o555)
    try:
        _, error = prepare(clone, *AS_A_USER)
    finally:
        clone.chmod(0o755)
    assert error.startswith(f"up: {clone} is read-only for ")


@pytest.mark.parametrize(
    ("program", "status", "said", "complaint"),
    [
        ("raise KeyboardInterrupt", 130, "", ""),
        ("import sys; print('out'); sys.exit('err')", 1, "out\nwent on\n", "err\n"),
        ("print('out')", 0, "out\nwent on\n", ""),
    ],
)
def test_a_python_of_the_preparation_shows_no_trace_of_ctrl_c(
    program: str, status: int, said: str, complaint: str
) -> None:
    line = 'source scripts/up; python=$1; result=0; run_python -c "$2" || result=$?; echo went on; exit $result'
    command = ["bash", "-c", line, "bash", sys.executable, program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (status, said, complaint)
