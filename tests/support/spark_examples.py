"""The examples of pages on Spark, with one Spark session for all of them.

Starting Java for each of thirty commands would take minutes. So there is one process with a session, and the program
`flintmq` that a page's script finds hands the words of `flintmq pipeline …` over to it, with its folder and its output;
there they are given to the same function that the real program calls. All other commands run as on other pages. Blocks
of Python and SQL have the session as `spark`, as in Spark's own shell.

    python -m support.spark_examples FOLDER …     run the pages that were prepared in these folders

Each page gets a new platform, one after the other: the ports are those that readers use.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from spark.object_store import ACCESS, SECRET
from support.examples import (
    MOMENT,
    OWN_NETWORK,
    REPOSITORY,
    add_program,
    bring_up_loopback,
    environment_of,
    judge,
    platform_in,
    prepare,
    run_apart,
)

#: A guard against hanging, in seconds.
PATIENCE = 500
#: A streaming query is interrupted after its first batch, and not after some time.
UNTIL_INTERRUPTED_ON_SPARK = """#!/bin/sh
[ "$1 $2" != "flintmq pipeline" ] || {{ export UNTIL_FIRST_BATCH=1; exec "$@"; }}
exec timeout --preserve-status --signal=INT {moment} "$@"
"""
SOCKET = "session.sock"
#: Pages name it for single examples.
TEST = "tests/spark/test_spark_pages.py"


def run_pages(paths: list[Path], folder: Path) -> dict[str, list[str]]:
    """Run all examples of some pages, and return what is wrong with them, by the page's name."""
    pages = {}
    for path in paths:
        (folder / path.stem).mkdir()
        pages[path.stem] = prepare(path, folder / path.stem, TEST)
        (folder / path.stem / "page.txt").write_text(str(path))
    words = [*OWN_NETWORK, sys.executable, "-m", "support.spark_examples", *pages]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join((str(REPOSITORY / "src"), str(REPOSITORY / "tests"))),
        "SPARK_LOCAL_IP": "127.0.0.1",
        # Most of the time would be spent on compiling what runs once.
        "JAVA_TOOL_OPTIONS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
        # For the object store that a page starts: Spark's workers have the environment of the session.
        "AWS_ACCESS_KEY_ID": ACCESS,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "us-east-1",
        "HOME": str(folder),
        "NO_COLOR": "1",
        "COLUMNS": "160",
    }
    done = run_apart(words, folder, environment, PATIENCE)
    if done.returncode != 0:
        return {"all pages": [f"ended with {done.returncode}: {done.stdout[-3000:]}"]}
    return {name: judge(page, (folder / name / "output.txt").read_text()) for name, page in pages.items()}


# --- Inside of the new network ----------------------------------------------------------------------------------------


def main(names: list[str]) -> int:
    """Hold the session in this thread, which hears signals, and run the pages in another."""
    from flintmq.spark import session

    bring_up_loopback()
    home = Path.cwd()
    spark = session("examples", **{"spark.sql.shuffle.partitions": 1, "spark.sql.codegen.wholeStage": False})
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(SOCKET)
        server.listen()
        failures: list[str] = []
        thread = threading.Thread(target=_run_scripts, args=(home, names, failures), daemon=True)
        thread.start()
        while True:
            # A signal for a command that has just ended.
            with contextlib.suppress(KeyboardInterrupt):
                connection, _ = server.accept()
                with connection:
                    if not _serve(connection, spark, home):
                        break
    spark.stop()
    sys.stderr.write("".join(failures))
    return 1 if failures else 0


def _run_scripts(home: Path, names: list[str], failures: list[str]) -> None:
    try:
        for name in names:
            folder = home / name
            add_program(folder, "until_interrupted", UNTIL_INTERRUPTED_ON_SPARK.format(moment=MOMENT))
            ask = f"exec {sys.executable} -m support.spark_examples --ask {home / SOCKET}"
            real = Path(sys.executable).parent / "flintmq"
            add_program(folder, "flintmq", f'#!/bin/sh\n[ "$1" != pipeline ] || {ask} "$@"\nexec {real} "$@"\n')
            add_program(folder, "run_example", f'#!/bin/sh\n{ask} run "$@"\n')
            environment = environment_of(Path((folder / "page.txt").read_text()), folder)
            with platform_in(folder), open(folder / "output.txt", "w") as output:
                done = subprocess.run(
                    ["bash", "page.sh"],
                    cwd=folder,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    check=False,
                )
            if done.returncode != 0:
                failures.append(f"{name} ended with {done.returncode}: {(folder / 'output.txt').read_text()[-2000:]}\n")
    except Exception:
        failures.append(traceback.format_exc())
    finally:
        _ask(str(home / SOCKET), ["end"])


def _serve(connection: socket.socket, spark: Any, home: Path) -> bool:
    """Run one command for a program that waits for its status; False at the end of all pages."""
    data, files, _, _ = socket.recv_fds(connection, 1 << 16, 2)
    request = json.loads(data)
    words: list[str] = request["words"]
    if words == ["end"]:
        connection.sendall(b"0")
        return False
    ended = threading.Event()
    if request["until_first_batch"]:
        threading.Thread(target=_interrupt_after_a_batch, args=(spark, ended), daemon=True).start()
    os.chdir(request["folder"])
    try:
        with _output_to(files):
            status = _run(words, spark)
    finally:
        ended.set()
        os.chdir(home)
    for view in spark.catalog.listTables():
        spark.catalog.dropTempView(view.name)
    connection.sendall(str(status).encode())
    connection.shutdown(socket.SHUT_RDWR)
    return True


def _interrupt_after_a_batch(spark: Any, ended: threading.Event) -> None:
    while not ended.wait(0.2):
        if any(progress.numInputRows for query in spark.streams.active for progress in query.recentProgress):
            os.kill(os.getpid(), signal.SIGINT)
            return


def _run(words: list[str], spark: Any) -> int:
    from flintmq.cli import main as flintmq

    try:
        if words[0] == "pipeline":
            return flintmq(words)
        path = Path(words[1])
        if path.suffix == ".sql":
            for statement in filter(None, map(str.strip, path.read_text().split(";"))):
                spark.sql(statement).show()
            return 0
        exec(compile(path.read_text(), path, "exec"), {"__name__": "__main__", "spark": spark})
        for query in spark.streams.active:
            query.processAllAvailable()
            query.stop()
        return 0
    except KeyboardInterrupt:
        return 130
    except SystemExit as exc:
        return int(exc.code or 0)
    except Exception:
        traceback.print_exc()
        return 1


@contextlib.contextmanager
def _output_to(files: list[int]) -> Iterator[None]:
    """Write where the program that asked would have written."""
    before = [os.dup(number) for number in (1, 2)]
    for number, file in zip((1, 2), files, strict=True):
        os.dup2(file, number)
        os.close(file)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, file in zip((1, 2), before, strict=True):
            os.dup2(file, number)
            os.close(file)


def _ask(address: str, words: list[str]) -> int:
    """Have a command run by the process with the session."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        request = json.dumps(
            {"words": words, "folder": os.getcwd(), "until_first_batch": "UNTIL_FIRST_BATCH" in os.environ}
        )
        socket.send_fds(connection, [request.encode()], [1, 2])
        return int(connection.recv(16))


if __name__ == "__main__":
    if sys.argv[1] == "--ask":
        sys.exit(_ask(sys.argv[2], sys.argv[3:]))
    sys.exit(main(sys.argv[1:]))
