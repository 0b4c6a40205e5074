//! `rdmux dev`, `rdmux link` and `rdmux stat`: devices, their ports and counters, with the words of rdma(8).

use anyhow::Result;
use rdmux_verbs::resources::{self, AskError, DeviceResource, Item, Object, Setting, netdev_of};
use rdmux_verbs::{ModerationPolicy, UnknownPolicy};

use super::objects::{self, Answer, Filter, Kind, Named, Options, Row, answers, guid};
use super::res::on_off;
use crate::output;

/// Capabilities of every soft device, by the names that rdma(8) has.
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

const DEV_JSON: &str = "\
JSON: an array of objects: ifindex (the current index among all devices), ifname (the address), port (the
slot), provider (hw; only for an RNIC), node_type, fw, node_guid, sys_image_guid, adaptive-moderation (on, off), moderation (off, dim, rate, or
COUNT,PERIOD), caps (not for an RNIC), pid, comm; or error for a device that does not answer.";

const LINK_JSON: &str = "\
JSON: an array of objects: ifindex (the current index among all devices), ifname (the address), port (the
slot), provider (hw; only for an RNIC), state, physical_state, active_mtu (bytes), netdev, netdev_index, pid, comm; or error for a device
that does not answer.";

const STAT_JSON: &str = "\
JSON: an array of objects: ifname (the address), port (the slot), provider (hw; only for an RNIC), each counter under its
name, pid, comm; or error for a device that does not answer.";

/// Keys by which counters can be chosen.
const STAT_KEYS: [(&str, Kind); 2] = [("pid", Kind::Number), ("comm", Kind::Word)];

#[derive(clap::Args, Debug)]
#[command(mut_args(|arg| arg.global(true)), after_help = DEV_JSON)]
pub(crate) struct DevArgs {
    #[command(flatten)]
    options: Options,
    #[command(subcommand)]
    command: Option<DevCommand>,
}

#[derive(clap::Subcommand, Debug)]
enum DevCommand {
    /// Show devices (the default), one for each process on an address, named ADDRESS/SLOT.
    ///
    /// The list has the devices of this user's processes in this network namespace; root sees those of all users. --details adds their
    /// capabilities, and how they moderate the wake-ups of completion queues.
    #[command(visible_alias = "list", after_help = DEV_JSON)]
    Show {
        /// Device ADDRESS/SLOT, or ADDRESS for all devices on it [default: all].
        #[arg(value_name = "DEVICE")]
        named: Option<Named>,
    },
    /// Change a device of a running process: how it moderates the wake-ups of completion queues.
    ///
    /// The change holds for the completion queues whose program has chosen no moderation itself, those that it makes later included, until
    /// the device is closed. A queue heeds it when its handler waits the next time. `adaptive-moderation on` stands for `moderation rate`,
    /// `off` for none: the first completion wakes. Only the user of the process, and root, may change its devices.
    Set {
        /// Device ADDRESS/SLOT, or ADDRESS for all devices on it.
        #[arg(value_name = "DEVICE")]
        named: Named,
        /// Setting to change.
        setting: Property,
        /// Value: on or off; for `moderation`, off, dim, rate, or COUNT,PERIOD such as 16,32us.
        value: String,
    },
}

#[derive(clap::ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
enum Property {
    /// Moderation of wake-ups by the load: on or off.
    AdaptiveModeration,
    /// How wake-ups are moderated.
    Moderation,
}

#[derive(clap::Args, Debug)]
#[command(mut_args(|arg| arg.global(true)), after_help = LINK_JSON)]
pub(crate) struct LinkArgs {
    #[command(flatten)]
    options: Options,
    #[command(subcommand)]
    command: Option<LinkCommand>,
}

#[derive(clap::Subcommand, Debug)]
enum LinkCommand {
    /// Show the port of each device (the default): its state and network interface.
    #[command(visible_alias = "list", after_help = LINK_JSON)]
    Show {
        /// Device ADDRESS/SLOT, or ADDRESS for all devices on it [default: all].
        #[arg(value_name = "DEVICE")]
        named: Option<Named>,
    },
}

#[derive(clap::Args, Debug)]
#[command(mut_args(|arg| arg.global(true)), after_help = STAT_JSON)]
pub(crate) struct StatArgs {
    #[command(flatten)]
    options: Options,
    #[command(subcommand)]
    command: Option<StatCommand>,
}

#[derive(clap::Subcommand, Debug)]
enum StatCommand {
    /// Show the counters of each device since it was opened (the default).
    ///
    /// A counter has the name that the kernel's drivers give it, where they have the same counter; docs/observability.md lists all. A
    /// device with injected faults counts them too (`fault_...`).
    #[command(visible_alias = "list", after_help = STAT_JSON)]
    Show {
        /// A device, ADDRESS/SLOT or ADDRESS, optionally after `link`, and filters of name and value: `pid 7`, `comm perf` [default: all].
        #[arg(value_name = "FILTER VALUE")]
        filter: Vec<String>,
    },
}

