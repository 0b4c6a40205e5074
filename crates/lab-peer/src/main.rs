//! `rdmux-lab-peer`: the peer of the lab's C program, by rdmux's own API. The sources of that program, lab/peer, describe the protocols.

#![cfg_attr(test, allow(non_snake_case, reason = "tests are named function__case"))]

mod cm;
mod side;
mod transfer;
mod verbs;

use std::fmt::{Debug, LowerHex};
use std::io::Write;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::time::Duration;

use anyhow::{Result, bail, ensure};
use clap::Parser;
use rdmux_verbs::{Features, Status, WorkCompletion, set_process_provider};

use side::Side;

/// Longest wait for the peer.
const WAIT: Duration = Duration::from_secs(20);

/// Serves or asks the lab's peer.
#[derive(clap::Parser, Debug)]
struct Args {
    /// Provider of the device, soft or hw [default: soft].
    #[arg(long)]
    provider: Option<String>,
    #[command(subcommand)]
    role: Role,
}

#[derive(clap::Subcommand, Debug)]
enum Role {
    /// Serves memory to clients, one after another.
    Server {
        address: IpAddr,
        port: u16,
        #[arg(default_value_t = 1 << 20)]
        bytes: u32,
        #[arg(default_value_t = 1)]
        connections: u32,
    },
    /// Connects and transfers.
    Client {
        address: IpAddr,
        port: u16,
        #[arg(default_value_t = 1 << 20)]
        bytes: u32,
    },
    /// Connects and makes requests that must fail.
    Refused { address: IpAddr, port: u16 },
    /// The side of scenarios that is asked.
    Answer { address: IpAddr, port: u16 },
    /// The side of scenarios that asks, from an address of its own.
    Ask {
        address: IpAddr,
        port: u16,
        own: IpAddr,
        /// The link loses datagrams.
        #[arg(short)]
        lossy: bool,
        /// None: all.
        names: Vec<String>,
    },
}

fn main() -> Result<()> {
    // The first one is the default.
    rdmux_soft::register();
    rdmux_hw::register();
    let args = Args::parse();
    if let Some(provider) = &args.provider {
        set_process_provider(provider)?;
    }
    match &args.role {
        Role::Server {
            address,
            port,
            bytes,
            connections,
        } => transfer::server(SocketAddr::new(*address, *port), *bytes, *connections),
        Role::Client { address, port, bytes } => transfer::client(SocketAddr::new(*address, *port), *bytes),
        Role::Refused { address, port } => transfer::refused(SocketAddr::new(*address, *port)),
        Role::Answer { address, port } => answer(SocketAddr::new(*address, *port)),
        Role::Ask {
            address,
            port,
            own,
            lossy,
            names,
        } => ask(SocketAddr::new(*address, *port), *own, *lossy, names),
    }
}

type Scenario = (&'static str, fn(&Side) -> Result<()>);

fn answer(address: SocketAddr) -> Result<()> {
    let listener = TcpListener::bind(address)?;
    say("listening")?;
    answer_on(&listener)
}

fn answer_on(listener: &TcpListener) -> Result<()> {
    let (side, mut names) = Side::answer(listener)?;
    while let Some(name) = names.next()? {
        run_scenario(&side, &name)?;
    }
    Ok(())
}

fn ask(address: SocketAddr, own: IpAddr, lossy: bool, names: &[String]) -> Result<()> {
    let side = Side::ask(address, own, lossy)?;
    let all = verbs::SCENARIOS.iter().chain(cm::SCENARIOS);
    let named = names.iter().map(String::as_str);
    let names: Vec<&str> = match names {
        [] => all.map(|(name, _)| *name).collect(),
        _ => named.collect(),
    };
    for name in names {
        let lacks = needs(name) - side.device.features();
        if !lacks.is_empty() {
            say(&format!("skipped {name}: the device does not offer {lacks}"))?;
            continue;
        }
        side.ask_for(name)?;
        run_scenario(&side, name)?;
    }
    Ok(())
}

/// Returns the features that a scenario needs of both devices.
fn needs(name: &str) -> Features {
    match name {
        "atomics" => Features::ATOMIC,
        "atomic-write" => Features::ATOMIC_WRITE,
        "flush" => Features::FLUSH_GLOBAL,
        "flush-dax" => Features::FLUSH_GLOBAL | Features::FLUSH_PERSISTENT | Features::ATOMIC_WRITE,
        "window-1" => Features::MW_TYPE_1 | Features::ATOMIC,
        "window-2" => Features::MW_TYPE_2 | Features::ATOMIC,
        "send-invalidate" => Features::MW_TYPE_2,
        "srq" => Features::SRQ,
        "refusals" => Features::ATOMIC | Features::ATOMIC_WRITE | Features::FLUSH_GLOBAL,
        "uc" | "uc-many" => Features::UC,
        "ud" | "ud-many" | "cm-datagram" => Features::UD,
        "multicast" => Features::UD | Features::MULTICAST,
        _ => Features::empty(),
    }
}

fn run_scenario(side: &Side, name: &str) -> Result<()> {
    let mut all = verbs::SCENARIOS.iter().chain(cm::SCENARIOS);
    let Some((_, run)) = all.find(|(n, _)| *n == name) else {
        bail!("no scenario {name}");
    };
    side.clear()?;
    run(side)?;
    side.barrier()?;
    say(&format!("ok {name}"))
}

/// Returns the byte of the pattern at offset `i`.
fn pattern(i: u32) -> u8 {
    (i.wrapping_add(1).wrapping_mul(2_654_435_761) >> 24) as u8
}

fn pattern_bytes(from: u32, length: u32) -> Vec<u8> {
    (from..from + length).map(pattern).collect()
}

fn expect_pattern(what: &str, bytes: &[u8], from: u32) -> Result<()> {
    match bytes.iter().zip(from..).find(|(byte, i)| **byte != pattern(*i)) {
        Some((byte, i)) => bail!(
            "{what}: byte {} is {byte:#04x}, not {:#04x}",
            i - from,
            pattern(i)
        ),
        None => Ok(()),
    }
}

fn expect<T: PartialEq + Debug + LowerHex>(what: &str, value: T, wanted: T) -> Result<()> {
    ensure!(value == wanted, "{what} is {value:#x}, not {wanted:#x}");
    Ok(())
}

fn expect_status(what: &str, wc: &WorkCompletion, wanted: Status) -> Result<()> {
    ensure!(wc.status == wanted, "{what}: \"{}\", not \"{wanted}\"", wc.status);
    Ok(())
}

/// Prints a line that the tests wait for.
fn say(line: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}")?;
    Ok(out.flush()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scenarios__pass_against_ourselves() {
        let names = [
            "send",
            "solicited",
            "not-ready",
            "write",
            "read",
            "atomics",
            "atomic-write",
            "flush",
            "window-1",
            "window-2",
            "send-invalidate",
            "srq",
            "refusals",
            "uc",
            "uc-many",
            "ud",
            "ud-many",
            "multicast",
            "cm-connect",
            "cm-reject",
            "cm-datagram",
        ];
        rdmux_soft::register();
        let listener = TcpListener::bind("127.0.0.94:0").unwrap();
        let address = listener.local_addr().unwrap();
        std::thread::scope(|scope| {
            let answering = scope.spawn(|| answer_on(&listener));
            let asked = ask(
                address,
                "127.0.0.95".parse().unwrap(),
                false,
                &names.map(String::from),
            );
            let answered = answering.join().unwrap();
            asked.unwrap();
            answered.unwrap();
        });
    }
}
