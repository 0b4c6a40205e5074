//! Set Features and Get Features. 5.27 and 5.15.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use rdmux_verbs::sync::Mutex;
use rdmux_wire::nvme::{ControllerKind, FeatureEffects, NsId, Sqe, Status};

use super::{Controller, events, own_io, timeout};
use crate::target::fused::Own;
use crate::target::io::Operation;
use crate::target::namespace::COPY_FORMATS;
use crate::target::queue::Executed;

const ARBITRATION: u8 = 0x01;
const POWER_MANAGEMENT: u8 = 0x02;
const TEMPERATURE_THRESHOLD: u8 = 0x04;
const ERROR_RECOVERY: u8 = 0x05;
const WRITE_CACHE: u8 = 0x06;
const NUMBER_OF_QUEUES: u8 = 0x07;
const WRITE_ATOMICITY: u8 = 0x0a;
const ASYNC_EVENTS: u8 = 0x0b;
const TIMESTAMP: u8 = 0x0e;
const KEEP_ALIVE: u8 = 0x0f;
const HOST_BEHAVIOR: u8 = 0x16;
const HOST_ID: u8 = 0x81;
const RESERVATION_NOTICES: u8 = 0x82;
const RESERVATION_PERSISTENCE: u8 = 0x83;

/// Bytes of Host Behavior Support.
const HOST_BEHAVIOR_LEN: usize = 512;
/// Commands that wait for reservations to be kept, or to be kept no more.
const OWN_MAX: usize = 16;

/// Returns the features of a controller.
pub(super) fn supported(kind: ControllerKind) -> &'static [FeatureEffects] {
    const fn of_controller(feature: u8) -> FeatureEffects {
        FeatureEffects {
            feature,
            of_namespace: false,
            changes_capabilities: false,
        }
    }
    const fn of_namespace(feature: u8) -> FeatureEffects {
        FeatureEffects {
            of_namespace: true,
            ..of_controller(feature)
        }
    }
    const IO: [FeatureEffects; 14] = [
        of_controller(ARBITRATION),
        of_controller(POWER_MANAGEMENT),
        of_controller(TEMPERATURE_THRESHOLD),
        of_namespace(ERROR_RECOVERY),
        of_controller(WRITE_CACHE),
        of_controller(NUMBER_OF_QUEUES),
        of_controller(WRITE_ATOMICITY),
        of_controller(ASYNC_EVENTS),
        of_controller(TIMESTAMP),
        of_controller(KEEP_ALIVE),
        FeatureEffects {
            changes_capabilities: true,
            ..of_controller(HOST_BEHAVIOR)
        },
        of_controller(HOST_ID),
        of_namespace(RESERVATION_NOTICES),
        of_namespace(RESERVATION_PERSISTENCE),
    ];
    const DISCOVERY: [FeatureEffects; 3] = [
        of_controller(ASYNC_EVENTS),
        of_controller(KEEP_ALIVE),
        of_controller(HOST_ID),
    ];
    match kind {
        ControllerKind::Io => &IO,
        ControllerKind::Discovery => &DISCOVERY,
    }
}

/// Values that the host has set, and that end with a reset.
#[derive(Debug)]
pub(super) struct Features {
    /// Events that the host wants to hear about.
    pub(super) events: u32,
    arbitration: u32,
    error_recovery: u32,
    write_atomicity: u32,
    /// Thresholds over and under which the temperature would be told of; it is not measured.
    temperatures: [u16; 2],
    /// Milliseconds that the host has set, and when.
    timestamp: Option<(u64, Instant)>,
    host_behavior: Box<[u8; HOST_BEHAVIOR_LEN]>,
}

impl Default for Features {
    fn default() -> Features {
        Features {
            events: 0,
            // No limit of a burst.
            arbitration: 7,
            error_recovery: 0,
            write_atomicity: 0,
            temperatures: [u16::MAX, 0],
            timestamp: None,
            host_behavior: Box::new([0; HOST_BEHAVIOR_LEN]),
        }
    }
}

