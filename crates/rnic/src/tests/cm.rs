//! Connections between two devices.
