# Sourced by the scripts in lab/tests, which run as root in the guest. Status 77 means that a test was skipped.
set -euo pipefail

skip() { echo "skipped: $*"; exit 77; }

# Runs a command until it succeeds: for servers that do not report when they listen, and that need seconds under emulation.
retry() {
  local tries=0
  until "$@"; do
    tries=$((tries + 1))
    [ $tries -lt 40 ] || { echo "gave up after $tries tries: $*"; return 1; }
    sleep 0.5
  done
}

# Waits until so many more writes of a disk are done.
wait_for_writes() { # DISK NUMBER
  local stat=/sys/class/block/${1##*/}/stat before
  before=$(awk '{ print $5 }' "$stat")
  has_written() { [ "$(awk '{ print $5 }' "$stat")" -gt $((before + $1)) ]; }
  retry has_written "$2"
}

# Ends the script if a command succeeds: `! COMMAND` does not, since `set -e` leaves it out.
fails() {
  if "$@"; then
    echo "it succeeds: $*"
    return 1
  fi
}

# Starts a program in the background and returns when it has printed a line with the given word.
#   start NAME WORD COMMAND...     finish NAME: its exit status, once it has ended, and its output
declare -A started
start() {
  local name=$1 word=$2
  shift 2
  "$@" >"/run/$name.log" 2>&1 & started[$name]=$!
  until grep -q "$word" "/run/$name.log"; do
    kill -0 "${started[$name]}" 2>/dev/null || { echo "$name ended:"; cat "/run/$name.log"; return 1; }
    sleep 0.1
  done
}
finish() {
  local status=0
  wait "${started[$1]}" || status=$?
  sed "s/^/$1: /" "/run/$1.log"
  return $status
}

# A test that fails ends its programs and its losses: the tests after it need the ports, and a link that loses nothing.
clean_up() {
  # A program in n2 is the child of a job.
  kill -KILL $(jobs -p) $(ip netns pids n2 2>/dev/null) 2>/dev/null || true
  wait
  # Each of its steps, also if another one fails.
  [ ! -e /sys/class/net/ifb1 ] || lose_nothing || true
}
trap '[ $? = 0 ] || clean_up' EXIT

# v1 (10.9.0.1, fd09::1) in the first namespace and v2 (10.9.0.2, fd09::2) in the namespace n2. An MTU of 4200 gives a path
# MTU of 4096.
setup_net() {
  [ ! -e /sys/class/net/v1 ] || return 0
  modprobe veth
  ip netns add n2
  ip link add v1 type veth peer name v2 netns n2
  ip addr add 10.9.0.1/24 dev v1
  ip addr add fd09::1/64 dev v1 nodad
  ip link set v1 mtu 4200 up
  ip -n n2 addr add 10.9.0.2/24 dev v2
  ip -n n2 addr add fd09::2/64 dev v2 nodad
  ip -n n2 link set v2 mtu 4200 up
  ip -n n2 link set lo up
  # On veth ARP is answered while it is asked, and the kernel's rdma_resolve_addr, which looks for the answer a moment later,
  # misses it and waits for its time to be over.
  local mac
  mac=$(in_n2 cat /sys/class/net/v2/address)
  ip neigh replace 10.9.0.2 lladdr "$mac" nud permanent dev v1
  ip neigh replace fd09::2 lladdr "$mac" nud permanent dev v1
  # Of the addresses for multicast only IPv6's have a route of their own.
  ip route add 239.9.0.0/16 dev v1
  ip -n n2 route add 239.9.0.0/16 dev v2
}

# rxe0 on v1: the kernel has rxe in the first namespace only, so our peer is the one in n2.
setup_rxe() {
  setup_net
  [ ! -e /sys/class/infiniband/rxe0 ] || return 0
  modprobe -a rdma_rxe ib_uverbs rdma_ucm
  rdma link add rxe0 type rxe netdev v1
  retry grep -q ACTIVE /sys/class/infiniband/rxe0/ports/1/state
}

# The distribution's programs on rdmux's libraries, in the namespace n2: `ours PROGRAM...` after `setup_drop_in ADDRESS,...`, of the devices.
setup_drop_in() {
  [ -e /lab/libibverbs.so ] || skip "no libibverbs.so beside rdmux: cargo build --release -p rdmux-ibverbs"
  mkdir -p /run/drop-in
  [ -e /run/drop-in/libibverbs.so.1 ] || cp /lab/libibverbs.so /run/drop-in/libibverbs.so.1
  ln -sf libibverbs.so.1 /run/drop-in/librdmacm.so.1
  drop_in_devices=$1
}
ours() { in_n2 timeout -k 2 40 env LD_LIBRARY_PATH=/run/drop-in RDMUX_DEVICES="$drop_in_devices" "$@"; }

# Two NVDIMMs: ext4 at /mnt/pmem, where files in dax/ are reached directly and others are not, and the device $LAB_DAX.
setup_pmem() {
  LAB_DAX=/dev/dax1.0
  export LAB_DAX
  [ ! -e $LAB_DAX ] || return 0
  # The last two are no dependencies of the first.
  modprobe -a nfit nd_pmem dax_pmem device_dax ext4
  ndctl create-namespace -f -e namespace0.0 -m fsdax -M mem >/dev/null
  ndctl create-namespace -f -e namespace1.0 -m devdax -M mem >/dev/null
  # Blocks of a page each: smaller ones cannot be mapped.
  mkfs.ext4 -q -b 4096 /dev/pmem0
  mkdir /mnt/pmem
  mount -o dax=inode /dev/pmem0 /mnt/pmem
  mkdir /mnt/pmem/dax /mnt/pmem/plain
  chattr +x /mnt/pmem/dax
  retry test -c $LAB_DAX
}

# A key that serve, push and pull share.
make_key() {
  (umask 077; head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \n' >/run/key)
}

# Sets the MTU of the link, and waits until rxe's path MTU has followed.
#   set_mtu BYTES PATH_MTU
set_mtu() {
  ip link set v1 mtu "$1"
  ip -n n2 link set v2 mtu "$1"
  retry ibv_shows "active_mtu:[[:space:]]*$2 "
}
ibv_shows() { ibv_devinfo -d rxe0 | grep "$1" >/dev/null; }

in_n2() { ip netns exec n2 "$@"; }

# A counter of rxe0, by its name under hw_counters.
counter() { cat "/sys/class/infiniband/rxe0/ports/1/hw_counters/$1"; }

# Prints those of rxe0's counters that are not 0.
counters() { (cd /sys/class/infiniband/rxe0/ports/1/hw_counters; grep -H . * | sed -n 's/^\(.*\):\([1-9].*\)$/rxe0: \1 \2/p'); }

# Captures what crosses v1 to /lab/NAME.pcap, for the test rxe-packets. When tcpdump is told to end it leaves what it has not
# read yet, so it is told once the file has stopped growing.
capture() {
  captured=/lab/$1.pcap
  start tcpdump listening tcpdump -Z root -i v1 -U -B 32768 -s 0 -w "$captured" udp port 4791
}
capture_end() {
  local size=-1
  until [ $size = "$(stat -c %s "$captured")" ]; do
    size=$(stat -c %s "$captured")
    sleep 2
  done
  kill -INT "${started[tcpdump]}"
  finish tcpdump
  grep -q '^0 packets dropped' /run/tcpdump.log || { echo "the capture has gaps"; return 1; }
}

# The scenarios that rdmux has too: those for any link, and those for one that loses nothing.
common="send solicited not-ready write read atomics atomic-write flush window-1 window-2 send-invalidate srq refusals
  wrong-invalidate uc-many ud-many cm-connect cm-reject cm-datagram"
whole="uc ud multicast"

# Runs scenarios between two peers: the first address answers, the second asks. At 10.9.0.2 and fd09::2 that is rdmux with its soft
# device, at 10.9.0.1 and fd09::1 the lab's own peer on rxe0, or with hw@ before the address rdmux with provider hw.
#   scenarios PORT ANSWERER ASKER [-l] [NAME...]
scenarios() {
  local port=$1 answerer=$2 asker=$3
  shift 3
  start answerer listening $(peer_at $answerer) answer ${answerer#hw@} $port
  $(peer_at $asker) ask ${answerer#hw@} $port ${asker#hw@} "$@"
  finish answerer
}
peer_at() {
  case $1 in
    hw@*) echo rdmux-lab-peer --provider hw ;;
    *2) echo in_n2 rdmux-lab-peer ;;
    *) echo lab-peer ;;
  esac
}

# Loses a share of the RoCEv2 packets over IPv4 in both directions, behind the point where tcpdump looks: what arrives at v1 and
# at v2 passes through a queue that drops at random, by seed. v2 splits its trains first, so that packets are lost and not trains.
#   lose PERCENT SEED [NETEM...]     with more for the queue to do
#   lost: says how many     lose_nothing: ends it
lose() {
  local percent=$1 seed=$2
  shift 2
  modprobe -a ifb sch_netem sch_ingress cls_flower act_mirred
  ip -n n2 link set v2 gso_max_segs 1
  lose_at 1 v1 loss "$percent%" seed "$seed" "$@"
  in_n2 bash -c "$(declare -f lose_at); lose_at 2 v2 loss $percent% seed $((seed + 1)) $*"
}
lose_at() {
  local ifb=ifb$1 link=$2
  shift 2
  ip link add "$ifb" type ifb
  ip link set "$ifb" up
  tc qdisc add dev "$ifb" root netem limit 100000 "$@"
  tc qdisc add dev "$link" ingress
  tc filter add dev "$link" ingress protocol ip flower ip_proto udp dst_port 4791 action mirred egress redirect dev "$ifb"
}
# Prints how many packets each direction lost, which must be some.
lost() {
  local from
  for from in 'ifb1' '-n n2 ifb2'; do
    set -- $from
    tc ${3:+$1 $2} -s qdisc show dev "${3:-$1}" | grep -o 'dropped [0-9]*' | tee /run/lost
    ! grep -q 'dropped 0' /run/lost
  done
}
lose_nothing() {
  ip link del ifb1
  ip -n n2 link del ifb2
  tc qdisc del dev v1 ingress
  tc -n n2 qdisc del dev v2 ingress
  ip -n n2 link set v2 gso_max_segs 65535
}
