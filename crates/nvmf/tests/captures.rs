//! Wireshark's dissectors judge real exchanges of NVMe/TCP and NVMe/RDMA.
#![allow(non_snake_case, reason = "tests are named function__case")]

mod rdma_host;
mod recorder;
#[path = "../../skip.rs"]
mod skip;

use std::collections::HashSet;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use rdma_host::{Host, Running, SUBSYSTEM, address, nqn, rw};
use rdmux_nvmf::backend::MemoryBackend;
use rdmux_nvmf::host::command::{flush, read, write};
use rdmux_nvmf::host::{Options as HostOptions, Session};
use rdmux_nvmf::target::Listener;
use rdmux_verbs::{ConnectParams, Device, Options, SharedMemory, set_process_capture};
use rdmux_wire::nvme::{Cid, ConnectData, NsId, Opcode, Status, TransportKind};
use rdmux_wire::nvme_rdma::Request;
use rdmux_wire::nvme_tcp::Digests;
use recorder::Recorder;

/// Returns tshark's lines with these fields of the packets that match a display filter; `None` where there is no tshark.
fn tshark(file: &Path, filter: &str, fields: &[&str]) -> Option<Vec<String>> {
    let mut command = Command::new("tshark");
    command.arg("-r").arg(file).args(["-Y", filter, "-T", "fields"]);
    command.args([
        "-o",
        "nvme-tcp.check_hdgst:TRUE",
        "-o",
        "nvme-tcp.check_ddgst:TRUE",
    ]);
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

/// Returns the last of these fields of the packets that match a display filter, once for packets whose other fields are the same: on a busy machine
/// a packet is sent again.
fn tshark_once(file: &Path, filter: &str, fields: &[&str]) -> Option<Vec<String>> {
    let mut seen = HashSet::new();
    let lines = tshark(file, filter, fields)?;
    let split = lines
        .iter()
        .map(|line| line.rsplit_once('\t').expect("several fields"));
    let first = split.filter(|(packet, _)| seen.insert(packet.to_string()));
    Some(first.map(|(_, last)| last.to_owned()).collect())
}

/// Has a host write, read and flush by TCP, and records the two connections.
fn exchange_by_tcp(digests: Digests, file: &Path) {
    let listener = Listener {
        transport: TransportKind::Tcp,
        address: "127.0.0.1:0".parse().unwrap(),
    };
    let server = Running::start_at(listener, 1, Arc::new(MemoryBackend::new(16 << 20).unwrap()));
    let recorder = Recorder::start(server.address);
    let options = HostOptions {
        digests,
        ..HostOptions::new(vec![recorder.address], nqn(SUBSYSTEM))
    };
    let session = Session::connect(options, 1).unwrap();
    let mut queue = session.queue(1, 4).unwrap();
    // The first write fits into a capsule; the target asks for the data of the second.
    for (at, blocks) in [(0, 1), (1, 16)] {
        let bytes = blocks * 4096;
        let written = queue.run(
            "a write",
            write(NsId(1), at, blocks, bytes, vec![7; bytes as usize]),
        );
        assert_eq!(written.unwrap().status, Status::SUCCESS);
    }
    let bytes = 17 * 4096;
    let done = queue
        .run("a read", read(NsId(1), 0, 17, bytes, vec![0; bytes as usize]))
        .unwrap();
    assert_eq!(
        (done.status, done.bytes()),
        (Status::SUCCESS, &vec![7; bytes as usize][..])
    );
    assert_eq!(
        queue.run("a flush", flush(NsId(1))).unwrap().status,
        Status::SUCCESS
    );
    drop(queue);
    session.close();
    recorder.write(file);
}

#[test]
fn tcp__is_what_wireshark_takes_it_for() {
    let folder = tempfile::tempdir().unwrap();
    for digests in [Digests::empty(), Digests::all()] {
        let file = folder.path().join("tcp.pcapng");
        exchange_by_tcp(digests, &file);
        let Some(lines) = tshark(&file, "nvme-tcp && tcp.stream == 1", &["_ws.col.Info"]) else {
            return;
        };
        // A packet may have several PDUs.
        let known: Vec<_> = lines.iter().flat_map(|line| line.split("| ")).collect();
        assert_eq!(
            known,
            [
                "Initialize Connection Request",
                "Initialize Connection Response",
                "NVMeOF Connect",
                "NVMeOF CQE for Connect",
                "NVMe Write",
                "NVMe CQE for Write",
                "NVMe Write",
                "Ready To Transfer",
                "NVMeOF Data for Write, offset 0",
                "NVMe CQE for Write",
                "NVMe Read",
                "NVMeOF Data for Read, offset 0",
                "NVMe Flush",
                "NVMe CQE for Flush",
            ],
            "{digests:?}"
        );
        let admin = tshark(&file, "nvme-tcp && tcp.stream == 0", &["_ws.col.Info"]).unwrap();
        let identified = admin
            .iter()
            .filter(|line| line.contains("Data for Identify Controller"));
        assert_eq!(identified.count(), 1, "{admin:#?}");
        let bad = tshark(
            &file,
            "_ws.malformed || _ws.expert.severity >= error",
            &["_ws.col.Info"],
        );
        assert_eq!(bad.unwrap(), [""; 0], "{digests:?}");
        for field in ["nvme-tcp.hdgst.status", "nvme-tcp.ddgst.status"] {
            let statuses = tshark(&file, field, &[field]).unwrap();
            assert_eq!(statuses.is_empty(), digests.is_empty());
            // Good (Wireshark's proto_checksum_enum_e), of each PDU of the packet.
            let mut each = statuses.iter().flat_map(|line| line.split(','));
            assert!(each.all(|status| status == "1"), "{field}: {statuses:?}");
        }
    }
}

#[test]
fn rdma__is_what_wireshark_takes_it_for() {
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
    let message = |field| tshark_once(&file, field, &["infiniband.mad.transactionid", field]);
    let Some(accepts) = message("nvme-rdma.cm.rsp.crqsize") else {
        return;
    };
    assert_eq!(accepts, ["32", "32"]);
    assert_eq!(message("nvme-rdma.cm.rej.status").unwrap(), ["0x0004"]);
    let packet = ["infiniband.bth.destqp", "infiniband.bth.psn", "_ws.col.Info"];
    let lines = tshark_once(&file, "nvme-rdma.cmd.qid == 1", &packet).unwrap();
    let known = lines.iter().filter_map(|line| Some(line.split_once(" | ")?.1));
    let known: Vec<_> = known.collect();
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
