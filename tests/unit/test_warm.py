"""The interpreter of tests that start programs is what it stands for."""

import os
import signal
import subprocess
import sys
import uuid

import pytest

from tests import warm

CASES = {
    "arguments, search path and name": ["-c", "import sys; print(sys.argv, sys.path, __name__)", "a", "-m", "b c"],
    "a module": ["-m", "module", "--flag"],
    "a script": ["script.py", "x"],
    "without buffers": ["-u", "script.py"],
    "warnings": ["-W", "ignore", "-c", "import warnings; warnings.warn('no'); print(1)"],
    "an option that a fork has not": ["-X", "utf8", "-c", "import sys; print(sys.flags.utf8_mode)"],
    "an error": ["script.py", "fail"],
    "no script": ["absent.py"],
    "no module": ["-m", "absent"],
    "no code": ["-c"],
    "a status": ["-c", "import sys; sys.exit(7)"],
    "a message as status": ["-c", "import sys; sys.exit('reason')"],
    "at exit": [
        "-c",
        "import atexit, threading; atexit.register(print, 'end'); threading.Timer(0.1, print, 'a').start()",
    ],
    "ended by a signal": ["-c", "import os, signal; print('x', flush=True); os.kill(os.getpid(), signal.SIGTERM)"],
    "standard input": ["-c", "print(input().upper(), open(0).read())"],
}


def ended(python, arguments, folder, **environment):
    own = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}/nowhere", "GIVEN": "ä", **environment}
    done = subprocess.run(
        [python, *arguments], cwd=folder, env=own, input="first\nsecond\n", capture_output=True, text=True, timeout=60
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("case", CASES)
def test_it_does_what_the_interpreter_does(tmp_path, case):
    text = "import os, sys\nprint(__name__, __file__, sys.argv, sys.path[:3], os.environ['GIVEN'], os.getcwd())\n"
    (tmp_path / "script.py").write_text(text + "if 'fail' in sys.argv:\n    raise ValueError('on purpose')\n")
    (tmp_path / "module.py").write_text(text)
    assert ended(warm.python(), CASES[case], tmp_path) == ended(sys.executable, CASES[case], tmp_path)


def test_it_has_imported_torch_already_and_nothing_of_this_package_nor_megatron(tmp_path):
    ours = "[name for name in sys.modules if name.split('.')[0] in ('mindspeed_mem', 'megatron', 'tests')]"
    code = f"import sys; print('torch' in sys.modules, {ours})"
    assert ended(warm.python(), ["-c", code], tmp_path)[1] == "True []\n"
    assert ended(warm.python(), ["-c", code], tmp_path, OMP_NUM_THREADS="2")[1] == "False []\n"  # read at the start


def test_none_draws_what_another_does(tmp_path):
    draw = "import random, numpy, torch; print(random.random(), numpy.random.rand(), torch.rand(1).item(), sep='\\n')"
    runs = [ended(warm.python(), ["-c", draw], tmp_path)[1].split() for _ in range(2)]
    assert all(one != other for one, other in zip(*runs, strict=True))


def test_signals_reach_it_and_it_goes_with_its_client(tmp_path):
    wait = "import os, signal, time\nsignal.signal(signal.SIGUSR1, lambda *_: os.write(1, b'caught\\n'))\n"
    wait += "os.write(1, b'%d\\n' % os.getpid())\nwhile True: time.sleep(0.01)\n"
    environment = {**os.environ, "TEST_JOB": uuid.uuid4().hex}
    job = subprocess.Popen([warm.python(), "-c", wait], stdout=subprocess.PIPE, text=True, env=environment)
    process = int(job.stdout.readline())
    with open(f"/proc/{process}/environ", "rb") as file:
        assert environment["TEST_JOB"].encode() in file.read()
    job.send_signal(signal.SIGUSR1)
    assert job.stdout.readline() == "caught\n"
    job.kill()
    assert job.wait() == -signal.SIGKILL and job.stdout.read() == ""  # which ends when nobody holds it any more
