//! `rdmux nvme list`: the namespaces of a subsystem.

use anyhow::Result;
use rdmux_nvmf::host::{NamespaceInfo, Url};
use rdmux_nvmf::identity::uuid_text;
use serde_json::json;

use super::host::HostArgs;
use crate::output::{self, Align};

/// List the namespaces of a subsystem.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
JSON: one object: subsystem, address, cntlid, model, serial, firmware, namespaces (array of nsid, bytes, used_bytes, block_bytes, uuid (null if it has none), nguid (the same), read_only).")]
pub(crate) struct Args {
    /// The subsystem: nvme+tcp://HOST[:PORT]/NQN or nvme+rdma://HOST[:PORT]/NQN.
    #[arg(value_name = "URL")]
    url: Url,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    host: HostArgs,
}

fn id(id: &[u8; 16]) -> Option<String> {
    (*id != [0; 16]).then(|| uuid_text(id))
}

pub(super) fn run(args: &Args) -> Result<()> {
    let controller = args.host.ask(&args.url)?;
    let namespaces = controller.namespaces()?;
    let namespaces: Vec<NamespaceInfo> = namespaces
        .into_iter()
        .map(|nsid| controller.namespace(nsid))
        .collect::<Result<_, _>>()?;
    if args.json {
        let listed: Vec<_> = namespaces
            .iter()
            .map(|namespace| {
                json!({
                    "nsid": namespace.nsid.0,
                    "bytes": namespace.bytes(),
                    "used_bytes": namespace.used_blocks.saturating_mul(namespace.block_bytes()),
                    "block_bytes": namespace.block_bytes(),
                    "uuid": id(&namespace.ids.uuid),
                    "nguid": id(&namespace.ids.nguid),
                    "read_only": namespace.is_protected,
                })
            })
            .collect();
        let identify = &controller.info().identify;
        let report = json!({
            "subsystem": identify.subsystem.as_str(),
            "address": controller.address().to_string(),
            "cntlid": identify.cntlid,
            "model": identify.model,
            "serial": identify.serial,
            "firmware": identify.firmware,
            "namespaces": listed,
        });
        output::say(&format!("{report:#}"));
        controller.close();
        return Ok(());
    }
    let rows: Vec<_> = namespaces
        .iter()
        .map(|namespace| {
            vec![
                namespace.nsid.to_string(),
                output::bytes(namespace.bytes()),
                output::bytes(namespace.used_blocks.saturating_mul(namespace.block_bytes())),
                output::bytes(namespace.block_bytes()),
                if namespace.is_protected {
                    "read-only"
                } else {
                    "read, write"
                }
                .to_owned(),
                id(&namespace.ids.uuid)
                    .or_else(|| id(&namespace.ids.nguid))
                    .unwrap_or_else(|| "-".to_owned()),
            ]
        })
        .collect();
    let columns = [
        ("namespace", Align::Right),
        ("size", Align::Right),
        ("used", Align::Right),
        ("block", Align::Right),
        ("access", Align::Left),
        ("uuid", Align::Left),
    ];
    output::say(&output::table(&columns, &rows));
    controller.close();
    Ok(())
}
