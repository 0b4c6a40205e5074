//! Admin commands. NVMe Base 2.0, 5.

use rdmux_wire::nvme::{
    AnaLimits, Cid, Cns, ControllerKind, IDENTIFY_LEN, IdentifyController, IdentifyNamespace,
    NamespaceIdentifiers, Nqn, NsId, Opcode, Sqe, Status, VERSION_1_4, emit_namespace_list,
};

use super::bus::{PAGE, Place};
use super::controller::{Completion, Controller, EVENT_REQUESTS, Submission, Work};

const DELETE_SUBMISSION_QUEUE: Opcode = Opcode(0x00);
const DELETE_COMPLETION_QUEUE: Opcode = Opcode(0x04);
/// Completion queue invalid. Figure 97 and so on: statuses of their commands.
const CQ_INVALID: Status = Status(0x100);
const QUEUE_ID_INVALID: Status = Status(0x101);
const QUEUE_SIZE_INVALID: Status = Status(0x102);
const QUEUE_DELETION_INVALID: Status = Status(0x10c);
/// Feature: volatile write cache.
const WRITE_CACHE: u32 = 0x06;
/// Feature: number of queues.
const NUMBER_OF_QUEUES: u32 = 0x07;
/// Feature: asynchronous events.
const EVENT_CONFIGURATION: u32 = 0x0b;

/// The one namespace.
pub(super) const NAMESPACE: NsId = NsId(1);

/// Returns the bytes of data that a command has.
pub(super) fn data_len(sqe: &Sqe) -> usize {
    match sqe.opcode() {
        Opcode::IDENTIFY => IDENTIFY_LEN,
        Opcode::GET_LOG_PAGE => {
            let dwords = u64::from(sqe.dword(10) >> 16) | u64::from(sqe.dword(11) & 0xffff) << 16;
            // No log is longer than a page.
            ((dwords + 1) * 4).min(PAGE) as usize
        }
        _ => 0,
    }
}

impl Controller {
    pub(super) fn begin_admin(&mut self, sqe: &Sqe) -> Work {
        let result = match sqe.opcode() {
            Opcode::IDENTIFY => return self.identify(sqe),
            Opcode::GET_LOG_PAGE => return get_log_page(sqe),
            Opcode::ASYNC_EVENT_REQUEST => return self.request_event(),
            Opcode::CREATE_COMPLETION_QUEUE => self.create_cq(sqe),
            Opcode::CREATE_SUBMISSION_QUEUE => self.create_sq(sqe),
            DELETE_SUBMISSION_QUEUE => self.delete_sq(sqe),
            DELETE_COMPLETION_QUEUE => self.delete_cq(sqe),
            Opcode::ABORT => {
                let (sq, cid) = (sqe.dword(10) as u16, Cid((sqe.dword(10) >> 16) as u16));
                let is_aborted = self.abort(sq, cid);
                self.counts.aborts += u64::from(is_aborted);
                Ok(u64::from(!is_aborted))
            }
            Opcode::GET_FEATURES => self.get_feature(sqe),
            Opcode::SET_FEATURES => self.set_feature(sqe),
            _ => Err(Status::INVALID_OPCODE.do_not_retry()),
        };
        match result {
            Ok(result) => Work::None(Status::SUCCESS, result),
            Err(status) => Work::None(status, 0),
        }
    }

    fn request_event(&self) -> Work {
        // This one does not wait yet.
        match self.event_requests() < EVENT_REQUESTS {
            true => Work::Waits,
            false => Work::None(Status::EVENT_LIMIT, 0),
        }
    }

