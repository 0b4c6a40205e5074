//! The programs that run and their arguments: a line each.

use std::net::Ipv4Addr;
use std::time::Duration;

/// The facts about this host that select programs.
pub(super) struct Host {
    pub(super) address: Ipv4Addr,
    pub(super) group: Ipv4Addr,
    /// All programs and options, and 1,000 rounds each.
    pub(super) long: bool,
    /// User 65534, as which other users appear in a user namespace.
    pub(super) nobody: bool,
    pub(super) mount_namespaces: bool,
    pub(super) network_namespaces: bool,
    pub(super) ucx: bool,
    /// `ucx_perftest` is built with MPI, which gives it its peer unless an option forbids that.
    pub(super) ucx_with_mpi: bool,
    pub(super) fio: bool,
    pub(super) libfabric: bool,
    /// `cmtime` is that of rdma-core 56 or later, which first meets by TCP.
    pub(super) cmtime_by_tcp: bool,
    /// The libraries of this host that make rsockets of ordinary sockets.
    pub(super) preloads: Vec<String>,
}

pub(super) struct Line {
    pub(super) name: String,
    pub(super) test: Test,
}

pub(super) enum Test {
    /// One program, which has to end well. The arguments are for `rdmux run`.
    Alone(&'static [&'static str], String),
    /// A command line of a shell, which has `rdmux run` and its device as arguments.
    Shell(&'static str),
    Exchange(Exchange),
    /// It cannot run, for the given reason.
    LeftOut(String),
}

/// A server and a client on devices of rdmux, each as a command line.
#[derive(Clone)]
pub(super) struct Exchange {
    pub(super) server: String,
    pub(super) client: String,
    /// Arguments for `rdmux run`.
    pub(super) run: &'static [&'static str],
    pub(super) environment: Vec<(&'static str, String)>,
    pub(super) place: Place,
    pub(super) ready: Ready,
    /// The server may never end by itself: it is ended after the client.
    pub(super) endless: bool,
    /// Both use the files by which programs name XRC domains.
    pub(super) xrc: bool,
    pub(super) limit: Duration,
    pub(super) judge: Judge,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    /// Both on this host, with a loopback address.
    Loopback,
    /// Both on one host with an Ethernet interface. libfabric takes no loopback interface.
    OneHost,
    /// A host each, with a link of Ethernet's MTU between them.
    TwoHosts,
    /// Both on the node of the loopback address.
    OneNode,
    /// On the nodes of two loopback addresses.
    TwoNodes,
}

/// The condition for starting the client.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Ready {
    /// The server listens at a TCP port that the run picks: [`PORT`] in the command lines.
    PickedPort,
    /// The server listens at this TCP port.
    Port(u16),
    /// None, because `/proc` does not show that the server listens at a port of rdma_cm: the client is started again while nobody listens.
    Unknown,
    /// The server has joined the multicast group; else like [`Ready::Unknown`].
    Joined,
}

impl Ready {
    /// Returns whether the client may find that nobody listens.
    pub(super) fn may_miss(self, place: Place) -> bool {
        match self {
            Self::PickedPort => false,
            Self::Port(_) => place != Place::OneHost && place != Place::TwoHosts,
            Self::Unknown | Self::Joined => true,
        }
    }
}

/// The condition for success besides the status of both programs.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Judge {
    Status,
    /// The file [`COPY`] is like [`BYTES`].
    Copied,
    /// Both have made a capture, each with what went through shared memory.
    Captured,
    /// ofi_rxm's thread closes the endpoint when the peer has: completions that the program has not taken until then are reported as flushed,
    /// after all rounds. That is no failure.
    MayBeFlushed(u32),
}

/// Stands for the port in a command line.
pub(super) const PORT: &str = "PORT";
/// Files in the folder where the programs run.
pub(super) const BYTES: &str = "./bytes";
pub(super) const COPY: &str = "./copy";

