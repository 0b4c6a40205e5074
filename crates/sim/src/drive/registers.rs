//! The registers of BAR 0, and what writes of them do. NVMe Base 2.0, 3.1.3; NVMe over PCIe Transport 1.0 (PCIe), 3.1.

use rdmux_rnic::ledger::{Class, Route};
use rdmux_wire::nvme::{
    Capabilities, CmbControl, Configuration, ControllerStatus, PMR_ENABLE, PMR_NOT_READY, PMR_SPACE,
    PcieCapabilities, PmrCapabilities, Register, VERSION_1_4,
};

use super::bus::PAGE;
use super::controller::{Completion, Controller, Health, NEVER, Submission};
use super::{CMB_BAR_ADDRESS, PMR_BAR};

/// Registers that the host writes, and states that follow from them.
#[derive(Debug)]
pub(super) struct Registers {
    pub(super) configuration: Configuration,
    /// CSTS.RDY.
    pub(super) is_ready: bool,
    /// CSTS.SHST.
    shutdown: u32,
    /// It was shut down, and has not started since.
    pub(super) was_shut_down: bool,
    /// Time at which the change that the host has asked for takes effect.
    pub(super) due: u64,
    admin_queues: u32,
    admin_submission: u64,
    admin_completion: u64,
    cmb_control: u64,
    pmr_control: u32,
    pmr_space: u64,
    pmr_ready_at: u64,
}

impl Default for Registers {
    fn default() -> Registers {
        Registers {
            configuration: Configuration(0),
            is_ready: false,
            shutdown: 0,
            was_shut_down: false,
            due: NEVER,
            admin_queues: 0,
            admin_submission: 0,
            admin_completion: 0,
            cmb_control: 0,
            pmr_control: 0,
            pmr_space: 0,
            pmr_ready_at: NEVER,
        }
    }
}

/// Replaces half of a register of 8 bytes.
fn set_half(register: &mut u64, upper: bool, value: u32) {
    let shift = if upper { 32 } else { 0 };
    *register = *register & !(0xffff_ffff << shift) | u64::from(value) << shift;
}

impl Controller {
    fn capabilities(&self) -> u64 {
        let capabilities = PcieCapabilities {
            common: Capabilities {
                queue_entries: self.shape.queue_entries,
                timeout: self.shape.timeout,
            },
            contiguous: true,
            doorbell_stride: self.shape.doorbell_stride,
            nvm: true,
            page_shift_min: 12,
            pmr: self.pmr.is_some(),
            cmb: self.shape.cmb.is_some_and(|cmb| !cmb.is_legacy),
        };
        capabilities.register()
    }

    fn status(&self) -> u32 {
        let ready = if self.registers.is_ready {
            ControllerStatus::READY
        } else {
            0
        };
        let fatal = match self.health {
            Health::Well => 0,
            _ => ControllerStatus::FATAL,
        };
        ready | fatal | self.registers.shutdown
    }

    /// Returns CMBLOC and CMBSZ: zeros until the host asks for them, but with the scheme before 1.4.
    fn cmb(&self) -> (u32, u32) {
        let is_shown = |is_legacy: bool| is_legacy || self.registers.cmb_control & CmbControl::REGISTERS != 0;
        let cmb = self.shape.cmb.filter(|cmb| is_shown(cmb.is_legacy));
        cmb.map_or((0, 0), |cmb| cmb.layout.registers())
    }

    fn pmr_capabilities(&self) -> u32 {
        let capabilities = self.pmr.as_ref().map(|_| PmrCapabilities {
            bar: PMR_BAR,
            reads: true,
            writes: true,
            space: true,
            timeout_ms: 500,
        });
        capabilities.map_or(0, |capabilities| capabilities.register())
    }

    fn pmr_status(&self) -> u32 {
        match self.now >= self.registers.pmr_ready_at {
            true => 0,
            false => PMR_NOT_READY,
        }
    }

