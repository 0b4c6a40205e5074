//! A server of one subsystem with one namespace.
#![allow(dead_code, reason = "not every test uses all of it")]

use std::net::SocketAddr;
use std::sync::Arc;
use std::thread::JoinHandle;

use rdmux_nvmf::backend::Backend;
use rdmux_nvmf::server::{Config, Handle, Server};
use rdmux_nvmf::target::{Listener, Namespace, Subsystem, Target};
use rdmux_wire::nvme::NsId;

/// A server, and the subsystem that it serves.
pub(crate) type Serving = (Arc<Subsystem>, SocketAddr, Handle, JoinHandle<()>);

/// Serves on threads of its own. The namespace has blocks of 4 KiB.
pub(crate) fn serve(
    subsystem: Subsystem,
    namespace: (Arc<dyn Backend>, u8),
    listener: Listener,
    reactors: usize,
) -> Serving {
    serve_by(
        Target::default(),
        subsystem,
        namespace,
        listener,
        (reactors, false),
    )
}

/// As [`serve`], by a target of one's own, and with an offload engine if that is asked for.
pub(crate) fn serve_by(
    target: Target,
    subsystem: Subsystem,
    (backend, uuid): (Arc<dyn Backend>, u8),
    listener: Listener,
    (reactors, offload): (usize, bool),
) -> Serving {
    rdmux_soft::register();
    let namespace = Namespace {
        nsid: NsId(1),
        block_shift: 12,
        uuid: [uuid; 16],
        is_protected: false,
        backend,
    };
    subsystem.add_namespace(namespace).unwrap();
    let subsystem = Arc::new(subsystem);
    target.add_subsystem(subsystem.clone()).unwrap();
    let server = Server::bind(Config {
        target: Arc::new(target),
        listen: vec![listener.into()],
        reactors,
        offload,
        waiting: None,
    })
    .unwrap();
    let (address, handle) = (server.listeners()[0].address, server.handle());
    let thread = std::thread::spawn(move || server.run().unwrap());
    (subsystem, address, handle, thread)
}
