"""The process that programs are forked from (`tests.warm`); its argument is the socket where it listens."""

import array
import contextlib
import ctypes
import gc
import importlib
import io
import json
import os
import runpy
import select
import signal
import socket
import sys
import types
import warnings

PRELOADED = """numpy scipy.optimize yaml wrapt setuptools torch torch._dynamo torch._inductor.compile_fx
torch.distributed.checkpoint torch.distributed.launcher.api torch.distributed.tensor.experimental
torch.utils.cpp_extension""".split()
READ_AT_START = """LD_ OMP_ MKL_ PYTHON TORCH_ TORCHDYNAMO TORCHINDUCTOR PYTORCH_ TRITON_ LANG LC_""".split()
"""Beginnings of variables that the interpreter and torch read once: with other values than here a fork would not do."""
READ_LATER = {"PYTHON", "PYTHONPATH", "PYTHON_EXEC", "PYTHONWARNINGS", "TORCH_NCCL_ASYNC_ERROR_HANDLING"}
MARK = "TEST_JOB"
"""The variable by which tests find what a job has left running (`tests.examples.jobs`), of that many bytes:"""
LENGTH = 32


def serve(address: str) -> dict | None:
    """Forks until standard input ends; returns in each fork, with what it is to run."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listening.bind(address)
    listening.listen(100)
    poll = select.poll()
    poll.register(0, select.POLLIN)
    poll.register(listening, select.POLLIN)
    programs: dict[int, tuple[int, int, socket.socket]] = {}  # by both descriptors: process, its own, the client's
    while True:
        for descriptor, _ in poll.poll()[:1]:  # one, as what it leads to may give its number to another
            if descriptor == 0:
                return None
            if descriptor == listening.fileno():
                client, _ = listening.accept()
                wanted, streams = _received(client)
                if _read_at_start(wanted["environment"]) != AT_START:
                    process = 0
                elif not (process := os.fork()):
                    for one in (listening, client, *{program[2] for program in programs.values()}):
                        one.close()
                    for one in {program[1] for program in programs.values()}:
                        os.close(one)
                    _take(wanted, streams)
                    return wanted
                for stream in streams:
                    os.close(stream)
                with contextlib.suppress(OSError):
                    client.sendall(b"%d\n" % process)
                if process:
                    own = os.pidfd_open(process)
                    programs[own] = programs[client.fileno()] = process, own, client
                    poll.register(own, select.POLLIN)
                    poll.register(client, 0)  # only that it hangs up: it has been killed
                else:
                    client.close()
            elif descriptor in programs:
                process, own, client = programs[descriptor]
                if descriptor != own:
                    os.kill(process, signal.SIGKILL)
                _, status = os.waitpid(process, 0)
                with contextlib.suppress(OSError):
                    client.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))
                for one in (own, client.fileno()):
                    poll.unregister(one)
                    del programs[one]
                os.close(own)
                client.close()


def _received(client: socket.socket) -> tuple[dict, list[int]]:
    descriptors = array.array("i")
    content, ancillary, *_ = client.recvmsg(1, socket.CMSG_SPACE(3 * descriptors.itemsize))
    for _, _, data in ancillary:
        descriptors.frombytes(data)
    with client.makefile("rb") as rest:
        return json.loads(content + rest.read()), list(descriptors)


def _take(wanted: dict, streams: list[int]) -> None:
    """Become the process that the client is."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    mark = wanted["environment"].get(MARK, "").encode()
    if len(mark) == LENGTH:  # in the block that /proc shows, which is as this process was started with it
        ctypes.memmove(BLOCK, mark, LENGTH)
    os.environ.clear()
    os.environ.update(wanted["environment"])
    sys.executable = os.environ.get("PYTHON_EXEC", sys.executable)  # torchrun's name for what it starts ranks with
    os.chdir(wanted["folder"])
    os.umask(wanted["mask"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.modules["numpy"].random.seed()  # as this process has seeded it; Python's own a fork seeds again
    sys.modules["torch"].default_generator.seed()
    unbuffered = "-u" in wanted["arguments"][:3]
    sys.stdin = sys.__stdin__ = open(0, closefd=False)
    for name, number in (("stdout", 1), ("stderr", 2)):
        raw = open(number, "wb", 0 if unbuffered else -1, closefd=False)
        errors = "backslashreplace" if name == "stderr" else "strict"
        lines = name == "stderr" or raw.isatty()
        text = io.TextIOWrapper(raw, errors=errors, line_buffering=lines, write_through=unbuffered)
        setattr(sys, name, text)
        setattr(sys, f"__{name}__", text)


def run(arguments: list[str]) -> None:
    """What the interpreter does with these."""
    arguments = list(arguments)
    filters = [one for one in os.environ.get("PYTHONWARNINGS", "").split(",") if one]
    while arguments[0] in ("-u", "-W"):
        if arguments.pop(0) == "-W":
            filters.append(arguments.pop(0))
    sys.warnoptions[:] = filters
    warnings._processoptions(filters)
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__builtins__ = __builtins__
    first = os.path.dirname(os.path.realpath(arguments[0]))
    if arguments[0] in ("-m", "-c"):
        first = os.getcwd() if arguments[0] == "-m" else ""
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = [first, *filter(None, given), *PATH]
    try:
        if arguments[0] == "-m":
            sys.argv[:] = arguments[1:]
            runpy._run_module_as_main(arguments[1])  # what the interpreter calls
        elif arguments[0] == "-c":
            sys.argv[:] = ["-c", *arguments[2:]]
            exec(compile(arguments[1], "<string>", "exec"), main.__dict__)
        else:
            sys.argv[:] = arguments
            main.__file__ = os.path.abspath(arguments[0])
            with io.open_code(main.__file__) as file:
                code = compile(file.read(), main.__file__, "exec")
            exec(code, main.__dict__)
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:
        sys.excepthook(type(error), error.with_traceback(error.__traceback__.tb_next), error.__traceback__)
        sys.exit(1)


def _read_at_start(environment: dict) -> dict:
    chosen = (name for name in environment if name.startswith(tuple(READ_AT_START)) and name not in READ_LATER)
    return {name: environment[name] for name in chosen if not name.startswith("TORCHELASTIC")}


if __name__ == "__main__":
    if MARK not in os.environ:
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | {MARK: "-" * LENGTH})
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_void_p
    BLOCK = getenv(MARK.encode())
    del os.environ[MARK]
    AT_START = _read_at_start(dict(os.environ))
    sys.path.pop(0)  # this folder
    PATH = list(sys.path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for module in PRELOADED:
            with contextlib.suppress(ModuleNotFoundError):  # without the extras
                importlib.import_module(module)
    gc.freeze()
    if program := serve(sys.argv[1]):
        run(program["arguments"])
