//! Memory regions, whose memory the node maps: no byte of it is copied on the way to the device.

use rdmux_memory::shared_file;
use rdmux_rnic::{LKey, RKey, RegionSpec, RegisterError};
use rdmux_verbs::provider::{self, own};
use rdmux_wire::node::control::{Kind, Message};

use super::device::{Device, ProtectionDomain};
use crate::control::convert::register_error;

/// Why memory cannot be registered.
const NOT_SHAREABLE: &str = "memory that a node cannot map: allocate it as shareable (AnonymousMemory::shareable), or choose another provider";

#[derive(Debug)]
pub(super) struct MemoryRegion {
    device: Device,
    id: u32,
    lkey: LKey,
    rkey: RKey,
}

impl MemoryRegion {
    pub(super) fn new(pd: &ProtectionDomain, spec: &RegionSpec) -> Result<MemoryRegion, RegisterError> {
        let file = shared_file(&*spec.memory).ok_or(RegisterError::Unsupported(NOT_SHAREABLE))?;
        let request = Message::Register {
            pd: pd.id,
            offset: spec.memory_offset,
            length: spec.length,
            iova: spec.iova,
            access: spec.access.bits(),
        };
        let client = pd.device.client();
        let answer = client.request_with(&request, Some(file), None);
        match answer.map_err(|refusal| register_error(&refusal))? {
            Message::Registered { id, lkey, rkey } => Ok(MemoryRegion {
                device: pd.device.clone(),
                id,
                lkey,
                rkey,
            }),
            _ => Err(RegisterError::Refused(rustix::io::Errno::PROTO.raw_os_error())),
        }
    }
}

impl provider::MemoryRegion for MemoryRegion {
    fn lkey(&self) -> LKey {
        self.lkey
    }

    fn rkey(&self) -> RKey {
        self.rkey
    }

    fn has_windows(&self) -> bool {
        false
    }

    fn rereg(&mut self, pd: &rdmux_verbs::ProtectionDomain, spec: RegionSpec) -> Result<(), RegisterError> {
        // A new region, as an RNIC's library makes one: its keys change.
        let pd = own::<ProtectionDomain>(pd).ok_or(RegisterError::NoPd)?;
        *self = MemoryRegion::new(pd, &spec)?;
        Ok(())
    }
}

impl Drop for MemoryRegion {
    fn drop(&mut self) {
        self.device.client().destroy(Kind::Region, self.id);
    }
}