    fn identify(&self, sqe: &Sqe) -> Work {
        let mut bytes = vec![0; IDENTIFY_LEN];
        let is_ours = sqe.nsid() == NAMESPACE;
        match Cns((sqe.dword(10) & 0xff) as u8) {
            Cns::CONTROLLER => self.controller().emit(&mut bytes),
            // Identify of a namespace that is not there returns zeros. 5.17.2.2.
            Cns::NAMESPACE if is_ours => self.namespace().emit(&mut bytes),
            Cns::NAMESPACE => {}
            Cns::ACTIVE_NAMESPACES if sqe.nsid() < NAMESPACE => {
                emit_namespace_list([NAMESPACE].into_iter(), &mut bytes);
            }
            Cns::ACTIVE_NAMESPACES => {}
            Cns::NAMESPACE_IDENTIFIERS if is_ours => {
                let (nguid, uuid) = (self.namespace().nguid, [0xd8; 16]);
                NamespaceIdentifiers { nguid, uuid }.emit(&mut bytes);
            }
            _ => return Work::None(Status::INVALID_FIELD.do_not_retry(), 0),
        }
        Work::ToHost(bytes)
    }

    fn controller(&self) -> IdentifyController {
        IdentifyController {
            serial: "model".to_owned(),
            model: "rdmux model of a drive".to_owned(),
            firmware: "1".to_owned(),
            multipath: 0,
            mdts: self.shape.mdts,
            cntlid: 0,
            version: VERSION_1_4,
            events: 0,
            attributes: 0,
            kind: ControllerKind::Io,
            aborts: 4,
            event_requests: EVENT_REQUESTS as u8,
            log_attributes: 0,
            keep_alive: 0,
            commands: 0,
            namespaces: 1,
            optional_commands: IdentifyController::DATASET_MANAGEMENT | IdentifyController::WRITE_ZEROES,
            fused: 0,
            has_write_cache: self.shape.has_cache,
            copy_formats: 0,
            sgls: 0,
            ana: AnaLimits {
                transition_s: 0,
                capabilities: 0,
                group_max: 0,
                groups: 0,
                namespaces: 0,
            },
            subsystem: Nqn::new("nqn.2014-08.org.nvmexpress:model").expect("a name"),
            capsule_bytes: 0,
        }
    }

    fn namespace(&self) -> IdentifyNamespace {
        IdentifyNamespace {
            blocks: self.media.blocks(),
            block_shift: self.media.block_shift(),
            zeroes: true,
            is_shared: false,
            is_protected: false,
            reservations: 0,
            ana_group: 0,
            copy_blocks: (0, 0),
            copy_ranges: 1,
            fused_blocks: 1,
            nguid: [0xd7; 16],
            accelerator: None,
        }
    }

    /// Creates an I/O completion queue. 5.4.
    fn create_cq(&mut self, sqe: &Sqe) -> Result<u64, Status> {
        let (id, entries) = self.queue(sqe)?;
        if self.cqs.contains_key(&id) {
            return Err(QUEUE_ID_INVALID.do_not_retry());
        }
        // The completion queue lies in the host's memory: CMBSZ.CQS is not set.
        let address = self.queue_memory(sqe, entries as usize * 16)?;
        if matches!(self.bus.find(address), Some(Place::Own(..))) {
            return Err(Status::INVALID_FIELD.do_not_retry());
        }
        self.cqs.insert(id, Completion::new(address, entries));
        Ok(0)
    }

    /// Creates an I/O submission queue. 5.5.
    fn create_sq(&mut self, sqe: &Sqe) -> Result<u64, Status> {
        let (id, entries) = self.queue(sqe)?;
        let cq = (sqe.dword(11) >> 16) as u16;
        if self.sqs.contains_key(&id) {
            return Err(QUEUE_ID_INVALID.do_not_retry());
        }
        if cq == 0 || !self.cqs.contains_key(&cq) {
            return Err(CQ_INVALID.do_not_retry());
        }
        let bytes = entries as usize * 64;
        let address = self.queue_memory(sqe, bytes)?;
        if let Some(Place::Own(memory, offset)) = self.bus.find(address) {
            if !self.shape.cmb.is_some_and(|cmb| cmb.layout.submission_queues) {
                return Err(Status::INVALID_FIELD.do_not_retry());
            }
            memory.add_queue(offset..offset + bytes as u64);
            self.counts.queues_in_drive += 1;
        }
        let submission = Submission {
            address,
            entries,
            head: 0,
            tail: 0,
            cq,
        };
        self.sqs.insert(id, submission);
        Ok(0)
    }

