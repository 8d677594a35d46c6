"""Other stores, for bench_storage.py: whichever of them are installed beside kvio."""
import os
import select
import shutil
import time

from contenders import CALL, PAGE, Contender, Missing, contender, content, pages


@contender
class NixlNap(Contender):
    """NIXL's POSIX plug-in over io_uring, with naps of 100 us between looks (its API cannot
    wait)."""

    def setup(self):
        os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
        try:
            from nixl_cu12._api import nixl_agent, nixl_agent_config
        except ImportError as missing:
            raise Missing(f"nixl-cu12: {missing}") from None
        setting = self.setting
        self.rows = pages(setting.depth, setting.nbytes)
        self.base = self.rows.ctypes.data
        self.agent = nixl_agent(f"bench{os.getpid()}", nixl_agent_config(backends=[]))
        self.agent.create_backend("POSIX", {"use_uring": "true"})
        self.fd = os.open(setting.segment, setting.flags)
        end = setting.start + setting.num_blocks * setting.nbytes
        self.agent.register_memory([(self.base, self.rows.nbytes, 0, "")], "DRAM",
                                   backends=["POSIX"])
        self.agent.register_memory([(0, end, self.fd, "")], "FILE", backends=["POSIX"])

    def move(self, ids):
        agent, nbytes, start = self.agent, self.setting.nbytes, self.setting.start
        for at in range(0, len(ids), len(self.rows)):
            some = ids[at:at + len(self.rows)].tolist()
            local = agent.get_xfer_descs([(self.base + slot * nbytes, nbytes, 0)
                                          for slot in range(len(some))], "DRAM")
            remote = agent.get_xfer_descs([(start + number * nbytes, nbytes, self.fd)
                                           for number in some], "FILE")
            handle = agent.initialize_xfer("READ", local, remote, agent.name)
            state = agent.transfer(handle)
            while state == "PROC":
                time.sleep(1e-4)
                state = agent.check_xfer_state(handle)
            assert state == "DONE", state
            agent.release_xfer_handle(handle)
        self.last = some

    def held(self):
        return list(zip(self.rows, self.last))


@contender
class LmcacheRaw(Contender):
    """LMCache's raw block device (Rust, io_uring, fixed buffers)."""

    def setup(self):
        try:
            import lmcache_rust_raw_block_io as raw
        except ImportError as missing:
            raise Missing(f"lmcache-rust-raw-block-io: {missing}") from None
        setting = self.setting
        self.rows = pages(setting.depth, setting.nbytes)
        self.device = raw.RawBlockDevice(
            setting.segment, True, use_odirect=setting.direct, alignment=PAGE,
            io_engine="io_uring", iouring_queue_depth=max(8, setting.depth))
        self.device.register_fixed_buffers([self.rows.ctypes.data], [self.rows.nbytes])
        self.views = [memoryview(row) for row in self.rows]

    def move(self, ids):
        device, nbytes, start = self.device, self.setting.nbytes, self.setting.start
        for at in range(0, len(ids), len(self.views)):
            some = ids[at:at + len(self.views)].tolist()
            handle = device.batched_read([start + number * nbytes for number in some],
                                         self.views[:len(some)], [nbytes] * len(some))
            fine, error = device.wait_iouring(handle)
            assert all(fine), error
        self.last = some

    def held(self):
        return list(zip(self.rows, self.last))

    def close(self):
        self.device.close()


@contender
class LmcacheFs(Contender):
    """LMCache's fs_native (C++, four threads, one file a block), into as much memory as kvio's."""

    def setup(self):
        os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")
        try:
            import torch                # noqa: F401  it brings libraries that the next one needs
            from lmcache.lmcache_fs import LMCacheFSClient
        except ImportError as missing:
            raise Missing(f"lmcache: {missing}") from None
        setting = self.setting
        self.rows = pages(2 * CALL // setting.nbytes, setting.nbytes)
        self.views = [memoryview(row) for row in self.rows]
        self.folder = os.path.join(setting.folder, f"lmcache-{os.getpid()}")
        os.makedirs(self.folder)
        for number in range(setting.num_blocks):
            path = os.path.join(self.folder, f"m@0x00000000@0@{number:08x}.data")
            content(setting.nbytes, number, 1).tofile(path)
        self.client = LMCacheFSClient(self.folder, 4, "", setting.direct, 0)

    def move(self, ids):
        client, event, depth = self.client, self.client.event_fd(), self.setting.depth
        self.last = {}
        for at in range(0, len(ids), depth):
            some = ids[at:at + depth].tolist()
            slots = [slot % len(self.views) for slot in range(at, at + len(some))]
            client.submit_batch_get([f"m@00000000@0@{number:08x}" for number in some],
                                    [self.views[slot] for slot in slots])
            self.last.update(zip(slots, some))
            done = []
            while not done:
                select.select([event], [], [])
                done = client.drain_completions()
            assert done[0][1], done

    def held(self):
        return [(self.rows[slot], number) for slot, number in self.last.items()]

    def close(self):
        self.client.close()
        shutil.rmtree(self.folder, ignore_errors=True)
