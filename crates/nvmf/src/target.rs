//! The controller's side of NVMe over Fabrics, whatever the transport: subsystems, their controllers, and the queues of these.

mod controller;
mod discovery;
mod hosts;
mod io;
mod queue;
mod subsystem;
#[cfg(test)]
pub(crate) mod tests;

pub use controller::Controller;
pub use hosts::{Authentication, Hosts, Terms};
pub use io::{Io, Operation};
pub use queue::{Admitted, Port, Queue, Step};
pub(crate) use subsystem::Running;
pub use subsystem::{Listener, Namespace, NamespaceError, Subsystem, Target, TargetError};