/// Returns which threshold dword 11 of Temperature Threshold selects: that of the composite temperature; others are of no sensor.
fn threshold(value: u32) -> Result<usize, Status> {
    let (sensor, kind) = (value >> 16 & 0xf, value >> 20 & 3);
    match (sensor, kind) {
        // All sensors: Set Features alone may name them.
        (0 | 0xf, 0 | 1) => Ok(kind as usize),
        _ => Err(Status::INVALID_FIELD),
    }
}

impl Controller {
    pub(super) fn set_features(&mut self, sqe: &Sqe, data: &[u8], now: Instant) -> Result<Executed, Status> {
        let (feature, saves) = (sqe.dword(10) as u8, sqe.dword(10) >> 31 != 0);
        if !supported(self.kind).iter().any(|known| known.feature == feature) {
            return Err(Status::INVALID_FIELD);
        }
        if saves {
            return Err(Status::FEATURE_NOT_SAVEABLE);
        }
        let value = sqe.dword(11);
        match feature {
            ARBITRATION => self.features.arbitration = value & 0xffff_ff07,
            // There is one power state.
            POWER_MANAGEMENT if value & 0x1f != 0 => return Err(Status::INVALID_FIELD),
            POWER_MANAGEMENT => {}
            TEMPERATURE_THRESHOLD => self.features.temperatures[threshold(value)?] = value as u16,
            // Errors of deallocated blocks, which read as zeros here.
            ERROR_RECOVERY if value & 1 << 16 != 0 => return Err(Status::INVALID_FIELD),
            ERROR_RECOVERY => self.features.error_recovery = value & 0xffff,
            // The cache is the kernel's: hosts make it durable, they do not turn it off.
            WRITE_CACHE if value & 1 == 0 => return Err(Status::FEATURE_NOT_CHANGEABLE),
            WRITE_CACHE => {}
            NUMBER_OF_QUEUES => {
                let (submission, completion) = (value & 0xffff, value >> 16);
                if submission == 0xffff || completion == 0xffff {
                    return Err(Status::INVALID_FIELD);
                }
                let queues = submission
                    .min(completion)
                    .min(u32::from(self.association.queues_max) - 1);
                return Ok(Executed::Done((queues | queues << 16).into()));
            }
            WRITE_ATOMICITY => self.features.write_atomicity = value & 1,
            ASYNC_EVENTS => {
                if value & !events(self.kind) != 0 {
                    return Err(Status::INVALID_FIELD);
                }
                self.features.events = value;
            }
            TIMESTAMP => {
                let bytes: [u8; 8] = data.try_into().map_err(|_| Status::SGL_LENGTH_INVALID)?;
                let ms = u64::from_le_bytes(bytes) & 0xffff_ffff_ffff;
                self.features.timestamp = Some((ms, now));
            }
            KEEP_ALIVE => {
                self.keep_alive = timeout(self.kind, value);
                self.heard = now;
            }
            HOST_BEHAVIOR => {
                let bytes: [u8; HOST_BEHAVIOR_LEN] =
                    data.try_into().map_err(|_| Status::SGL_LENGTH_INVALID)?;
                // CDFE.
                let formats = u16::from_le_bytes([bytes[4], bytes[5]]);
                if formats & !COPY_FORMATS != 0 {
                    return Err(Status::INVALID_FIELD);
                }
                self.association.copy_formats.store(formats, Ordering::Release);
                *self.features.host_behavior = bytes;
            }
            // It is Connect's.
            HOST_ID => return Err(Status::COMMAND_SEQUENCE_ERROR),
            RESERVATION_NOTICES => {
                self.look_at_namespaces();
                let named = sqe.nsid();
                if named != NsId::ALL && !self.known.1.contains_key(&named) {
                    return Err(Status::INVALID_NAMESPACE);
                }
                let all = self.known.1.keys().copied();
                for nsid in all.filter(|nsid| named == NsId::ALL || named == *nsid) {
                    self.association.set_notice_mask(nsid, value & 0xe);
                }
            }
            // A command that waits has no data.
            RESERVATION_PERSISTENCE if !data.is_empty() => return Err(Status::INVALID_FIELD),
            RESERVATION_PERSISTENCE => return self.set_persistence(sqe, value & 1 != 0),
            _ => return Err(Status::INVALID_FIELD),
        }
        Ok(Executed::Done(0))
    }