pub(crate) fn run_dev(args: &DevArgs, before: Options) -> Result<()> {
    let named = match &args.command {
        None => None,
        Some(DevCommand::Show { named }) => *named,
        Some(DevCommand::Set {
            named,
            setting,
            value,
        }) => {
            let policy = policy(*setting, value).unwrap_or_else(|why| objects::wrong_usage(&why));
            return set(*named, policy);
        }
    };
    let options = args.options.and(before);
    let caps = match options.wants_details() {
        true => format!("<{}>", CAPABILITIES.join(", ")),
        false => String::new(),
    };
    let (found, hidden) = answers(named.unwrap_or(Named::All), Object::Device)?;
    let rows = each_device(
        &found,
        |answer| format!("{}: {}:", answer.index, answer.at),
        |row, device, answer| {
            let row = row
                .with("node_type", "ca")
                .with("fw", device.version.clone())
                .with("node_guid", guid(device.guid))
                .with("sys_image_guid", guid(device.guid))
                .detail(
                    "adaptive-moderation",
                    device
                        .moderation
                        .map(|policy| on_off(policy.kind().is_adaptive())),
                )
                .detail("moderation", device.moderation.map(|policy| policy.to_string()));
            // `ibv_devinfo` shows the capabilities of an RNIC.
            match answer.at.is_rnic() {
                true => row,
                false => row.shown_as("caps", CAPABILITIES.to_vec(), caps.clone()),
            }
        },
    );
    objects::print(&rows, options, &[], hidden);
    Ok(())
}

/// Parses a value that `dev set` takes.
fn policy(setting: Property, value: &str) -> Result<ModerationPolicy, String> {
    match (setting, value) {
        (Property::AdaptiveModeration, "on") => Ok(ModerationPolicy::ADAPTIVE),
        (Property::AdaptiveModeration, "off") => Ok(ModerationPolicy::Off),
        (Property::AdaptiveModeration, _) => {
            Err(format!("adaptive-moderation takes on or off, not {value:?}"))
        }
        (Property::Moderation, _) => value
            .parse()
            .map_err(|unknown: UnknownPolicy| unknown.to_string()),
    }
}

/// Runs `rdmux dev set`: changes all devices that are named, and says which it cannot change.
fn set(named: Named, policy: ModerationPolicy) -> Result<()> {
    let mut failed = Vec::new();
    for device in objects::devices_of(named)? {
        match resources::set(device, Setting::Moderation(policy), objects::PATIENCE) {
            // It has ended meanwhile.
            Err(AskError::NotThere) if matches!(named, Named::Of(_)) => {}
            Err(error) => failed.push(anyhow::Error::new(error).context(format!("cannot set {device}"))),
            Ok(()) => {}
        }
    }
    let Some(last) = failed.pop() else {
        return Ok(());
    };
    failed.iter().for_each(output::error);
    Err(last)
}

pub(crate) fn run_link(args: &LinkArgs, before: Options) -> Result<()> {
    let named = args
        .command
        .as_ref()
        .and_then(|LinkCommand::Show { named }| *named);
    let (found, hidden) = answers(named.unwrap_or(Named::All), Object::Device)?;
    let mut rows = Vec::new();
    for answer in &found {
        let netdev = netdev_of(answer.at.address);
        rows.extend(each_device(
            std::slice::from_ref(answer),
            |answer| format!("link {}", answer.at),
            |row, device, _| {
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
                    .detail("netdev_index", index)
            },
        ));
    }
    objects::print(&rows, args.options.and(before), &[], hidden);
    Ok(())
}

pub(crate) fn run_stat(args: &StatArgs, before: Options) -> Result<()> {
    let words = args
        .command
        .iter()
        .flat_map(|StatCommand::Show { filter }| filter);
    let filter = Filter::of_words(&words.cloned().collect::<Vec<_>>(), &STAT_KEYS);
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
    let rows: Vec<Row> = found.iter().map(row).filter(|row| filter.takes(row)).collect();
    objects::print(&rows, args.options.and(before), &[], hidden);
    Ok(())
}

/// Returns a row for each device with its properties, or with the error where it does not answer.
fn each_device(
    found: &[Answer],
    head: impl Fn(&Answer) -> String,
    fill: impl Fn(Row, &DeviceResource, &Answer) -> Row,
) -> Vec<Row> {
    let mut rows = Vec::new();
    for answer in found {
        match &answer.items {
            Err(why) => rows.push(Row::error(answer, head(answer), why)),
            Ok(items) => rows.extend(items.iter().filter_map(|item| match item {
                Item::Device(device) => {
                    let row = Row::of(answer, head(answer)).hidden("ifindex", answer.index);
                    Some(fill(row, device, answer).with_process(answer))
                }
                _ => None,
            })),
        }
    }
    rows
}
