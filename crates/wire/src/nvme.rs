//! NVMe commands, completions and the structures that controllers and hosts exchange over fabrics. All numbers are little endian.
//!
//! Sections are those of the NVM Express Base Specification 2.0 unless another text is named: the NVM Command Set Specification 1.0 (NVM), the
//! NVMe over TCP (TCP) and RDMA (RDMA) Transport Specifications 1.0.

mod auth;
mod command;
mod fabrics;
mod identify;
mod log;
mod nqn;
mod pcie;
mod ranges;
mod register;
mod reservation;
mod sgl;
mod status;
#[cfg(test)]
mod tests;

pub use auth::{
    AUTH_LEN_MAX, AuthFailure, AuthMessage, DhGroup, HashId, SecureChannel, authentication,
    authentication_len, is_nvme_authentication,
};
pub use command::{CQE_LEN, Cid, Cqe, Fuse, NsId, Opcode, Rw, SQE_LEN, Sqe};
pub use fabrics::{CONNECT_DATA_LEN, Connect, ConnectData, FabricsType, HostId, Property};
pub use identify::{
    AnaLimits, Cns, ControllerKind, IDENTIFY_LEN, IdentifyController, IdentifyNamespace,
    IndependentNamespace, NamespaceIdentifiers, emit_namespace_list, parse_namespace_list,
};
pub use log::{
    AnaGroup, AnaLog, AnaState, AsyncEvent, DISCOVERY_ENTRY_LEN, DISCOVERY_HEADER_LEN, DiscoveryEntry,
    DiscoveryHeader, EffectsLog, FeatureEffects, HealthLog, LogId, ReservationNotification, SubsystemKind,
    TransportKind, feature_effects, supported_logs,
};
pub use nqn::{DISCOVERY_NQN, Nqn};
pub use pcie::{
    CmbControl, CmbLayout, ControllerStatus, DriveController, PMR_ENABLE, PMR_NOT_READY, PMR_SPACE,
    PcieCapabilities, PmrCapabilities,
};
pub use ranges::{Copy, CopyFormat, CopyRange, DatasetRange};
pub use register::{Capabilities, Configuration, Register, VERSION_1_4, VERSION_2_0};
pub use reservation::{
    ReservationAction, ReservationCommand, ReservationController, ReservationKeys, ReservationNotice,
    ReservationReport, ReservationType,
};
pub use sgl::Sgl;
pub use status::Status;
