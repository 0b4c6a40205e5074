//! What a node, the process that owns a device, and the applications of the host that use it say to each other: [`control`] messages over a
//! Unix socket.

pub mod control;
