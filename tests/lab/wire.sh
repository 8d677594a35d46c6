#!/bin/sh
# The lab's network, in its guest: two RDMA devices in one host and a cable between them.
#
#   wire.sh make         rxe0 (10.9.0.1) on w0, rxe1 (10.9.0.2) on w1
#   wire.sh cut DEVICE   its link goes down
#   wire.sh lose         packets reach nobody
#   wire.sh mend         all is well again
#   wire.sh class RATE   w0 and w1 send at RATE (24mbit), DSCP 46 (tclass 184) before all else
#   wire.sh plain RATE   w0 and w1 send at RATE, in the order of arrival
#   wire.sh free         as fast as they can
#
# rxe knows only the first network namespace, so both ends of the cable lie in it: what one end
# sends to the other's address is routed over the cable, and an address counts as local only for
# packets that arrive.
set -eu
A=10.9.0.1 B=10.9.0.2 MTU=4200		# of which rxe makes an RDMA MTU of 4096

routes() {		# the kernel drops them when a link goes down
	ip -batch - <<-E
	neigh replace $B lladdr 02:00:00:00:00:02 dev w0
	neigh replace $A lladdr 02:00:00:00:00:01 dev w1
	route replace $B dev w0 src $A table 101
	route replace $A dev w1 src $B table 102
	E
}

make() {
	for k in all default; do
		echo 1 >/proc/sys/net/ipv4/conf/$k/accept_local
		echo 0 >/proc/sys/net/ipv4/conf/$k/rp_filter
	done
	ip -batch - <<-E
	link set lo up
	link add w0 type veth peer name w1
	link set w0 address 02:00:00:00:00:01 mtu $MTU
	link set w1 address 02:00:00:00:00:02 mtu $MTU
	addr add $A/32 dev w0
	addr add $B/32 dev w1
	link set w0 up
	link set w1 up
	rule add pref 10 iif w0 lookup local
	rule add pref 11 iif w1 lookup local
	rule add pref 20 to $B from $A lookup 101
	rule add pref 21 to $A from $B lookup 102
	rule add pref 100 lookup local
	rule del pref 0
	E
	routes
	rdma link add rxe0 type rxe netdev w0
	rdma link add rxe1 type rxe netdev w1
}

free() {
	for d in w0 w1; do tc qdisc del dev $d root 2>/dev/null || true; done
}

plain() {		# with the burst it catches up when the host did not run us for 20 ms
	free
	for d in w0 w1; do
		tc qdisc add dev $d root handle 1: tbf rate "$1" burst 64k limit 4m
	done
}

class() {		# rxe leaves skb->priority alone, so the packets' DSCP has to be looked at
	plain "$1"
	for d in w0 w1; do
		tc qdisc add dev $d parent 1:1 handle 10: prio bands 3 \
			priomap 2 2 2 2 2 2 2 2 2 2 2 2 2 2 2 2
		tc filter add dev $d parent 10: protocol ip prio 1 \
			u32 match ip dsfield 0xb8 0xfc flowid 10:1
	done
}

case $1 in
make | free) "$1" ;;
class | plain) "$1" "$2" ;;
cut) ip link set "$2" down ;;
lose)
	ip neigh replace $B lladdr 02:00:00:00:00:ff dev w0
	ip neigh replace $A lladdr 02:00:00:00:00:ff dev w1
	;;
mend) ip link set w0 up; ip link set w1 up; routes ;;
*) echo "wire.sh: no command is called $1" >&2; exit 2 ;;
esac
