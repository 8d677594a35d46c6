"""The NIC's part of a connection to another process: queue pairs and the far table in the making
(`Link`), and what users get of them (`RemotePeer`)."""
import errno
import os
import random
import threading
import time

from kvio.errors import Busy, Closed, InvalidArgument, TransferError
from kvio.transfer import handshake
from kvio.transfer.carrier import Carrier
from kvio.transfer.classes import MAX_NAME
from kvio.transfer.frames import broken
from kvio.transfer.peer import Peer, queue_pairs

STUCK_S = 5.0                   # how long reset waits for an answer
PATIENCE_S = 2.0                # for both ends resetting at once, and for flushes to drain


def carrier_of(nic) -> Carrier:
    """What the NIC's provider adds to the handshake; one for each connection."""
    if nic.provider == "soft":
        from kvio.transfer.shared import SharedCarrier
        return SharedCarrier(nic)
    return Carrier(nic)


class Link:
    """What `handshake.initiate` and `respond` need of a NIC."""

    def __init__(self, nic, epoch):
        self.nic, self.epoch, self.carrier = nic, epoch, carrier_of(nic)
        self.num_rails = len(nic._ext.info()["rails"])
        self.far, self.qps, self.classes, self.theirs = None, {}, (), None
        self.far_settings = {}

    def offer(self) -> tuple[dict, list]:
        data, fds = self.carrier.offer()
        name = "".join(c if c.isprintable() else "?" for c in self.nic.name[:MAX_NAME])
        return {"name": name or "?", "mtu": self.nic.mtu,
                "rails": self.num_rails, "epoch": self.epoch, "carrier": data}, fds

    def attach(self, classes, theirs: dict, fds) -> None:
        """The other end's offer is here: its far table and our queue pairs."""
        if bool(theirs["rails"]) != bool(self.num_rails):
            for fd in fds:
                os.close(fd)
            raise InvalidArgument("one end is a soft NIC and the other is not: they share no "
                                  "network")
        self.theirs, self.classes = theirs, classes
        self.far = self.carrier.attach(theirs["rails"], theirs["carrier"], fds)
        try:
            queue_pairs(self.nic, theirs["name"], classes, self.far, self.qps)
        except OSError as failed:
            raise TransferError(failed.errno, f"NIC {self.nic.name} has no queue pair for each of "
                                f"{len(classes)} classes ({failed.strerror}); ask for fewer") \
                from None

    def endpoints(self) -> dict:
        return {name: qp.endpoints() for name, qp in self.qps.items()}

    def connect(self, endpoints: dict) -> None:
        for name, qp in self.qps.items():
            qp.connect_endpoints(endpoints[name])

    def readback(self) -> dict:
        """What the device says that our queue pairs are set to."""
        state = {name: qp.query() for name, qp in self.qps.items()}
        return {name: (each["sl"], each["tclass"], each["mtu"]) for name, each in state.items()}

    def check_readback(self, theirs: dict) -> None:
        """The other end's queue pairs are set to this. An MTU that differs loses packets."""
        self.far_settings = theirs
        for name, (_, _, mtu) in self.readback().items() if self.num_rails else ():
            if mtu != theirs[name][2]:
                raise TransferError(errno.EPROTO, f"class {name}: the MTU is {mtu} here and "
                                    f"{theirs[name][2]} there; open both NICs with the same mtu=")

    def dishonoured(self) -> list:
        """Classes that a device does not set as asked, in words."""
        ours, found = self.readback(), []
        for c in self.classes:
            for whose, (sl, tclass, _) in ((self.nic.name, ours[c.name]),
                                           (self.theirs["name"], self.far_settings[c.name])):
                if (sl, tclass) != (c.sl, c.tclass):
                    found.append(f"NIC {whose} does not honour class {c.name}: asked for sl "
                                 f"{c.sl} and tclass {c.tclass}, it reads back {sl} and {tclass}")
        return found

    def abandon(self) -> None:
        """The handshake failed. Nothing was posted."""
        for qp in self.qps.values():
            qp.close()
        self.qps.clear()
        far, self.far = self.far, None
        if far is not None:
            self.carrier.detach(far)