pub(super) const LIMIT: Duration = Duration::from_secs(180);
/// For all sizes from 2 bytes to 8 MiB.
const LONG_LIMIT: Duration = Duration::from_secs(600);

/// Returns why a line is left out with faults: these programs wait for ever, or stumble, whatever the device does.
pub(super) fn why_not_with_faults(name: &str) -> Option<&'static str> {
    let starts = |prefixes: &[&str]| prefixes.iter().any(|prefix| name.starts_with(prefix));
    let has = |word: &str, option: &str| {
        name.split_once(word)
            .is_some_and(|(_, rest)| rest.contains(option))
    };
    let unreliable = starts(&[
        "ibv_uc_pingpong",
        "ibv_ud_pingpong",
        "udaddy",
        "mckey",
        "fi_pingpong -p verbs -e dgram",
    ]);
    if name.starts_with("shared: ") || name == "rdmux run --shared" {
        return Some("a node injects no faults for its programs");
    }
    if unreliable || has("ib_send_", " -c UC") || has("ib_send_", " -c UD") || has("ib_write_lat", " -c UC") {
        Some("they wait for ever for a message that an unreliable service lost")
    } else if has("ib_send_lat", " -e") {
        Some("perftest takes whichever event comes first for that of its SEND")
    } else {
        None
    }
}

pub(super) fn table(host: &Host) -> Vec<Line> {
    let rounds = if host.long { 1000 } else { 100 };
    let mut table = Table {
        host,
        rounds,
        lines: Vec::new(),
    };
    table.run_options();
    table.pingpongs();
    table.perftest();
    table.rdma_cm();
    table.rsockets();
    table.system_folders();
    table.ucx();
    table.fio();
    table.hosts();
    table.nodes();
    for preload in &host.preloads {
        let with = format!("env LD_PRELOAD={preload}");
        let address = host.address;
        table.meet(
            &format!("{with} rstream -T s -T v -S 4096 -C {rounds}"),
            &format!("{with} rstream -s {address} -T s -T v -S 4096 -C {rounds}"),
        );
    }
    table.lines
}

struct Table<'a> {
    host: &'a Host,
    rounds: u32,
    lines: Vec<Line>,
}

