//! The `hw` provider: an RNIC, or the kernel's `rxe` or `siw`, through the system's `libibverbs` and `librdmacm`, which are opened at run
//! time. `docs/hardware.md` says what it offers.
//!
//! [`crate::abi`] has the libraries' structures, `library` their functions. `objects` and `cma` wrap their objects into values and are,
//! with `library`, the only places with unsafe code. The other modules speak the vocabulary of this crate over them.

pub(crate) mod cm;
mod cma;
pub(crate) mod cq;
pub(crate) mod device;
mod library;
pub mod metrics;
mod objects;
pub(crate) mod qp;
pub(crate) mod region;
mod resources;
pub(crate) mod sidr;
pub(crate) mod srq;

pub use device::OpenError;
pub use library::LibraryError;
