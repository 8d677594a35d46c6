"""The other end of a connection, on pyverbs (Debian's python3-pyverbs, under /usr/bin/python3).
What it says and hears: see peers.py.

    plain_pyverbs.py DEVICE TCLASS
"""
import sys

import pyverbs.enums as e
from pyverbs.addr import GID, AHAttr, GlobalRoute
from pyverbs.cq import CQ
from pyverbs.device import Context
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, SendWR

NBYTES = 1 << 20
ACCESS = e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_READ | e.IBV_ACCESS_REMOTE_WRITE


def main(device, tclass):
    context = Context(name=device)
    gids = [str(context.query_gid(1, index).gid) for index in range(2)]
    index = next(index for index, gid in enumerate(gids) if ":ffff:" in gid)    # of an IPv4 address
    pd, cq = PD(context), CQ(context, 16)
    qp = QP(pd, QPInitAttr(qp_type=e.IBV_QPT_RC, scq=cq, rcq=cq, cap=QPCap(16, 1, 1, 1)))
    mr = MR(pd, NBYTES, ACCESS)
    mr.write(bytes((i * 7 + i // 251) & 255 for i in range(65536)), 65536)
    print(qp.qp_num, 77, 1024, gids[index].replace(":", ""), mr.buf, mr.rkey, NBYTES, flush=True)
    qpn, psn, _, gid, addr, rkey, _ = sys.stdin.readline().split()
    gid = ":".join(gid[at:at + 4] for at in range(0, 32, 4))
    attr = QPAttr(port_num=1)
    attr.qp_access_flags = ACCESS
    attr.path_mtu, attr.dest_qp_num = e.IBV_MTU_1024, int(qpn)
    attr.rq_psn, attr.sq_psn = int(psn), 77
    attr.max_dest_rd_atomic, attr.max_rd_atomic, attr.min_rnr_timer = 4, 4, 12
    attr.timeout, attr.retry_cnt, attr.rnr_retry = 17, 7, 7
    attr.ah_attr = AHAttr(is_global=1, port_num=1, gr=GlobalRoute(
        dgid=GID(gid), sgid_index=index, hop_limit=64, traffic_class=int(tclass)))
    qp.to_rts(attr)
    print("ready", flush=True)
    for line in sys.stdin:
        word, *numbers = line.split()
        local, remote, length = [*map(int, numbers), 0][:3]
        if word == "show":
            print(mr.read(remote, local).hex(), flush=True)
            continue
        opcode = e.IBV_WR_RDMA_READ if word == "read" else e.IBV_WR_RDMA_WRITE
        wr = SendWR(opcode=opcode, num_sge=1, sg=[SGE(mr.buf + local, length, mr.lkey)])
        wr.set_wr_rdma(int(rkey), int(addr) + remote)
        qp.post_send(wr)
        count = 0
        while not count:
            count, completions = cq.poll()
        print(completions[0].status, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