impl Table<'_> {
    fn add(&mut self, name: &str, test: Test) {
        self.lines.push(Line {
            name: name.to_owned(),
            test,
        });
    }

    fn alone(&mut self, run: &'static [&'static str], program: &str) {
        self.add(program, Test::Alone(run, program.to_owned()));
    }

    fn left_out(&mut self, name: &str, why: &str) {
        self.add(name, Test::LeftOut(why.to_owned()));
    }

    /// One program as server and as client of itself, which takes a TCP port to listen at and a host to reach.
    fn pair(&self, program: &str) -> Exchange {
        let server = format!("{program} -p {PORT}");
        let client = format!("{server} {}", self.host.address);
        Exchange {
            ready: Ready::PickedPort,
            ..exchange(&server, &client)
        }
    }

    fn add_pair(&mut self, program: &str) {
        let pair = self.pair(program);
        self.add(program, Test::Exchange(pair));
    }

    /// A server and a client that meet by rdma_cm.
    fn meet(&mut self, server: &str, client: &str) {
        self.add_meet(exchange(server, client));
    }

    fn add_meet(&mut self, exchange: Exchange) {
        let name = format!("{} -- {}", exchange.server, exchange.client);
        self.add(&name, Test::Exchange(exchange));
    }

    fn run_options(&mut self) {
        self.alone(&[], "ibv_devices");
        self.alone(&[], "ibv_devinfo -v");
        self.add("rdmux run --shell", Test::Shell(SHELL));
        self.add("rdmux run --env", Test::Shell(ENVIRONMENT));
        self.add("rdmux run --sysfs none", Test::Shell(NO_SYSFS));
        let captured = Exchange {
            run: &["--capture", "./%p.pcapng"],
            judge: Judge::Captured,
            ..self.pair("ibv_rc_pingpong -g 0 -n 10 -s 64")
        };
        self.add("rdmux run --capture", Test::Exchange(captured));
    }

    fn pingpongs(&mut self) {
        let rounds = self.rounds;
        for kind in ["rc", "uc", "ud", "srq", "xsrq"] {
            for events in ["", " -e"] {
                let program = format!("ibv_{kind}_pingpong -g 0 -n {rounds}{events}");
                let pair = Exchange {
                    xrc: kind == "xsrq",
                    ..self.pair(&program)
                };
                self.add(&program, Test::Exchange(pair));
            }
        }
        // Completions with times.
        self.add_pair(&format!("ibv_rc_pingpong -g 0 -n {rounds} -t"));
    }

    /// Each program on each service that it has, with each option that it takes there: it refuses rdma_cm (-R) for UC and XRC, events (-e) for
    /// WRITE, and all sizes (-a) for atomics. The short selection has the options with RC alone, and not all sizes.
    fn perftest(&mut self) {
        let rounds = self.rounds;
        for what in ["write", "read", "send", "atomic"] {
            for how in ["lat", "bw"] {
                let services: &[&str] = match what {
                    "write" => &["RC", "UC", "XRC"],
                    "send" => &["RC", "UC", "UD", "XRC"],
                    _ => &["RC", "XRC"],
                };
                let mut options = vec!["", " --use_old_post_send"];
                if what != "write" {
                    options.push(" -e");
                }
                if what != "atomic" {
                    options.push(" -a");
                }
                if how == "bw" {
                    options.extend([" -q 8", " -t 16", " -b"]);
                }
                if what == "send" {
                    options.push(" --use-srq");
                }
                for service in services {
                    let on = match *service {
                        "RC" => String::new(),
                        other => format!(" -c {other}"),
                    };
                    let tool = format!("ib_{what}_{how} -n {rounds}{on}");
                    for option in &options {
                        let short = option.is_empty() || (*service == "RC" && *option != " -a");
                        if !short && !self.host.long {
                            continue;
                        }
                        let program = format!("{tool}{option}");
                        let limit = if *option == " -a" { LONG_LIMIT } else { LIMIT };
                        let pair = Exchange {
                            xrc: *service == "XRC",
                            limit,
                            ..self.pair(&program)
                        };
                        self.add(&program, Test::Exchange(pair));
                    }
                    if *service == "RC" || (*service == "UD" && self.host.long) {
                        let program = format!("{tool} -R");
                        let client = format!("{program} {}", self.host.address);
                        self.add(&program, Test::Exchange(exchange(&program, &client)));
                    }
                }
            }
        }
    }

    fn rdma_cm(&mut self) {
        let (address, group) = (self.host.address, self.host.group);
        for quietly in ["", " -q"] {
            self.meet(
                &format!("rping -s -a {address} -v -C 10{quietly}"),
                &format!("rping -c -a {address} -v -C 10{quietly}"),
            );
        }
        self.meet("ucmatose", &format!("ucmatose -s {address}"));
        self.meet("ucmatose -c 10", &format!("ucmatose -s {address} -c 10 -m"));
        self.add_meet(Exchange {
            endless: true,
            ..exchange(
                &format!("rping -s -P -a {address}"),
                &format!("rping -c -a {address} -C 10 -S 4096 -V"),
            )
        });
        self.add_meet(Exchange {
            endless: true,
            ready: if self.host.cmtime_by_tcp {
                Ready::Port(7471)
            } else {
                Ready::Unknown
            },
            ..exchange(
                &format!("cmtime -b {address} -c 20"),
                &format!("cmtime -b {address} -s {address} -c 20"),
            )
        });
        self.meet("udaddy", &format!("udaddy -s {address}"));
        self.add_meet(Exchange {
            ready: Ready::Joined,
            ..exchange(
                &format!("mckey -m {group} -b {address}"),
                &format!("mckey -s -m {group} -b {address}"),
            )
        });
        self.meet("rdma_server", &format!("rdma_client -s {address}"));
        self.meet("rdma_xserver", &format!("rdma_xclient -s {address}"));
        self.meet("rdma_xserver -c x", &format!("rdma_xclient -s {address} -c x"));
    }

    /// Sockets over RDMA: blocking, not blocking, and by rpoll.
    fn rsockets(&mut self) {
        let (address, rounds) = (self.host.address, self.rounds);
        let sizes: &[u32] = match self.host.long {
            true => &[64, 192, 1000, 4096, 16384, 65536, 262_144, 1_048_576],
            false => &[64, 65536],
        };
        for how in ["b", "n", "a"] {
            for size in sizes {
                for program in ["rstream", "riostream"] {
                    self.meet(
                        &format!("{program} -T {how} -T v -S {size} -C {rounds}"),
                        &format!("{program} -s {address} -T {how} -T v -S {size} -C {rounds}"),
                    );
                }
            }
            self.add_meet(Exchange {
                endless: true,
                ..exchange(
                    &format!("udpong -b {address} -T {how}"),
                    &format!("udpong -s {address} -T {how} -S 1000 -C {rounds}"),
                )
            });
        }
        self.add_meet(Exchange {
            endless: true,
            judge: Judge::Copied,
            ..exchange("rcopy", &format!("rcopy {BYTES} {address}:{COPY}"))
        });
    }

    /// Programs look for devices in `/sys` and `/dev`: through the library that is preloaded, and in a mount namespace.
    fn system_folders(&mut self) {
        const NAMESPACE: &[&str] = &["--sysfs", "namespace"];
        self.alone(&[], "cat /sys/class/infiniband/rdmux0/ports/1/gid_attrs/types/0");
        self.alone(&[], "ls /sys/class/infiniband_verbs/uverbs0/ibdev");
        if !self.host.mount_namespaces {
            self.left_out("--sysfs namespace", "users may make no namespaces here");
            return;
        }
        self.alone(
            NAMESPACE,
            "grep ACTIVE /sys/class/infiniband/rdmux0/ports/1/state",
        );
        self.alone(NAMESPACE, "test -c /dev/infiniband/uverbs0");
        self.alone(NAMESPACE, "test -c /dev/null");
        // Each has a user namespace of its own, where every other user is 65534.
        if !self.host.nobody {
            let program = format!("ib_write_lat -n {}", self.rounds);
            let pair = Exchange {
                run: NAMESPACE,
                ..self.pair(&program)
            };
            self.add(&program, Test::Exchange(pair));
        }
    }

    /// UCX asks /sys and /dev whether a device can be used.
    fn ucx(&mut self) {
        if !self.host.ucx {
            self.left_out("ucx_perftest", "UCX is not installed");
            return;
        }
        let rounds = self.rounds;
        let tests: &[&str] = match self.host.long {
            true => &[
                "tag_lat",
                "ucp_get",
                "ucp_fadd",
                "tag_bw",
                "ucp_put_lat",
                "stream_bw",
                "ucp_am_bw",
            ],
            false => &["tag_lat", "ucp_get", "ucp_fadd"],
        };
        for transport in ["rc_v,self", "ud_v,self"] {
            for test in tests {
                // Atomics are of 8 bytes.
                let size = if *test == "ucp_fadd" { 8 } else { 8192 };
                let exchange = self.ucx_exchange(transport, test, size);
                let options = format!("-t {test} -n {rounds} -w 10 -s");
                let name = format!("ucx_perftest {transport} {options} 8192");
                self.add(&name, Test::Exchange(exchange));
            }
        }
    }

    fn ucx_exchange(&self, transport: &str, test: &str, size: u32) -> Exchange {
        let own = if self.host.ucx_with_mpi { " -P 0" } else { "" };
        let options = format!("-t {test} -n {} -w 10 -s {size}", self.rounds);
        let server = format!("ucx_perftest{own} -p {PORT}");
        let client = format!("{server} {options} {}", self.host.address);
        let environment = vec![
            ("UCX_TLS", transport.to_owned()),
            ("UCX_NET_DEVICES", "rdmux0:1".to_owned()),
            ("UCX_WARN_UNUSED_ENV_VARS", "n".to_owned()),
        ];
        Exchange {
            ready: Ready::PickedPort,
            environment,
            ..exchange(&server, &client)
        }
    }

    /// Programs on nodes: they share a node, or have one each. Those of rdma_cm reach no node but that of their own loopback address.
    fn nodes(&mut self) {
        const SHARED: &[&str] = &["--shared"];
        let (address, rounds) = (self.host.address, self.rounds);
        self.add("rdmux run --shared", Test::Shell(ON_DEMAND));
        let on = |place, exchange: Exchange| Exchange {
            run: SHARED,
            place,
            ..exchange
        };
        let short = format!("-n {rounds}");
        for program in [
            format!("ib_write_lat {short}"),
            format!("ib_write_bw {short} -q 8"),
            format!("ib_read_lat {short}"),
            format!("ib_atomic_lat {short}"),
            format!("ib_send_lat {short} -e"),
            format!("ib_send_bw {short} --use-srq"),
            format!("ib_send_lat {short} -c UD"),
            format!("ib_send_lat {short} -c UC"),
            format!("ibv_rc_pingpong -g 0 {short} -e"),
            format!("ibv_srq_pingpong -g 0 {short} -e"),
            format!("ibv_ud_pingpong -g 0 {short}"),
        ] {
            for (place, words) in [(Place::OneNode, "a node"), (Place::TwoNodes, "two nodes")] {
                let pair = on(place, self.pair(&program));
                self.add(&format!("shared: {words}: {program}"), Test::Exchange(pair));
            }
        }
        for program in [
            format!("ib_write_lat {short}"),
            format!("ibv_rc_pingpong -g 0 {short}"),
        ] {
            let pair = Exchange {
                environment: vec![("RDMUX_CONVERT", "off".to_owned())],
                ..on(Place::TwoNodes, self.pair(&program))
            };
            let name = format!("shared: RDMUX_CONVERT=off: {program}");
            self.add(&name, Test::Exchange(pair));
        }
        let meet = [
            (
                format!("ib_write_lat {short} -R"),
                format!("ib_write_lat {short} -R {address}"),
            ),
            (
                format!("rping -s -a {address} -v -C 10"),
                format!("rping -c -a {address} -v -C 10"),
            ),
            (
                "ucmatose -c 10".to_owned(),
                format!("ucmatose -s {address} -c 10 -m"),
            ),
            ("rdma_server".to_owned(), format!("rdma_client -s {address}")),
        ];
        for (server, client) in meet {
            let exchange = on(Place::OneNode, exchange(&server, &client));
            self.add(&format!("shared: a node: {server}"), Test::Exchange(exchange));
        }
        if !self.host.ucx {
            self.left_out("shared: ucx_perftest", "UCX is not installed");
            return;
        }
        for (test, size) in [
            ("tag_lat", 8192),
            ("ucp_get", 8192),
            ("ucp_put_lat", 8192),
            ("ucp_am_lat", 65_536),
        ] {
            for (place, words) in [(Place::OneNode, "a node"), (Place::TwoNodes, "two nodes")] {
                let exchange = on(place, self.ucx_exchange("rc_v,self", test, size));
                let name = format!("shared: {words}: ucx_perftest -t {test}");
                self.add(&name, Test::Exchange(exchange));
            }
        }
    }

    /// Not fio's SENDs: its server posts receives after the client may send, and its connections allow no RNR retry.
    fn fio(&mut self) {
        if !self.host.fio {
            self.left_out("fio", "fio is not installed");
            return;
        }
        let size = if self.host.long { "64m" } else { "1m" };
        let both =
            format!("fio --thread --verify_state_save=0 --ioengine=rdma --port=7654 --bs=4k --size={size}");
        let server = format!("{both} --name=server --rw=read --iodepth=16");
        for verb in ["write", "read"] {
            let client = format!(
                "{both} --name=client --rw=write --iodepth=4 --hostname={} --verb={verb}",
                self.host.address
            );
            let name = format!("fio --ioengine=rdma --verb={verb}");
            self.add(&name, Test::Exchange(exchange(&server, &client)));
        }
    }

    /// Programs in network namespaces show what the loopback interface does not: packets that are no longer than Ethernet's, and libfabric.
    fn hosts(&mut self) {
        if !self.host.network_namespaces {
            self.left_out(
                "two hosts, and fi_pingpong",
                "users may make no namespaces with veth here",
            );
            return;
        }
        let rounds = self.rounds;
        for program in [
            format!("ib_write_bw -n {rounds}"),
            format!("ib_send_lat -n {rounds} -c UD"),
            format!("ibv_rc_pingpong -g 0 -n {rounds}"),
        ] {
            let server = format!("{program} -p 18515");
            let exchange = Exchange {
                place: Place::TwoHosts,
                ready: Ready::Port(18515),
                ..exchange(&server, &format!("{server} {SERVER}"))
            };
            self.add(&format!("two hosts: {program}"), Test::Exchange(exchange));
        }
        if !self.host.libfabric {
            self.left_out("fi_pingpong", "libfabric is not installed");
            return;
        }
        for (provider, kind, size) in [
            ("verbs", "dgram", 1024),
            ("verbs", "msg", 4096),
            ("verbs;ofi_rxm", "rdm", 65536),
        ] {
            let name = format!("fi_pingpong -p {provider} -e {kind} -S {size}");
            let server = format!("{name} -I {rounds}");
            let judge = match kind {
                "rdm" => Judge::MayBeFlushed(rounds),
                _ => Judge::Status,
            };
            let exchange = Exchange {
                place: Place::OneHost,
                ready: Ready::Port(47592),
                judge,
                ..exchange(&server, &format!("{server} {SERVER}"))
            };
            self.add(&name, Test::Exchange(exchange));
        }
    }
}

