//! The controller's side of NVMe over Fabrics, whatever the transport: subsystems, their controllers, and the queues of these.

mod ana;
mod association;
mod controller;
mod discovery;
mod fence;
mod fused;
mod hosts;
mod io;
mod keys;
mod limit;
mod namespace;
mod passed;
mod queue;
mod reservation;
mod subsystem;
mod tally;
#[cfg(test)]
pub(crate) mod tests;
mod view;

pub(crate) use ana::ANA_GROUP_MAX;
pub use ana::AnaRule;
pub use controller::Controller;
pub use discovery::Referral;
pub(crate) use fence::Fence;
pub use hosts::{Authentication, Hosts, Terms};
pub(crate) use io::Running;
pub use io::{Io, Operation};
pub use limit::Rates;
pub(crate) use namespace::{COPY_BYTES_MAX, Medium};
pub use namespace::{Namespace, Seat, SharedNamespace};
pub(crate) use queue::{ADMIN_ENTRIES, IO_QUEUES_MAX};
pub use queue::{Admitted, Port, Queue, Step};
pub use reservation::{ReservationState, ReservationStore};
pub(crate) use subsystem::{CNTLID_MAX, NAMESPACES_MAX};
pub use subsystem::{ControllerInfo, Listener, NamespaceError, Subsystem, Target, TargetError};
