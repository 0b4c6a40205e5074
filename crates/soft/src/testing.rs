//! Soft devices for the unit tests, which also reach their engines.

use std::net::IpAddr;

use rdmux_verbs::{Device, OpenError, Options, provider};

use crate::engine::Engine;

/// Opens a soft device.
pub(crate) fn open(address: IpAddr) -> Result<Device, OpenError> {
    open_with(address, Options::default())
}

/// Opens a soft device with options.
pub(crate) fn open_with(address: IpAddr, options: Options) -> Result<Device, OpenError> {
    crate::register();
    Device::open_with(address, options)
}

/// Access to a soft device behind the vocabulary.
pub(crate) trait Inside {
    /// Returns the device's engine.
    fn engine(&self) -> &Engine;
}

impl Inside for Device {
    fn engine(&self) -> &Engine {
        provider::own::<crate::device::Device>(self).expect("a soft device")
    }
}