/// The server's address where the place is not [`Place::Loopback`], and the client's on two hosts.
pub(super) const SERVER: &str = "192.0.2.1";
pub(super) const CLIENT: &str = "192.0.2.2";

fn exchange(server: &str, client: &str) -> Exchange {
    Exchange {
        server: server.to_owned(),
        client: client.to_owned(),
        run: &[],
        environment: Vec::new(),
        place: Place::Loopback,
        ready: Ready::Unknown,
        endless: false,
        xrc: false,
        limit: LIMIT,
        judge: Judge::Status,
    }
}

const SHELL: &str = r#"
    status=0
    said=$(echo "ibv_devices; cat /sys/class/infiniband/rdmux0/ports/1/state; exit 5" | SHELL=/bin/sh "$@" --shell) || status=$?
    echo "$said, status $status"
    case $said in *rdmux0*ACTIVE*) [ $status = 5 ] ;; *) false ;; esac"#;
const ENVIRONMENT: &str = r#"
    eval "$("$@" --env)"
    said=$(ibv_devices; cat /sys/class/infiniband/rdmux0/ports/1/state)
    echo "$said"
    case $said in *rdmux0*ACTIVE*) ;; *) false ;; esac"#;
const NO_SYSFS: &str = r#"
    said=$("$@" --sysfs none -- sh -c "ibv_devices; cat /sys/class/infiniband/rdmux0/ports/1/state 2>&1" || true)
    echo "$said"
    case $said in *rdmux0*"No such file"*) ;; *) false ;; esac"#;

