# Sourced by the scripts in lab/tests, which run as root in the guest.
set -euo pipefail

# Runs a command until it succeeds: under emulation a server needs seconds before it listens, and nothing tells when.
retry() {
  local tries=0
  until "$@"; do
    tries=$((tries + 1))
    [ $tries -lt 20 ] || { echo "gave up after $tries tries: $*"; return 1; }
    sleep 0.5
  done
}

# rxe0 on v1 (10.9.0.1, fd09::1) in the first namespace, the only one where rxe lives; v2 (10.9.0.2, fd09::2) in the
# namespace n2, for our peer. An MTU of 4200 gives a path MTU of 4096.
setup_rxe() {
  [ ! -e /sys/class/infiniband/rxe0 ] || return 0
  modprobe -a veth rdma_rxe ib_uverbs rdma_ucm
  ip netns add n2
  ip link add v1 type veth peer name v2 netns n2
  ip addr add 10.9.0.1/24 dev v1
  ip addr add fd09::1/64 dev v1 nodad
  ip link set v1 mtu 4200 up
  ip -n n2 addr add 10.9.0.2/24 dev v2
  ip -n n2 addr add fd09::2/64 dev v2 nodad
  ip -n n2 link set v2 mtu 4200 up
  ip -n n2 link set lo up
  rdma link add rxe0 type rxe netdev v1
  retry grep -q ACTIVE /sys/class/infiniband/rxe0/ports/1/state
}

in_n2() { ip netns exec n2 "$@"; }

# A counter of rxe0, by its name under hw_counters.
counter() { cat "/sys/class/infiniband/rxe0/ports/1/hw_counters/$1"; }

skip() { echo "skipped: $*"; exit 77; }
