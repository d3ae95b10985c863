"""An interpreter for tests that start programs, which has already imported torch: that is most of a short run.

    subprocess.run([warm.python(), "-m", "mindspeed_mem", "plan"])  # instead of sys.executable

The first call starts a server (`tests.warm.server`), which imports what programs need of others, nothing of this
package nor of Megatron, and forks once per program. What it returns is a small program (`tests/warm/client.py`) that
takes arguments, environment, folder and standard streams there, passes signals on, and ends as the forked process does.
It becomes the plain interpreter for other options than -u, -m, -c and -W ignore, where there is nothing to run, and for
variables that are read before the first line runs. With PYTHON_EXEC in its environment, programs start others with
that, as torchrun does by itself. Limits, priority, and the seed of strings' hashes are the server's; terminals and
process groups are the client's: tests of them, and of importing, take sys.executable. So does everything with
TESTS_COLD=1, and where there is no Linux.
"""

import atexit
import functools
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent


@functools.cache
def python() -> str:
    """The path of the interpreter."""
    if not hasattr(os, "pidfd_open") or os.environ.get("TESTS_COLD"):
        return sys.executable
    folder = Path(tempfile.mkdtemp(prefix="warm"))
    address, program = folder / "socket", folder / "python"
    program.write_text(f"#!{sys.executable} -IS\n{(HERE / 'client.py').read_text()}")
    program.chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    # It ends when its standard input does, which is with this process at the latest.
    command = [sys.executable, str(HERE / "server.py"), str(address)]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment)
    atexit.register(_end, server, folder)
    return str(program)


def _end(server: subprocess.Popen, folder: Path) -> None:
    server.stdin.close()
    server.wait()
    shutil.rmtree(folder, ignore_errors=True)
