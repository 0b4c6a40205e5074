//! Wireshark's dissectors judge a real exchange of NVMe/RDMA.
#![allow(non_snake_case, reason = "tests are named function__case")]

mod rdma_host;
#[path = "../../skip.rs"]
mod skip;

use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use rdma_host::{Host, Running, SUBSYSTEM, address, rw};
use rdmux_nvmf::backend::MemoryBackend;
use rdmux_verbs::{ConnectParams, Device, Options, SharedMemory, set_process_capture};
use rdmux_wire::nvme::{Cid, ConnectData, Opcode, Status};
use rdmux_wire::nvme_rdma::Request;

/// Returns tshark's lines with these fields of the packets that match a display filter; `None` where there is no tshark.
fn tshark(file: &Path, filter: &str, fields: &[&str]) -> Option<Vec<String>> {
    let mut command = Command::new("tshark");
    command.arg("-r").arg(file).args(["-Y", filter, "-T", "fields"]);
    for field in fields {
        command.args(["-e", field]);
    }
    let Ok(output) = command.output() else {
        skip::skip("there is no tshark to judge the capture");
        return None;
    };
    let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{}", text(&output.stderr));
    Some(text(&output.stdout).lines().map(str::to_owned).collect())
}

#[test]
fn exchange__is_what_wireshark_takes_it_for() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("rdma.pcapng");
    let device = {
        // Of the host alone: each packet is there once.
        let server = Running::start(1, Arc::new(MemoryBackend::new(16 << 20).unwrap()));
        set_process_capture(&file);
        let options = Options {
            shared_memory: SharedMemory::Off,
            ..Options::default()
        };
        let device = Device::open_with(address(), options).unwrap();
        // On a busy machine a packet would be sent again, which is captured as well.
        let params = ConnectParams {
            ack_timeout: Some(21),
            ..ConnectParams::default()
        };
        let open = |qid, sends| {
            let request = Request {
                qid,
                receives: 32,
                sends,
                cntlid: 0,
            };
            Host::try_open(&device, server.address, &request.emit(), &params)
        };
        assert!(open(1, 128).is_err());
        let mut admin = open(0, 31).unwrap();
        let connected = admin.connect(0, ConnectData::ANY_CONTROLLER, SUBSYSTEM, 0);
        assert_eq!(connected.status, Status::SUCCESS);
        admin.enable();
        let mut io = open(1, 31).unwrap();
        let cntlid = connected.result as u16;
        assert_eq!(io.connect(1, cntlid, SUBSYSTEM, 0).status, Status::SUCCESS);
        let (cqe, _) = io.run(rw(Opcode::WRITE, 1, 3, 2), &[7; 8192], 0);
        assert_eq!(cqe.status, Status::SUCCESS);
        io.in_capsule(rw(Opcode::WRITE, 2, 5, 1), &[8; 4096]);
        assert_eq!(io.completion(Cid(2)).status, Status::SUCCESS);
        let (cqe, _) = io.run(rw(Opcode::READ, 3, 3, 3), &[], 3 * 4096);
        assert_eq!(cqe.status, Status::SUCCESS);
        device
    };
    drop(device);
    let Some(accepts) = tshark(&file, "nvme-rdma.cm.rsp.crqsize", &["nvme-rdma.cm.rsp.crqsize"]) else {
        return;
    };
    assert_eq!(accepts, ["32", "32"]);
    let rejects = tshark(&file, "nvme-rdma.cm.rej.status", &["nvme-rdma.cm.rej.status"]);
    assert_eq!(rejects.unwrap(), ["0x0004"]);
    let lines = tshark(&file, "nvme-rdma.cmd.qid == 1", &["_ws.col.Info"]).unwrap();
    let known = lines.iter().filter_map(|line| Some(line.split_once(" | ")?.1));
    // A host that is gone acknowledges nothing: the last packets may come again.
    let known: Vec<_> = known.take(14).collect();
    // A capsule of two packets it takes for none.
    assert_eq!(
        known,
        [
            "NVMeOF Connect",
            "NVMeOF Data Request for Connect",
            "NVMeoF Data for Connect, offset 0",
            "NVMeOF CQE for Connect",
            "NVMe Write",
            "NVMeOF Data Request for Write",
            "NVMeOF Data for Write, offset 0",
            "NVMeOF Data for Write, offset 4096",
            "NVMe CQE for Write",
            "NVMe Read",
            "NVMeOF Data for Read, offset 0",
            "NVMeOF Data for Read, offset 4096",
            "NVMeOF Data for Read, offset 8192",
            "NVMe CQE for Read",
        ],
        "{lines:#?}"
    );
    let malformed = tshark(&file, "_ws.malformed", &["frame.number", "_ws.col.Info"]);
    assert_eq!(malformed.unwrap(), [""; 0]);
}