class RemotePeer(Peer):
    """The connection to a NIC of another process. `_other` is the control connection."""

    def __init__(self, link: Link, connection):
        """Made by the handshake."""
        super().__init__(link.nic, link.theirs["name"], link.classes, link.qps)
        self.carrier, self.far, self._other = link.carrier, link.far, connection
        self.remote_epoch, self._far_settings = link.theirs["epoch"], link.far_settings
        self.dishonoured = tuple(link.dishonoured())
        self.gone = None                        # why the other end is not there any more
        self._dying = {}                        # queue pairs that flush
        self._lock = threading.Lock()           # of the end
        self._resetting = threading.Lock()

    # ---- looking

    def _closed(self):
        if self.gone is None:
            return Closed(f"the peer {self.remote_name} of {self.nic.name} is closed")
        return Closed(f"the peer {self.remote_name} of {self.nic.name} has gone ({self.gone}); "
                      "connect again")

    def _check_open(self):
        self.nic._check_open()
        if not self._qps:
            raise self._closed()

    def _explain(self, wrong, *posted):
        if not self._qps and not self.nic._ext.closed:
            return self._closed()
        return super()._explain(wrong, *posted)

    def query(self) -> dict:
        """As of any peer; `remote_sl` and `remote_tclass` are what the other end's device said
        when it connected."""
        found = super().query()
        for name, each in found.items():
            each["remote_sl"], each["remote_tclass"], _ = self._far_settings[name]
        return found

    # ---- reset

    def reset(self) -> None:
        """Bring queue pairs that are in error back to work, on both ends. Busy while something
        is in flight on either; TransferError (ETIMEDOUT) if the other end does not answer."""
        until = time.monotonic() + PATIENCE_S
        while not self._try_reset():
            if time.monotonic() > until:
                raise Busy(f"{self.remote_name} is being reset from both ends; try again")
            time.sleep(random.uniform(0.001, 0.02))     # at random: else both ask at once again

    def _try_reset(self) -> bool:
        """False: the other end is at it too."""
        with self._resetting:
            self._check_open()
            failed = self._failed()
            self._check_idle("reset", failed)
            answer = self._ask({"look": failed}, lambda answer: "failed" in answer)
            if "collision" in answer:
                return False
            names = [name for name in self._qps if name in (*failed, *answer["failed"])]
            self._check_idle("reset", names)
            if not names:
                return True
            answer = self._ask({"join": handshake.as_hex(self._fresh(names))},
                               lambda answer: answer.get("endpoints", {}).keys() == set(names))
            if "collision" in answer:
                return False
            for name, raw in handshake.endpoints_of(answer, names).items():
                self._connect(name, raw)
            return True

    def _ask(self, body, fits) -> dict:
        """What the other end answers: a collision, or what `fits`. Busy, Closed."""
        connection = self._other
        try:
            answer = connection.control.ask(lambda waiter: connection.request(body, fits, waiter),
                                            STUCK_S)
        except Closed:
            raise self._closed() from None
        if answer is None:
            raise TransferError(errno.ETIMEDOUT, f"{self.remote_name} has not answered for "
                                f"{STUCK_S:g} s: its process is stopped or its host is away")
        if "busy" in answer.result:
            raise Busy(f"{self.remote_name}: transfers of the other end are in flight; wait for "
                       "them, then reset")
        if "closed" in answer.result:
            raise self._closed()
        return answer.result

    def _failed(self):
        return [name for name, qp in self._qps.items() if qp.query()["state"] != "ready"]

    def _fresh(self, names) -> dict:
        """Reset; new endpoints."""
        try:
            for name in names:
                self._qps[name].fail()
                self._qps[name].reset()
            return {name: self._qps[name].endpoints() for name in names}
        except OSError as failed:
            if failed.errno != errno.EBUSY:
                raise TransferError(failed.errno, f"cannot reset {self.remote_name}") from None
            raise Busy(f"{self.remote_name}: transfers are in flight; wait for them or cancel "
                       "them, then reset") from None
        except (ValueError, KeyError):
            raise self._closed() from None

    def _connect(self, name, raw):
        try:
            self._qps[name].connect_endpoints(raw)
        except (OSError, ValueError, KeyError) as failed:
            if not self._qps:
                raise self._closed() from None
            raise TransferError(getattr(failed, "errno", None) or errno.EPROTO,
                                f"cannot connect to {self.remote_name} again: {failed}") from None

    def on_reset(self, body) -> dict:
        """The other end resets: our half, in the control thread; what ANSWER says."""
        if not self._resetting.acquire(blocking=False):
            return {"collision": True}
        try:
            if "look" in body:
                names = [name for name in self._qps if name in (*body["look"], *self._failed())]
                return {"busy": True} if self._busy(names) else {"failed": names}
            theirs = body["join"]
            names = [name for name in self._qps if name in theirs]
            if len(names) != len(theirs):
                raise broken("endpoints of classes that are not there")
            if self._busy(names):
                return {"busy": True}
            ours = self._fresh(names)
            for name, raw in theirs.items():
                self._connect(name, raw)
            return {"endpoints": handshake.as_hex(ours)}
        except Busy:
            return {"busy": True}
        finally:
            self._resetting.release()

    def _busy(self, names):
        self.nic._ext.drive()
        return [name for name in names if self._qps[name].query()["in_flight"]]

    # ---- the end

    def close(self) -> None:
        """Give the queue pairs back and say goodbye. Busy while one of our transfers is in
        flight; the other end's transfers fail."""
        with self._lock:
            if not self._qps:
                return
            if not self.nic._ext.closed:
                self._check_idle("close")
            try:
                for name in list(self._qps):
                    self._qps[name].close()
                    del self._qps[name]
            except OSError:
                raise Busy(f"{self.remote_name}: somebody is posting; close later") from None
        control = self._other.control
        try:
            control.ask(lambda waiter: self._other.part("", waiter), 2 * STUCK_S)
        except Closed:                          # the NIC's thread has ended
            self.tick()

    def lose(self, wrong) -> None:
        """The control connection is over, in its thread. What is in flight flushes."""
        with self._lock:
            if self._qps:
                self.gone = getattr(wrong, "strerror", None) or str(wrong)
            self._dying, self._qps = self._qps, {}
        if self.far is not None and not self.nic._ext.closed:
            self.carrier.lost(self.far)
        for qp in self._dying.values():
            qp.gone = "the peer has gone: connect again"
            try:
                qp.fail()
            except (OSError, ValueError):
                pass                            # the NIC is closed, or the device is dead
        if self.listener is not None and self in self.listener._accepted:
            self.listener._accepted.remove(self)
        if not self.tick():
            self._other.control.restless.add(self)

    def tick(self) -> bool:
        """Give back what has drained. True: that was all."""
        try:
            for name in list(self._dying):
                self._dying[name].close()
                del self._dying[name]
            if self.far is not None:
                self.carrier.detach(self.far)
        except OSError:
            return False
        self.far = None
        self.nic._peers.discard(self)
        return True

    def _disown(self):
        self._lock, self._resetting = threading.Lock(), threading.Lock()
        return super()._disown()

    def _forget(self):
        """The NIC is closed, and the queue pairs with it."""
        self._qps = {}
        self.tick()