    /// Has the reservations of a namespace kept or not, which may wait for a medium.
    fn set_persistence(&mut self, sqe: &Sqe, persists: bool) -> Result<Executed, Status> {
        self.look_at_namespaces();
        let namespace = self.known.1.get(&sqe.nsid());
        let namespace = namespace.ok_or(Status::INVALID_NAMESPACE)?.clone();
        if self.own.len() >= OWN_MAX {
            return Err(Status::INTERRUPTED);
        }
        let own = Arc::new(Own::Persist {
            persists,
            status: Mutex::default(),
        });
        let io = own_io(namespace, Operation::Own, Some(own.clone()));
        self.own.push((sqe.cid(), own, Some(io)));
        Ok(Executed::Wait)
    }

    pub(super) fn get_features(&mut self, sqe: &Sqe, now: Instant) -> Result<Executed, Status> {
        let (feature, select) = (sqe.dword(10) as u8, sqe.dword(10) >> 8 & 7);
        // The current value only: nothing is saved.
        if select != 0 || !supported(self.kind).iter().any(|known| known.feature == feature) {
            return Err(Status::INVALID_FIELD);
        }
        let features = &self.features;
        let value: u32 = match feature {
            ARBITRATION => features.arbitration,
            POWER_MANAGEMENT => 0,
            TEMPERATURE_THRESHOLD => features.temperatures[threshold(sqe.dword(11))?].into(),
            ERROR_RECOVERY => features.error_recovery,
            WRITE_CACHE => 1,
            NUMBER_OF_QUEUES => {
                let queues = u32::from(self.association.queues_max) - 1;
                queues | queues << 16
            }
            WRITE_ATOMICITY => features.write_atomicity,
            ASYNC_EVENTS => features.events,
            TIMESTAMP => {
                // Bits 51:49: 1 if the host has set it.
                let (ms, origin) = match features.timestamp {
                    Some((ms, at)) => (ms + now.saturating_duration_since(at).as_millis() as u64, 1),
                    None => (now.saturating_duration_since(self.began).as_millis() as u64, 0),
                };
                let value = ms & 0xffff_ffff_ffff | origin << 49;
                return Ok(Executed::Send(value.to_le_bytes().to_vec()));
            }
            KEEP_ALIVE => self.keep_alive.map_or(0, |time| time.as_millis() as u32),
            HOST_BEHAVIOR => return Ok(Executed::Send(features.host_behavior.to_vec())),
            HOST_ID => return Ok(Executed::Send(self.association.host_id.0.to_vec())),
            RESERVATION_NOTICES => {
                self.look_at_namespaces();
                self.of_namespace(sqe.nsid())?;
                self.association.notice_mask(sqe.nsid())
            }
            RESERVATION_PERSISTENCE => {
                self.look_at_namespaces();
                self.of_namespace(sqe.nsid())?.into()
            }
            _ => return Err(Status::INVALID_FIELD),
        };
        Ok(Executed::Done(value.into()))
    }

    /// Returns whether the reservations of a namespace persist.
    fn of_namespace(&self, nsid: NsId) -> Result<bool, Status> {
        let namespace = self.known.1.get(&nsid).ok_or(Status::INVALID_NAMESPACE)?;
        Ok(namespace.reservations().state().1)
    }
}
