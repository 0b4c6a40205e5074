//! The nodes on which `rdmux run --shared` puts a program.

use std::env;
use std::net::IpAddr;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use rdmux_share::{Held, StartLock, node_addresses};

/// Time after which a node ends that was started for a program, in seconds: another program that follows finds it.
const UNTIL_IDLE: &str = "10";

/// Has each address a node, which stays as long as the program that replaces this process, and returns the addresses of the program's devices:
/// those that the user chose, else those that have a node, else the first one.
pub(super) fn hold_nodes(devices: Vec<IpAddr>, chosen: bool) -> Result<Vec<IpAddr>> {
    // One starter at a time, and no node ends meanwhile.
    let _lock = StartLock::wait().context("no private folder of this user: set XDG_RUNTIME_DIR to one")?;
    let wanted = match chosen {
        true => devices,
        false => match node_addresses().unwrap_or_default() {
            none if none.is_empty() => devices.into_iter().take(1).collect(),
            served => served,
        },
    };
    for address in &wanted {
        hold_node(*address)?;
    }
    Ok(wanted)
}

fn hold_node(address: IpAddr) -> Result<()> {
    let held = |address| Held::new(address).with_context(|| format!("the node of {address}"));
    let node = match held(address)? {
        Some(node) => node,
        None => {
            start(address)?;
            match held(address)? {
                Some(node) => node,
                None => bail!(
                    "the node of {address} has ended at once: start `rdmux node --device {address}` to see why"
                ),
            }
        }
    };
    node.leave_open().context("keeping the node")
}

/// Starts a node in the background, with the device that this process would have.
fn start(address: IpAddr) -> Result<()> {
    let mut command = Command::new(env::current_exe().context("the path of this program")?);
    command
        .args(["node", "--detach", "--until-idle", UNTIL_IDLE, "--device"])
        .arg(address.to_string())
        // It would be a node of a node.
        .env_remove("RDMUX_PROVIDER")
        .stdin(Stdio::null());
    let output = command.output().context("starting a node")?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        let said = said.trim();
        let said = said.strip_prefix("rdmux: ").unwrap_or(said);
        bail!(
            "no node of this user serves {address}, and none starts: {said}; start one with `rdmux node --device {address}`"
        );
    }
    Ok(())
}
