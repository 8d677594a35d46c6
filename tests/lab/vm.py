"""A guest with a disk and a serial line to talk over, whose power can be cut: for soak_power."""
import contextlib
import ctypes
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import time

from lab import kernel
from lab.kernel import LabMissing

MODULES = ["virtio_pci", "virtio_blk", "crc32c_generic", "ext4"]
_INIT = """{command}
echo "the command ended with $?"
bb poweroff -f
"""


def missing() -> str | None:
    """Why this guest cannot be run here, or None."""
    return kernel.missing("mkfs.ext4")


def initramfs(tree: str, files, command: str) -> bytes:
    """An initramfs with these files of the host, which runs `command` (shell text) when it is up.
    Its /data is empty."""
    return kernel.initramfs(tree, MODULES, _INIT.format(command=command), files=files,
                            folders=["data"])


def libraries(paths) -> set:
    """Shared libraries, and the loader, that these executables and libraries need."""
    found = set()
    for path in paths:
        text = subprocess.run(["ldd", path], capture_output=True, text=True).stdout
        found |= set(re.findall(r"(/[^\s()]+)", text))
    return {path for path in found if os.path.exists(path)}


# ---- the guest ----

class Guest:
    """A running guest. Lines from its /dev/ttyS1 come from `line`, `tell` writes to it. `state`: a
    file that `save` wrote; the guest goes on from there, with the disk as it is now."""

    def __init__(self, tree, initrd, *, disk: str, folder: str, mem_mib=512, state=None):
        self.console = os.path.join(folder, "console")
        line, self._control = os.path.join(folder, "line"), os.path.join(folder, "control")
        for path in (line, self._control):
            if os.path.exists(path):
                os.unlink(path)
        arguments = [
            *kernel.MACHINE, "-smp", "1", "-m", str(mem_mib), "-kernel", f"{tree}/vmlinux",
            "-initrd", initrd, "-append", kernel.append() + " 8250.nr_uarts=2",
            "-serial", f"file:{self.console}",
            "-chardev", f"socket,id=line,path={line},server=on,wait=off", "-serial", "chardev:line",
            "-drive", f"driver=nbd,server.type=unix,server.path={disk},cache.direct=on,"
            "if=none,id=disk", "-device", "virtio-blk-pci,drive=disk,write-cache=on",
            "-qmp", f"unix:{self._control},server=on,wait=off"]
        if state:
            arguments += ["-incoming", f"exec:cat {shlex.quote(state)}"]
        self.process = subprocess.Popen(
            arguments, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE,
            preexec_fn=lambda: ctypes.CDLL(None).prctl(1, signal.SIGKILL))      # dies with us
        self._socket, self._rest = None, b""
        try:
            self._socket = self._connect(line)
            if state:
                self._wait_running()
        except BaseException:
            self.kill()
            raise

    def _connect(self, path):
        """QEMU makes its sockets one after the other."""
        until = time.monotonic() + 60
        while True:
            one = socket.socket(socket.AF_UNIX)
            try:
                one.connect(path)
                return one
            except OSError:
                one.close()
                if self.process.poll() is not None or time.monotonic() > until:
                    raise LabMissing("QEMU did not start: " + self.problem()) from None
                time.sleep(0.01)

    def line(self, timeout_s: float) -> str | None:
        """The next line; None if there is none in time, EOFError when the guest has ended."""
        until = time.monotonic() + timeout_s
        while b"\n" not in self._rest:
            self._socket.settimeout(max(0.001, until - time.monotonic()))
            try:
                more = self._socket.recv(1 << 16)
            except TimeoutError:
                return None
            except ConnectionError:
                more = b""
            if not more:
                raise EOFError
            self._rest += more
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode(errors="replace").strip()

    def tell(self, line: str) -> None:
        """One line to the guest."""
        self._socket.settimeout(30)
        self._socket.sendall(line.encode() + b"\n")

    @contextlib.contextmanager
    def _commands(self):
        """A function that sends QEMU a command and returns its answer."""
        with self._connect(self._control) as control:
            control.settimeout(120)
            with control.makefile("rw") as lines:
                def command(name, **arguments):
                    lines.write(json.dumps({"execute": name, "arguments": arguments}) + "\n")
                    lines.flush()
                    while True:
                        answer = json.loads(lines.readline())
                        if "error" in answer:
                            raise LabMissing(f"{name}: {answer['error']['desc']}")
                        if "return" in answer:
                            return answer["return"]
                command("qmp_capabilities")
                yield command

    def _wait_running(self):
        """What is written to the serial line while the state is being loaded would be lost."""
        with self._commands() as command:
            while not command("query-status")["running"]:
                time.sleep(0.02)

    def save(self, path: str) -> None:
        """The guest's state goes to a file, and the guest ends."""
        with self._commands() as command:
            command("migrate-set-parameters", **{"max-bandwidth": 1 << 33})
            command("migrate", uri=f"exec:cat > {shlex.quote(path)}")
            while (state := command("query-migrate").get("status")) != "completed":
                if state == "failed":
                    raise LabMissing("QEMU cannot save the guest's state")
                time.sleep(0.05)
        self.close()

    def kill(self) -> None:
        """SIGKILL: the guest's memory is gone."""
        self.process.kill()
        self.process.wait()

    def problem(self) -> str:
        """QEMU's complaints and the end of the console, once the guest has ended."""
        errors = self.process.stderr.read().decode(errors="replace") if \
            self.process.poll() is not None else ""
        with open(self.console, errors="replace") as file:
            return errors + file.read()[-3000:]

    def close(self) -> None:
        self.kill()
        self._socket.close()
        self.process.stderr.close()
