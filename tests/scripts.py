"""Run Python in a process of its own that is forked where torch, lightning and transformers are imported.

Importing them takes ten seconds of a processor in every new interpreter.
"""

from __future__ import annotations

import atexit
import os
import re
import runpy
import subprocess
import sys
import tempfile
import threading
import traceback
from pathlib import Path

from tests.ranks import forkserver

EXAMPLES = Path(__file__).parent.parent / "examples"


def smaller_examples(folder: Path) -> Path:
    """Copy the examples into a folder, with packs of fewer tokens and documents of fewer bytes."""
    for file in EXAMPLES.glob("*.py"):
        text = re.sub(r"capacity=[\d_]+", "capacity=512", file.read_text())
        (folder / file.name).write_text(re.sub(r"max_bytes=\d+", "max_bytes=256", text))
    return folder


def run_python(*arguments: object, cwd: Path | None = None, timeout_s: float = 180.0) -> str:
    """Run ``python *arguments`` and return what it printed; an exit status that is not 0 fails the test."""
    done = finished(*arguments, cwd=cwd, timeout_s=timeout_s)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def finished(
    *arguments: object, cwd: Path | None = None, timeout_s: float = 180.0
) -> subprocess.CompletedProcess[str]:
    """Run ``python *arguments`` as ``run_python`` does, whatever its exit status is."""
    command = list(map(str, arguments))
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out")
        err = Path(folder, "err")
        process = forkserver().Process(
            target=_main, args=(command, str(cwd or Path.cwd()), str(out), str(err), dict(os.environ))
        )

        process.start()
        process.join(timeout_s)
        if process.exitcode is None:
            process.kill()
            process.join()

        code = process.exitcode
        assert code is not None
        return subprocess.CompletedProcess(command, code, out.read_text(), err.read_text())


def _main(arguments: list[str], cwd: str, out: str, err: str, environment: dict[str, str]) -> None:
    for path, fd in ((out, 1), (err, 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), fd)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    code: object = 0

    try:
        _run(arguments, cwd)
    except SystemExit as end:
        code = end.code or 0
        if isinstance(code, str):
            sys.stderr.write(code + "\n")
    except BaseException:
        code = 1
        traceback.print_exc()
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)


def _run(arguments: list[str], cwd: str) -> None:
    first, *rest = arguments
    if first == "-c":
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    elif first == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path.insert(0, str(Path(first).parent))
        runpy.run_path(first, run_name="__main__")