/// Three programs that start at once get one node, which a device of the program is that of. The node would end by itself.
const ON_DEMAND: &str = r#"
    nodes() {
        for process in /proc/[0-9]*; do
            [ "$(tr '\0' '\n' <"$process/cmdline" 2>/dev/null | sed -n 2p)" = node ] || continue
            tr '\0' '\n' <"$process/environ" 2>/dev/null | grep -qx "XDG_RUNTIME_DIR=$XDG_RUNTIME_DIR" || continue
            echo "${process#/proc/}"
        done
    }
    starting=
    for number in 1 2 3; do "$@" --shared -- ibv_devinfo -d rdmux0 & starting="$starting $!"; done
    for process in $starting; do wait "$process"; done
    found=$(nodes)
    echo "nodes:" $found
    kill $found
    while nodes | grep -q .; do :; done
    [ "$(echo $found | wc -w)" = 1 ]"#;

#[cfg(test)]
#[allow(non_snake_case, reason = "tests are named function__case")]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn host() -> Host {
        Host {
            address: Ipv4Addr::new(127, 64, 1, 2),
            group: Ipv4Addr::new(239, 64, 1, 2),
            long: false,
            nobody: true,
            mount_namespaces: true,
            network_namespaces: true,
            ucx: true,
            ucx_with_mpi: false,
            fio: true,
            libfabric: true,
            cmtime_by_tcp: false,
            preloads: vec!["/lib/librspreload.so".to_owned()],
        }
    }

    fn left_out(lines: &[Line]) -> Vec<&str> {
        let left_out = lines.iter().filter(|line| matches!(line.test, Test::LeftOut(_)));
        left_out.map(|line| line.name.as_str()).collect()
    }

    #[test]
    fn table__has_each_line_once() {
        let lines = table(&host());
        let names: BTreeSet<&str> = lines.iter().map(|line| line.name.as_str()).collect();
        assert_eq!((lines.len(), names.len()), (159, 159));
        assert!(left_out(&lines).is_empty());
    }

    #[test]
    fn table__long_has_all_of_the_short_selection() {
        let short = table(&host()).len();
        let long = table(&Host { long: true, ..host() });
        assert_eq!((short, long.len()), (159, 274));
        assert!(
            long.iter()
                .any(|line| line.name == "ib_send_bw -n 1000 -c XRC -a")
        );
    }

    #[test]
    fn table__names_what_a_host_lacks() {
        let lines = table(&Host {
            mount_namespaces: false,
            network_namespaces: false,
            ucx: false,
            fio: false,
            ..host()
        });
        assert_eq!(
            left_out(&lines),
            [
                "--sysfs namespace",
                "ucx_perftest",
                "fio",
                "two hosts, and fi_pingpong",
                "shared: ucx_perftest"
            ]
        );
    }

    #[test]
    fn why_not_with_faults__leaves_out_unreliable_services() {
        let lines = table(&host());
        let left_out: Vec<&str> = lines
            .iter()
            .map(|line| line.name.as_str())
            .filter(|name| why_not_with_faults(name).is_some())
            .filter(|name| !name.contains("shared"))
            .collect();
        let address = "127.64.1.2";
        assert_eq!(
            left_out,
            [
                "ibv_uc_pingpong -g 0 -n 100",
                "ibv_uc_pingpong -g 0 -n 100 -e",
                "ibv_ud_pingpong -g 0 -n 100",
                "ibv_ud_pingpong -g 0 -n 100 -e",
                "ib_write_lat -n 100 -c UC",
                "ib_send_lat -n 100 -e",
                "ib_send_lat -n 100 -c UC",
                "ib_send_lat -n 100 -c UD",
                "ib_send_bw -n 100 -c UC",
                "ib_send_bw -n 100 -c UD",
                &format!("udaddy -- udaddy -s {address}"),
                &format!("mckey -m 239.64.1.2 -b {address} -- mckey -s -m 239.64.1.2 -b {address}"),
                "two hosts: ib_send_lat -n 100 -c UD",
                "fi_pingpong -p verbs -e dgram -S 1024",
            ]
        );
    }
}