    /// Reads 4 bytes.
    pub(super) fn read(&mut self, offset: u32) -> u32 {
        if self.health == Health::Gone {
            return u32::MAX;
        }
        if !offset.is_multiple_of(4) {
            self.violate(format!("a register is read at {offset:#x}"));
        }
        let upper = offset & 4 != 0;
        let half = |register: u64| (register >> if upper { 32 } else { 0 }) as u32;
        let registers = &self.registers;
        match Register(offset) {
            Register(0x00 | 0x04) => half(self.capabilities()),
            Register::VERSION => VERSION_1_4,
            Register::CONFIGURATION => registers.configuration.0,
            Register::STATUS => self.status(),
            Register::ADMIN_QUEUES => registers.admin_queues,
            Register(0x28 | 0x2c) => half(registers.admin_submission),
            Register(0x30 | 0x34) => half(registers.admin_completion),
            Register::CMB_LOCATION => self.cmb().0,
            Register::CMB_SIZE => self.cmb().1,
            Register(0x50 | 0x54) => half(registers.cmb_control),
            Register::PMR_CAPABILITIES => self.pmr_capabilities(),
            Register::PMR_CONTROL => registers.pmr_control,
            Register::PMR_STATUS => self.pmr_status(),
            Register::PMR_CONTROL_LOW => registers.pmr_space as u32,
            Register::PMR_CONTROL_HIGH => (registers.pmr_space >> 32) as u32,
            _ => 0,
        }
    }

    /// Writes 4 bytes.
    pub(super) fn write(&mut self, offset: u32, value: u32) {
        if self.health == Health::Gone {
            return;
        }
        if !offset.is_multiple_of(4) {
            return self.violate(format!("a register is written at {offset:#x}"));
        }
        if offset >= 0x1000 {
            return self.ring(offset, value);
        }
        let is_enabled = self.registers.configuration.is_enabled();
        let upper = offset & 4 != 0;
        match Register(offset) {
            Register::CONFIGURATION => return self.configure(Configuration(value)),
            Register(0x50 | 0x54) => {
                set_half(&mut self.registers.cmb_control, upper, value);
                return self.show_cmb();
            }
            Register::PMR_CONTROL => return self.enable_pmr(value),
            Register::PMR_CONTROL_LOW => {
                set_half(&mut self.registers.pmr_space, false, value);
                return self.show_pmr();
            }
            Register::PMR_CONTROL_HIGH => return set_half(&mut self.registers.pmr_space, true, value),
            Register(0x24..=0x34) if is_enabled => {
                return self.violate("the admin queues are changed while the controller is enabled");
            }
            _ => {}
        }
        let registers = &mut self.registers;
        match Register(offset) {
            Register::ADMIN_QUEUES => registers.admin_queues = value,
            Register(0x28 | 0x2c) => set_half(&mut registers.admin_submission, upper, value),
            Register(0x30 | 0x34) => set_half(&mut registers.admin_completion, upper, value),
            // Interrupt masks: nothing here interrupts.
            Register(0x0c | 0x10) => {}
            _ => self.violate(format!("register {offset:#x} is written, which is none")),
        }
    }

    /// Shows the CMB where the host wants it. 8.5.
    fn show_cmb(&mut self) {
        let (Some(memory), Some(cmb)) = (&self.cmb, self.shape.cmb) else {
            return;
        };
        let layout = cmb.layout;
        let control = CmbControl(self.registers.cmb_control);
        let at = match cmb.is_legacy {
            true => Some(CMB_BAR_ADDRESS + layout.offset),
            false => (control.0 & CmbControl::SPACE != 0).then_some(control.address()),
        };
        memory.set_decoded(cmb.is_legacy || control.0 & CmbControl::REGISTERS != 0);
        self.bus.show(
            memory,
            at.map(|address| (address..address + layout.bytes, layout.offset)),
        );
    }

    fn enable_pmr(&mut self, value: u32) {
        self.registers.pmr_control = value & PMR_ENABLE;
        self.registers.pmr_ready_at = match value & PMR_ENABLE {
            0 => NEVER,
            _ => self.now + self.dice.below(self.faults.latency_ns.max(1)),
        };
        if let Some(memory) = &self.pmr {
            memory.set_decoded(value & PMR_ENABLE != 0);
        }
        self.show_pmr();
    }

    /// Shows the PMR where the host wants it. 8.14.
    fn show_pmr(&mut self) {
        let Some(memory) = &self.pmr else {
            return;
        };
        let is_on = self.registers.pmr_control & PMR_ENABLE != 0;
        let space = self.registers.pmr_space;
        let at = (is_on && space & u64::from(PMR_SPACE) != 0).then_some(space & !(PAGE - 1));
        let bytes = rdmux_rnic::Memory::len(&**memory);
        self.bus
            .show(memory, at.map(|address| (address..address + bytes, 0)));
    }

    /// Shows what needs no request of the host.
    pub(super) fn power_on(&mut self) {
        self.show_cmb();
        self.show_pmr();
    }

