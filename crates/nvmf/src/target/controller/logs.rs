//! Get Log Page.

use std::time::Instant;

use rdmux_wire::accel::JobCommand;
use rdmux_wire::nvme::{
    ControllerKind, EffectsLog, HealthLog, IDENTIFY_LEN, LogId, NsId, Opcode, Sqe, Status,
    emit_namespace_list, feature_effects, supported_logs,
};

use super::{Controller, features};
use crate::target::discovery;
use crate::target::io::SUPPORTED;
use crate::target::queue::Executed;
use crate::target::subsystem::Target;

const IO_LOGS: [LogId; 9] = [
    LogId::SUPPORTED,
    LogId::ERROR,
    LogId::HEALTH,
    LogId::FIRMWARE,
    LogId::CHANGED_NAMESPACES,
    LogId::EFFECTS,
    LogId::ANA,
    LogId::FEATURES,
    LogId::RESERVATIONS,
];
const DISCOVERY_LOGS: [LogId; 4] = [LogId::SUPPORTED, LogId::ERROR, LogId::FEATURES, LogId::DISCOVERY];

impl Controller {
    pub(super) fn log_page(&mut self, sqe: &Sqe, target: &Target, now: Instant) -> Result<Executed, Status> {
        let log = LogId(sqe.dword(10) as u8);
        let logs = match self.kind {
            ControllerKind::Io => &IO_LOGS[..],
            ControllerKind::Discovery => &DISCOVERY_LOGS[..],
        };
        if !logs.contains(&log) {
            return Err(Status::INVALID_LOG);
        }
        // Retain Asynchronous Event.
        let retains = sqe.dword(10) & 1 << 15 != 0;
        let specific = sqe.dword(10) >> 8 & 0x7f;
        let dwords = u64::from(sqe.dword(10) >> 16) | u64::from(sqe.dword(11) & 0xffff) << 16;
        let length = (dwords + 1) * 4;
        let offset = u64::from(sqe.dword(12)) | u64::from(sqe.dword(13)) << 32;
        let is_all = matches!(sqe.nsid(), NsId::NONE | NsId::ALL);
        self.look_at_namespaces();
        let discovery_generation = target.generation();
        let ana_changes = self.subsystem.ana_changes();
        let page = match log {
            LogId::SUPPORTED => supported_logs(logs),
            LogId::ERROR => vec![0; 64],
            // There is none for a namespace of its own.
            LogId::HEALTH if !is_all => return Err(Status::INVALID_FIELD),
            LogId::HEALTH => self.health(now).emit(),
            LogId::FIRMWARE => firmware(),
            LogId::EFFECTS => effects(self.subsystem.is_accelerator()),
            LogId::FEATURES => feature_effects(features::supported(self.kind)),
            LogId::CHANGED_NAMESPACES => {
                let mut bytes = vec![0; IDENTIFY_LEN];
                emit_namespace_list(self.changed.iter().copied(), &mut bytes);
                bytes
            }
            // Bit 0: groups only.
            LogId::ANA => self.subsystem.ana_log(self.local).emit(specific & 1 != 0),
            LogId::RESERVATIONS => self.association.notice(false).emit(),
            _ => discovery::log(target, &self.association.host, self.local.address.ip()),
        };
        if length > self.port.data_max().into() || offset % 4 != 0 || offset > page.len() as u64 {
            return Err(Status::INVALID_FIELD);
        }
        if !retains {
            match log {
                LogId::DISCOVERY => self.discovery_generation = discovery_generation,
                LogId::CHANGED_NAMESPACES => self.changed.clear(),
                LogId::ANA => self.ana_changes = ana_changes,
                _ => {}
            }
            self.masked.retain(|event| event.log() != log);
        }
        if log == LogId::RESERVATIONS {
            // The notices that were read are gone, whatever becomes of the event.
            self.association.notice(true);
        }
        let mut part = page[offset as usize..].to_vec();
        part.resize(length as usize, 0);
        Ok(Executed::Send(part))
    }

    fn health(&self, now: Instant) -> HealthLog {
        HealthLog {
            power_on_hours: now.saturating_duration_since(self.began).as_secs() / 3600,
            ..self.association.health()
        }
    }
}

/// Firmware slots: the first runs.
fn firmware() -> Vec<u8> {
    let mut bytes = vec![0; 512];
    bytes[0] = 1;
    let revision = env!("CARGO_PKG_VERSION").as_bytes();
    let len = revision.len().min(8);
    bytes[8..16].fill(b' ');
    bytes[8..8 + len].copy_from_slice(&revision[..len]);
    bytes
}

/// Returns the log of commands, with those of jobs if there are accelerators.
fn effects(has_accelerators: bool) -> Vec<u8> {
    let mut bytes = vec![0; 4096];
    let mut io = SUPPORTED.to_vec();
    if has_accelerators {
        io.extend([(JobCommand::SUBMIT, true), (JobCommand::FETCH, false)]);
    }
    EffectsLog {
        admin: &[
            Opcode::GET_LOG_PAGE,
            Opcode::IDENTIFY,
            Opcode::ABORT,
            Opcode::SET_FEATURES,
            Opcode::GET_FEATURES,
            Opcode::ASYNC_EVENT_REQUEST,
            Opcode::KEEP_ALIVE,
        ],
        io: &io,
    }
    .emit(&mut bytes);
    bytes
}