    /// Reads id and entries of a queue.
    fn queue(&self, sqe: &Sqe) -> Result<(u16, u32), Status> {
        let (id, entries) = (sqe.dword(10) as u16, (sqe.dword(10) >> 16) + 1);
        if id == 0 || id > self.shape.queues {
            return Err(QUEUE_ID_INVALID.do_not_retry());
        }
        match (2..=self.shape.queue_entries).contains(&entries) {
            true => Ok((id, entries)),
            false => Err(QUEUE_SIZE_INVALID.do_not_retry()),
        }
    }

    /// Reads the address of a queue, of which all bytes must follow each other.
    fn queue_memory(&mut self, sqe: &Sqe, bytes: usize) -> Result<u64, Status> {
        let address = sqe.prps()[0];
        // PC: CAP.CQR wants it.
        if sqe.dword(11) & 1 == 0 || !address.is_multiple_of(PAGE) {
            return Err(Status::INVALID_FIELD.do_not_retry());
        }
        for page in (address..address + bytes as u64).step_by(PAGE as usize) {
            if self.bus.find(page).is_none() {
                self.violate(format!(
                    "a queue of {bytes} bytes at {address:#x} has no memory at {page:#x}"
                ));
                return Err(Status::INVALID_FIELD.do_not_retry());
            }
        }
        Ok(address)
    }

    fn delete_sq(&mut self, sqe: &Sqe) -> Result<u64, Status> {
        let id = sqe.dword(10) as u16;
        if id == 0 || self.sqs.remove(&id).is_none() {
            return Err(QUEUE_ID_INVALID.do_not_retry());
        }
        self.forget_commands_of(id);
        Ok(0)
    }

    fn delete_cq(&mut self, sqe: &Sqe) -> Result<u64, Status> {
        let id = sqe.dword(10) as u16;
        if self.sqs.values().any(|sq| sq.cq == id) {
            return Err(QUEUE_DELETION_INVALID.do_not_retry());
        }
        match id != 0 && self.cqs.remove(&id).is_some() {
            true => Ok(0),
            false => Err(QUEUE_ID_INVALID.do_not_retry()),
        }
    }

    /// Returns the number of queues as the feature has it: both 0-based.
    fn number_of_queues(&self) -> u64 {
        let last = u64::from(self.shape.queues) - 1;
        last | last << 16
    }

    fn get_feature(&self, sqe: &Sqe) -> Result<u64, Status> {
        match sqe.dword(10) & 0xff {
            NUMBER_OF_QUEUES => Ok(self.number_of_queues()),
            WRITE_CACHE if self.shape.has_cache => Ok(self.write_cache.into()),
            EVENT_CONFIGURATION => Ok(self.event_config.into()),
            _ => Err(Status::INVALID_FIELD.do_not_retry()),
        }
    }

    fn set_feature(&mut self, sqe: &Sqe) -> Result<u64, Status> {
        match sqe.dword(10) & 0xff {
            NUMBER_OF_QUEUES if !self.sqs.keys().chain(self.cqs.keys()).all(|id| *id == 0) => {
                Err(Status::COMMAND_SEQUENCE_ERROR.do_not_retry())
            }
            NUMBER_OF_QUEUES => Ok(self.number_of_queues()),
            WRITE_CACHE if self.shape.has_cache => {
                self.write_cache = sqe.dword(11) & 1 != 0;
                if !self.write_cache {
                    self.media.flush();
                }
                Ok(0)
            }
            EVENT_CONFIGURATION => {
                self.event_config = sqe.dword(11);
                Ok(0)
            }
            _ => Err(Status::INVALID_FIELD.do_not_retry()),
        }
    }
}

/// Returns a log without entries: of errors, of the health, of the firmware's slots.
fn get_log_page(sqe: &Sqe) -> Work {
    match sqe.dword(10) & 0xff {
        1..=3 => Work::ToHost(vec![0; data_len(sqe)]),
        _ => Work::None(Status::INVALID_LOG.do_not_retry(), 0),
    }
}
