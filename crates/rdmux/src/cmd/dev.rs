//! `rdmux dev`, `rdmux link` and `rdmux stat`: devices, their ports and counters, with the words of rdma(8).

use anyhow::Result;
use rdmux_verbs::soft::resources::{DeviceResource, Item, Object, netdev_of};

use super::objects::{self, Answer, Filter, Named, Output, Row, answers, guid};

/// What every device can do, by the names that rdma(8) has.
const CAPABILITIES: [&str; 11] = [
    "BAD_PKEY_CNTR",
    "BAD_QKEY_CNTR",
    "PORT_ACTIVE_EVENT",
    "SYS_IMAGE_GUID",
    "RC_RNR_NAK_GEN",
    "SRQ_RESIZE",
    "MEM_WINDOW",
    "XRC",
    "MEM_MGT_EXTENSIONS",
    "MEM_WINDOW_TYPE_2B",
    "ON_DEMAND_PAGING",
];

#[derive(clap::Args, Debug)]
pub(crate) struct DevArgs {
    #[command(subcommand)]
    command: DevCommand,
}

#[derive(clap::Subcommand, Debug)]
enum DevCommand {
    /// Show devices: each is a process's place on an address, named ADDRESS/SLOT.
    ///
    /// The devices of this user's processes in this network namespace; root sees everybody's.
    #[command(after_help = "\
JSON: an array of objects: ifindex (the place among all devices now), ifname (the address), port (the slot), node_type, fw, node_guid,
sys_image_guid, caps, pid, comm; or error, where a device does not answer.")]
    Show {
        /// ADDRESS/SLOT, or ADDRESS for all on it [default: all].
        #[arg(value_name = "DEVICE")]
        named: Option<Named>,
        /// Capabilities too.
        #[arg(short, long)]
        details: bool,
        #[command(flatten)]
        output: Output,
    },
}

#[derive(clap::Args, Debug)]
pub(crate) struct LinkArgs {
    #[command(subcommand)]
    command: LinkCommand,
}

#[derive(clap::Subcommand, Debug)]
enum LinkCommand {
    /// Show the port of each device: its state, and the network interface that it is on.
    #[command(after_help = "\
JSON: an array of objects: ifindex (the place among all devices now), ifname (the address), port (the slot), state, physical_state,
active_mtu (bytes), netdev, netdev_index, pid, comm; or error, where a device does not answer.")]
    Show {
        /// ADDRESS/SLOT, or ADDRESS for all on it [default: all].
        #[arg(value_name = "DEVICE")]
        named: Option<Named>,
        #[command(flatten)]
        output: Output,
    },
}

#[derive(clap::Args, Debug)]
pub(crate) struct StatArgs {
    #[command(subcommand)]
    command: StatCommand,
}

#[derive(clap::Subcommand, Debug)]
enum StatCommand {
    /// Show the counters of each device since it was opened.
    ///
    /// Their names are those of the kernel's drivers where these count the same; docs/observability.md has them all. A device with
    /// faults counts what they did too (`fault_...`).
    #[command(after_help = "\
JSON: an array of objects: ifname (the address), port (the slot), a count by the name of each counter, pid, comm; or error, where a device
does not answer.")]
    Show {
        /// `link` and the device, ADDRESS/SLOT or ADDRESS [default: all].
        #[arg(value_name = "FILTER VALUE")]
        filter: Vec<String>,
        #[command(flatten)]
        output: Output,
    },
}

pub(crate) fn run_dev(args: &DevArgs) -> Result<()> {
    let DevCommand::Show {
        named,
        details,
        output,
    } = &args.command;
    let (found, hidden) = answers(named.unwrap_or(Named::All), Object::Device)?;
    let rows = each_device(
        &found,
        |answer| format!("{}: {}:", answer.index, answer.at),
        |row, device| {
            let caps = CAPABILITIES.to_vec();
            let shown = if *details {
                format!("<{}>", caps.join(", "))
            } else {
                String::new()
            };
            row.with("node_type", "ca")
                .with("fw", device.version.clone())
                .with("node_guid", guid(device.guid))
                .with("sys_image_guid", guid(device.guid))
                .shown_as("caps", caps, shown)
        },
    );
    objects::print(&rows, *output, &[], hidden);
    Ok(())
}

pub(crate) fn run_link(args: &LinkArgs) -> Result<()> {
    let LinkCommand::Show { named, output } = &args.command;
    let (found, hidden) = answers(named.unwrap_or(Named::All), Object::Device)?;
    let mut rows = Vec::new();
    for answer in &found {
        let netdev = netdev_of(answer.at.address);
        rows.extend(each_device(
            std::slice::from_ref(answer),
            |answer| format!("link {}", answer.at),
            |row, device| {
                let (state, physical) = if device.active {
                    ("ACTIVE", "LINK_UP")
                } else {
                    ("DOWN", "DISABLED")
                };
                let (name, index) = netdev.clone().unzip();
                row.with("state", state)
                    .with("physical_state", physical)
                    .with("active_mtu", device.mtu)
                    .with("netdev", name)
                    .hidden("netdev_index", index)
            },
        ));
    }
    objects::print(&rows, *output, &[], hidden);
    Ok(())
}

pub(crate) fn run_stat(args: &StatArgs) -> Result<()> {
    let StatCommand::Show { filter, output } = &args.command;
    let filter = Filter::of_words(filter, &[]);
    let (found, hidden) = answers(filter.named, Object::Counter)?;
    let head = |answer: &Answer| format!("link {}", answer.at);
    let row = |answer: &Answer| match &answer.items {
        Err(why) => Row::error(answer, head(answer), why),
        Ok(items) => {
            let counters = items.iter().filter_map(|item| match item {
                Item::Counter(counter) => Some((counter.name.clone(), counter.value)),
                _ => None,
            });
            let row = counters.fold(Row::of(answer, head(answer)), |row, (name, value)| {
                row.with(name, value)
            });
            row.with_process(answer)
        }
    };
    let rows: Vec<Row> = found.iter().map(row).collect();
    objects::print(&rows, *output, &[], hidden);
    Ok(())
}

/// A row for each device, of what it is.
fn each_device(
    found: &[Answer],
    head: impl Fn(&Answer) -> String,
    fill: impl Fn(Row, &DeviceResource) -> Row,
) -> Vec<Row> {
    let mut rows = Vec::new();
    for answer in found {
        match &answer.items {
            Err(why) => rows.push(Row::error(answer, head(answer), why)),
            Ok(items) => rows.extend(items.iter().filter_map(|item| match item {
                Item::Device(device) => {
                    let row = Row::of(answer, head(answer)).hidden("ifindex", answer.index);
                    Some(fill(row, device).with_process(answer))
                }
                _ => None,
            })),
        }
    }
    rows
}
