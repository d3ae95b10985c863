"""The warm interpreter as a program: asks the server for a fork, and is then what stands for it (`tests.warm`)."""

import array
import json
import os
import signal
import socket
import sys
import time

ADDRESS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "socket")
PASSED_ON = [signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2]
STARTS = 60  # seconds that the server has for its imports


def plain():
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])


def understood(arguments):
    for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep):
        if os.path.exists(os.path.join(folder, "sitecustomize.py")):
            return False
    for number, argument in enumerate(arguments):
        if argument in ("-m", "-c"):  # processes of multiprocessing inherit more than three streams
            return number + 1 < len(arguments) and "from multiprocessing" not in arguments[number + 1]
        if not argument.startswith("-"):
            return os.path.isfile(argument)
        if argument not in ("-u", "-W", "ignore"):
            return False
    return False


def connected():
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    end = time.monotonic() + STARTS
    while True:
        try:
            server.connect(ADDRESS)
            return server
        except OSError:
            if time.monotonic() > end or not os.path.isdir(os.path.dirname(ADDRESS)):
                plain()
            time.sleep(0.05)


def main():
    if not understood(sys.argv[1:]):
        plain()
    mask = os.umask(0)
    os.umask(mask)
    wanted = {"arguments": sys.argv[1:], "environment": dict(os.environ), "folder": os.getcwd(), "mask": mask}
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)  # until it is known to whom they go
    server = connected()
    socket_level = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))
    server.sendmsg([b"{"], [socket_level])
    server.sendall(json.dumps(wanted).encode()[1:])
    server.shutdown(socket.SHUT_WR)
    answer = server.makefile()
    process = int(answer.readline() or 0)
    if not process:
        plain()
    for one in PASSED_ON:
        signal.signal(one, lambda number, _: os.kill(process, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    status = int(answer.readline() or -signal.SIGKILL)
    if status < 0:
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


main()
