"""`python -m flintmq <command>`, and the first lines of every program: ctrl-C ends them quietly from here on.

Imports take most of a program's first moments, so all but one happen inside.
"""

from __future__ import annotations

import sys

__all__ = [
    "flintmq",
    "nsq_stat",
    "nsq_tail",
    "nsq_to_file",
    "nsq_to_http",
    "nsq_to_nsq",
    "nsqadmin",
    "nsqd",
    "nsqlookupd",
    "to_nsq",
]

#: What a shell says of a program that SIGINT ended.
_INTERRUPTED = 130


def _run(module: str, function: str) -> int:
    try:
        import importlib

        from flintmq.garbage import no_collection

        if None in (sys.stdout, sys.stderr):
            # Closed by whoever started us (`>&-`).
            from flintmq.tools._output import open_standard_files

            open_standard_files()
        _print_anything()
        try:
            with no_collection():
                imported = importlib.import_module(module)
            status: int = getattr(imported, function)()
        except SystemExit:
            sys.stdout.flush()
            raise
        sys.stdout.flush()
    except KeyboardInterrupt:
        return _INTERRUPTED
    except RuntimeError as exc:
        # Until Python 3.12, what happens while a class is made comes out as such an error.
        if not isinstance(exc.__cause__, KeyboardInterrupt):
            raise
        return _INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has read enough (`nsqd --help | head -1`).
        _drop_output()
        return 0
    except OSError:
        from flintmq.tools._output import output_error

        why = output_error()
        if why is None:
            raise
        sys.stderr.write(f"cannot write to standard output: {why.strerror}\n")
        _drop_output()
        return 1
    finally:
        import signal

        # Python tidies up now, and would show where ctrl-C has met it.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    return status


def _print_anything() -> None:
    """Let no character end a program: where the terminal is not UTF-8 they are replaced, and so are odd file names."""
    import io

    if isinstance(sys.stdout, io.TextIOWrapper):
        is_utf8 = sys.stdout.encoding.lower() in ("utf-8", "utf8")
        sys.stdout.reconfigure(errors="backslashreplace" if is_utf8 else "replace")


def _drop_output() -> None:
    """Have the last flush, at Python's end, go nowhere."""
    import os

    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def flintmq() -> int:
    return _run("flintmq.cli", "main")


def nsqd() -> int:
    return _run("flintmq.cli", "nsqd")


def nsqlookupd() -> int:
    return _run("flintmq.cli", "nsqlookupd")


def nsqadmin() -> int:
    return _run("flintmq.cli", "nsqadmin")


def nsq_stat() -> int:
    return _run("flintmq.tools.nsq_stat", "main")


def nsq_tail() -> int:
    return _run("flintmq.tools.nsq_tail", "main")


def nsq_to_file() -> int:
    return _run("flintmq.tools.nsq_to_file", "main")


def nsq_to_http() -> int:
    return _run("flintmq.tools.nsq_to_http", "main")


def nsq_to_nsq() -> int:
    return _run("flintmq.tools.nsq_to_nsq", "main")


def to_nsq() -> int:
    return _run("flintmq.tools.to_nsq", "main")


if __name__ == "__main__":
    sys.exit(flintmq())
