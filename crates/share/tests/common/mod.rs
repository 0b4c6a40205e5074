//! A node in a thread of the test, and the objects of an application.
#![allow(dead_code, reason = "not every test needs all of it")]

mod side;

use std::net::IpAddr;
use std::path::Path;
use std::thread::JoinHandle;

use rdmux_key::Key;
use rdmux_share::node::config::Config;
use rdmux_share::node::snapshot::Viewer;
use rdmux_share::node::{Node, NodeOptions, Stopper};
use rdmux_verbs::{Device, Options};

pub(crate) use side::*;

/// A node on a soft device, until it is dropped.
pub(crate) struct Served {
    pub(crate) address: IpAddr,
    pub(crate) device: Device,
    pub(crate) viewer: Viewer,
    stopper: Stopper,
    thread: Option<JoinHandle<()>>,
}

impl Served {
    /// Starts a node; with a key, it shares queue pairs with nodes that have the same.
    pub(crate) fn at(address: impl Into<IpAddr>, key: Option<[u8; 32]>) -> Served {
        Served::with_faults(address, key, None)
    }

    /// Starts a node on a device with such faults.
    pub(crate) fn with_faults(
        address: impl Into<IpAddr>,
        key: Option<[u8; 32]>,
        faults: Option<&str>,
    ) -> Served {
        let options = NodeOptions {
            key: key.map(Key::new),
            ..NodeOptions::default()
        };
        Served::with_options(address, options, faults)
    }

    pub(crate) fn with_options(
        address: impl Into<IpAddr>,
        node: NodeOptions,
        faults: Option<&str>,
    ) -> Served {
        rdmux_soft::register();
        rdmux_share::register();
        let address = address.into();
        let options = Options {
            provider: Some("soft"),
            faults: faults.map(|faults| faults.parse().unwrap()),
            ..Options::default()
        };
        let device = Device::open_with(address, options).unwrap();
        let node = Node::open_with(device.clone(), node).unwrap();
        let (stopper, viewer) = (node.stopper(), node.viewer());
        let thread = std::thread::spawn(move || node.run().unwrap());
        Served {
            address,
            device,
            viewer,
            stopper,
            thread: Some(thread),
        }
    }

    /// Has the node go on with a configuration, a text in which OWN is the uid of this process.
    pub(crate) fn apply(&self, text: &str) {
        self.stopper.apply(config(text)).unwrap();
    }

    pub(crate) fn stop(&mut self) {
        self.stopper.stop();
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Returns the configuration of a text in which OWN is the uid of this process.
pub(crate) fn config(text: &str) -> Config {
    let text = text.replace("OWN", &rustix::process::getuid().as_raw().to_string());
    let parsed = Config::parse(Path::new("node.toml"), &text, &|_| Ok(None));
    parsed.unwrap().0
}
