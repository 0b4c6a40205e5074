//! NVMe drives driven from user space, over PCIe.
//!
//! The driver knows a drive by [`Function`] alone: its registers, its memory, and memory of the host that it reaches. So the same driver runs on
//! drives in sysfs, behind VFIO, and on the model of a drive in `rdmux-sim`. A drive that stays with the kernel's driver takes commands by [`CommandPath`].
#![deny(unsafe_code)]
#![cfg_attr(test, allow(non_snake_case, reason = "tests are named function__case"))]

#[macro_use]
pub mod mutant;

mod command;
mod dma;
mod drive;
mod function;
mod kernel;
mod memory;
mod namespace;
mod passthru;
mod prp;
mod queue;
mod sysfs;
mod vfio;

pub use command::{Action, Command, Completion, Outcome, Refused, RefusedReason};
pub use drive::{Drive, DriveError, Options, State};
pub use function::{Bar, DmaMemory, Function};
pub use kernel::{CommandPath, KernelController, KernelOpenError};
pub use memory::{Buffer, MemoryKind, PAGE, Pool};
pub use namespace::{DriveNamespace, Unusable};
pub use sysfs::{DriveOpenError, Found, Listed, Offer, PciAddress, give_back, list, open};