    fn configure(&mut self, new: Configuration) {
        let old = self.registers.configuration;
        self.registers.configuration = new;
        let delay = self.dice.below(self.faults.latency_ns.max(1));
        if new.is_enabled() != old.is_enabled() {
            let stuck = if new.is_enabled() { 0 } else { self.stuck_ns() };
            self.registers.due = self.now + delay + stuck;
        }
        if new.is_shutting_down() && !old.is_shutting_down() {
            self.registers.shutdown = 1 << 2;
            self.registers.due = self.registers.due.min(self.now + delay);
        } else if !new.is_shutting_down() {
            self.registers.shutdown = 0;
        }
    }

    /// What the host has asked for takes effect. Returns true if something did.
    pub(super) fn settle(&mut self) -> bool {
        if self.registers.due > self.now {
            return false;
        }
        self.registers.due = NEVER;
        let configuration = self.registers.configuration;
        if configuration.is_shutting_down() && self.registers.shutdown == 1 << 2 {
            self.media.flush();
            self.registers.shutdown = ControllerStatus::SHUT_DOWN;
            self.registers.was_shut_down = true;
            self.counts.shutdowns += 1;
        }
        match (configuration.is_enabled(), self.registers.is_ready) {
            (true, false) if self.health == Health::Well => self.start(),
            (false, _) => self.reset(),
            _ => {}
        }
        true
    }

    /// The controller becomes ready, with its admin queues.
    fn start(&mut self) {
        let registers = &self.registers;
        let sizes = registers.admin_queues;
        let (sq, cq) = ((sizes & 0xfff) + 1, (sizes >> 16 & 0xfff) + 1);
        let (sq_at, cq_at) = (registers.admin_submission, registers.admin_completion);
        let is_right = registers.configuration.is_supported() && sq > 1 && cq > 1;
        if !is_right || !sq_at.is_multiple_of(PAGE) || !cq_at.is_multiple_of(PAGE) {
            let what = format!("the controller is enabled with {registers:?}");
            self.violate(what);
            return self.fail();
        }
        let submission = Submission {
            address: sq_at,
            entries: sq,
            head: 0,
            tail: 0,
            cq: 0,
        };
        self.sqs.insert(0, submission);
        self.cqs.insert(0, Completion::new(cq_at, cq));
        self.write_cache = self.shape.has_cache;
        self.registers.is_ready = true;
        self.registers.was_shut_down = false;
        self.counts.starts += 1;
    }

    /// All queues and commands end: from here on nothing of them acts.
    fn reset(&mut self) {
        self.forget_commands();
        self.sqs.clear();
        self.cqs.clear();
        if let Some(cmb) = &self.cmb {
            cmb.forget_queues();
        }
        self.registers.is_ready = false;
        if self.health == Health::Fatal {
            self.health = Health::Well;
        }
    }

    /// A doorbell is written. PCIe 3.1.2.
    fn ring(&mut self, offset: u32, value: u32) {
        self.ledger.book(Route::Processor, Class::Doorbell, 4);
        self.counts.doorbells += 1;
        let stride = self.shape.doorbell_stride;
        let index = (offset - 0x1000) / stride;
        let id = (index / 2) as u16;
        if !self.registers.is_ready || !self.registers.configuration.is_enabled() {
            return self.violate(format!(
                "the doorbell at {offset:#x} is written while the controller is not ready"
            ));
        }
        let is_right = match (offset - 0x1000).is_multiple_of(stride) {
            false => false,
            true if index.is_multiple_of(2) => self.sqs.get_mut(&id).is_some_and(|sq| sq.advance(value)),
            true => self.cqs.get_mut(&id).is_some_and(|cq| cq.advance(value)),
        };
        if !is_right {
            self.violate(format!("the doorbell at {offset:#x} gets {value}"));
            // Error event, invalid value of a doorbell. Figure 146.
            self.report_event(1 << 8);
        }
    }
}

impl Submission {
    /// Takes the host's tail. Returns false if it is not valid: beyond the queue, or with more commands than there is room for.
    fn advance(&mut self, tail: u32) -> bool {
        let used = |tail: u32| (tail + self.entries - self.head) % self.entries;
        let is_right = tail < self.entries && used(tail) >= used(self.tail);
        if is_right {
            self.tail = tail;
        }
        is_right
    }
}

impl Completion {
    pub(super) fn new(address: u64, entries: u32) -> Completion {
        Completion {
            address,
            entries,
            tail: 0,
            head: 0,
            phase: true,
        }
    }

    /// Takes the host's head. Returns false if it is beyond what was completed.
    fn advance(&mut self, head: u32) -> bool {
        let left = |head: u32| (self.tail + self.entries - head) % self.entries;
        let is_right = head < self.entries && left(head) <= left(self.head);
        if is_right {
            self.head = head;
        }
        is_right
    }
}
