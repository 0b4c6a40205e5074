//! The engine behind its port. All packets that arrive or leave and all queries of timers pass through here, so that fault injection can
//! act between the engine and its carriers, UDP and shared memory alike, and captures see every packet. Without faults and captures the
//! cost is one test of a pointer. Faults, captures and traces see the packets that a coalesced one stands for.

use std::net::IpAddr;
use std::ops::{Deref, DerefMut};

use rdmux_rnic::faults::{Fate, Spec};
use rdmux_rnic::trace::{Injection, Note};
use rdmux_rnic::{Arrival, Cause, Path, Qpn, RingBytes, Rnic, Status, Taken, Time, Train, TransmitBuf};
use rdmux_verbs::resources::DeviceAt;
use rdmux_verbs::{AsyncEvent, FaultCounts};
use rdmux_wire::roce::{Packet, coalesced};

use super::capture::Capture;
use super::faults::{Faults, Leaving};
use super::trace::{self, Level};

/// The engine, and the faults and captures between it and its carriers.
#[derive(Debug)]
pub(crate) struct RnicPort {
    rnic: Rnic,
    /// `None` while there are neither faults nor a capture.
    watch: Option<Box<Watch>>,
    /// Set while the network accepts no packets.
    is_down: bool,
    /// Set when the trace notes every packet.
    traces_packets: bool,
}

#[derive(Debug, Default)]
struct Watch {
    faults: Option<Faults>,
    capture: Option<Capture>,
}

impl Deref for RnicPort {
    type Target = Rnic;

    #[inline]
    fn deref(&self) -> &Rnic {
        &self.rnic
    }
}

impl DerefMut for RnicPort {
    #[inline]
    fn deref_mut(&mut self) -> &mut Rnic {
        &mut self.rnic
    }
}

impl RnicPort {
    pub(crate) fn new(mut rnic: Rnic, spec: Option<Spec>, now: Time) -> RnicPort {
        if let Some(spec) = &spec {
            rnic.set_faults(spec);
        }
        let watch = spec.map(|spec| {
            Box::new(Watch {
                faults: Some(Faults::new(spec, now)),
                capture: None,
            })
        });
        RnicPort {
            rnic,
            watch,
            is_down: false,
            traces_packets: false,
        }
    }

    fn faults(&mut self) -> Option<&mut Faults> {
        self.watch.as_mut()?.faults.as_mut()
    }

    /// Returns whether fault injection decides on each packet.
    #[inline]
    pub(crate) fn has_faults(&self) -> bool {
        self.watch.as_ref().is_some_and(|watch| watch.faults.is_some())
    }

    pub(crate) fn fault_counts(&self) -> Option<FaultCounts> {
        Some(self.watch.as_ref()?.faults.as_ref()?.counts)
    }

    /// Returns whether all requests must be carried out by packets, without direct access to shared memory.
    pub(crate) fn keeps_to_packets(&self) -> bool {
        self.watch.is_some()
    }

    /// Makes all requests come to the device, and discards the grants of the peers on this host; requests ask for them anew.
    pub(crate) fn forget_grants(&mut self, now: Time) {
        let qpns: Vec<Qpn> = self.rnic.qpns().collect();
        for qpn in qpns {
            if self.rnic.is_local(qpn) {
                self.rnic.forget_grants(now, qpn);
            }
        }
    }

    // Notes.

    /// Starts the trace of the device, if one can be kept.
    pub(super) fn trace(&mut self, level: Level, device: DeviceAt, now: Time) {
        // Without a place for the file the device has no trace.
        if let Some(Ok(trace)) = trace::begin(level, device, now) {
            self.rnic.set_tracer(Some(Box::new(trace)));
            self.traces_packets = level == Level::Packets;
        }
    }

    #[cold]
    fn note_packets(&mut self, now: Time, sent: bool, local: bool, bytes: &[u8], segment_bytes: usize) {
        each_packet(bytes, segment_bytes, local, |packet| {
            let Ok(parsed) = Packet::parse(packet) else {
                return;
            };
            let own = if sent { None } else { Some(parsed.bth.dest_qpn) };
            // A packet names only the queue pair that it is for.
            let qpn = own.or_else(|| self.sender_of(parsed.bth.dest_qpn));
            let note = Note::Packet {
                sent,
                local,
                opcode: parsed.bth.opcode.code(),
                psn: parsed.bth.psn,
                bytes: packet.len() as u32,
            };
            self.rnic.note(now, qpn.unwrap_or(Qpn::new(0)), note);
        });
    }

    /// Returns a queue pair whose peer has this number; peers at several addresses may have the same one.
    fn sender_of(&self, dest: Qpn) -> Option<Qpn> {
        self.rnic
            .qpns()
            .find(|qpn| self.rnic.query_qp(*qpn).is_some_and(|info| info.dest_qpn == dest))
    }

    /// Notes the faults that were injected into a packet.
    fn note_fate(&mut self, now: Time, fate: &Fate, sent: bool) {
        let what = [
            (fate.lost, Injection::Lost),
            (fate.corrupted.is_some(), Injection::Corrupted),
            (fate.duplicated.is_some(), Injection::Duplicated),
            (fate.reordered.is_some(), Injection::Reordered),
        ];
        for (_, what) in what.into_iter().filter(|(done, _)| *done) {
            self.rnic.note(now, Qpn::new(0), Note::Injected { what, sent });
        }
    }

    // Captures.

    pub(super) fn is_captured(&self) -> bool {
        self.watch.as_ref().is_some_and(|watch| watch.capture.is_some())
    }

    /// Starts to capture the packets that arrive and leave.
    pub(super) fn capture(&mut self, capture: Capture) {
        self.watch.get_or_insert_default().capture = Some(capture);
    }

    /// Waits, for a limited time, until everything that was captured is in the file.
    pub(super) fn sync_capture(&self) {
        if let Some(capture) = self.watch.as_ref().and_then(|watch| watch.capture.as_ref()) {
            capture.sync();
        }
    }

    pub(super) fn end_capture(&mut self) -> Option<Capture> {
        let capture = self.watch.as_mut()?.capture.take();
        if !self.has_faults() {
            self.watch = None;
        }
        capture
    }

    /// Records in the trace and the capture that the engine has sent a train.
    #[inline]
    pub(crate) fn show_sent(&mut self, now: Time, train: &Train, shared: bool, bytes: &[u8]) {
        if self.traces_packets {
            self.note_packets(now, true, shared, bytes, train.segment_bytes);
        }
        if let Some(watch) = &self.watch
            && let Some(capture) = &watch.capture
        {
            if !shared {
                capture.sent(&self.rnic, &train.path, shared, bytes, train.segment_bytes, None);
                return;
            }
            each_packet(bytes, train.segment_bytes, shared, |packet| {
                capture.sent(&self.rnic, &train.path, shared, packet, packet.len(), None);
            });
        }
    }

    /// Records in the capture that a queue pair has gone to error.
    pub(crate) fn show_failed(&self, qpn: Qpn, status: Status, cause: Cause) {
        if let Some(watch) = &self.watch
            && let Some(capture) = &watch.capture
        {
            capture.failed(self.rnic.config().address, qpn, status, cause);
        }
    }

    /// Returns whether the network accepts no packets, or fault injection keeps the port down.
    pub(crate) fn is_down(&self) -> bool {
        let faults = self.watch.as_ref().and_then(|watch| watch.faults.as_ref());
        self.is_down || faults.is_some_and(Faults::is_down)
    }

    /// Records whether the network accepts no packets; returns the state recorded before.
    pub(crate) fn set_down(&mut self, now: Time, is_down: bool) -> bool {
        if is_down != self.is_down {
            self.rnic.note(now, Qpn::new(0), Note::Port { active: !is_down });
        }
        std::mem::replace(&mut self.is_down, is_down)
    }

    /// As [`Rnic::handle_datagram`].
    pub(crate) fn handle_datagram(
        &mut self,
        now: Time,
        src: IpAddr,
        src_port: u16,
        bytes: &[u8],
        segment_bytes: usize,
    ) {
        let arrival = Arrival {
            src,
            src_port,
            dst: self.rnic.config().address,
            traffic_class: 0,
            bytes,
            segment_bytes,
            local: false,
        };
        self.handle_arrival(now, &arrival);
    }

    /// As [`Rnic::handle_arrival`]; packets that fault injection holds back arrive later, by [`RnicPort::handle_timeout`].
    #[inline]
    pub(crate) fn handle_arrival(&mut self, now: Time, arrival: &Arrival<'_>) {
        if self.traces_packets {
            self.note_packets(now, false, arrival.local, arrival.bytes, arrival.segment_bytes);
        }
        if self.watch.is_none() {
            self.rnic.handle_arrival(now, arrival);
        } else {
            self.watch_arrival(now, arrival);
        }
    }

    #[cold]
    fn watch_arrival(&mut self, now: Time, arrival: &Arrival<'_>) {
        let Some(watch) = &mut self.watch else { return };
        let Watch { faults, capture } = &mut **watch;
        let Some(faults) = faults else {
            if let Some(capture) = capture {
                each_packet(arrival.bytes, arrival.segment_bytes, arrival.local, |bytes| {
                    let packet = Arrival {
                        bytes,
                        segment_bytes: bytes.len(),
                        ..*arrival
                    };
                    capture.arrived(&self.rnic, &packet, None);
                });
            }
            return self.rnic.handle_arrival(now, arrival);
        };
        let mut fates = Vec::new();
        each_packet(arrival.bytes, arrival.segment_bytes, arrival.local, |bytes| {
            let packet = Arrival {
                bytes,
                segment_bytes: bytes.len(),
                ..*arrival
            };
            let fate = faults.arrive(now, &packet);
            if let Some(capture) = capture {
                capture.arrived(&self.rnic, &packet, Some(&fate));
            }
            fates.push(fate);
        });
        for fate in &fates {
            self.note_fate(now, fate, false);
        }
        self.hand_in(now);
    }

    /// Hands the engine the packets that have been held back for long enough.
    fn hand_in(&mut self, now: Time) {
        while let Some(faults) = self.faults()
            && let Some(arriving) = faults.next_arriving(now)
        {
            let arrival = arriving.arrival();
            match faults.fails(arrival.bytes) {
                Some(qpn) => {
                    let what = Injection::QpError;
                    self.rnic.note(now, qpn, Note::Injected { what, sent: false });
                    self.rnic.fail_qp(now, qpn);
                }
                None => self.rnic.handle_arrival(now, &arrival),
            }
        }
    }

    /// Returns whether somebody looks at each packet.
    #[inline]
    pub(crate) fn sees_packets(&self) -> bool {
        self.watch.is_some() || self.traces_packets
    }

    /// As [`Rnic::handle_request`], unless somebody looks at each packet.
    #[inline]
    pub(crate) fn handle_request(&mut self, now: Time, src: IpAddr, record: &dyn RingBytes) -> Option<Taken> {
        if self.sees_packets() {
            return None;
        }
        self.rnic.handle_request(now, src, record)
    }

    /// As [`Rnic::poll_timeout`].
    #[inline]
    pub(crate) fn poll_timeout(&self) -> Option<Time> {
        let due = self.rnic.poll_timeout();
        match &self.watch {
            None => due,
            Some(watch) => {
                let faults = watch.faults.as_ref().and_then(Faults::due);
                [due, faults].into_iter().flatten().min()
            }
        }
    }

    /// As [`Rnic::handle_timeout_with`].
    pub(crate) fn handle_timeout(&mut self, now: Time, links: &rdmux_rnic::Links<'_>) {
        self.rnic.handle_timeout_with(now, links);
        self.hand_in(now);
    }

    /// Returns the event that fault injection took the port down or brought it up, if it did.
    pub(crate) fn poll_port_event(&mut self, now: Time) -> Option<AsyncEvent> {
        let event = self.faults()?.port_event(now)?;
        let active = event == AsyncEvent::PortActive;
        self.rnic.note(now, Qpn::new(0), Note::Port { active });
        Some(event)
    }

    /// Returns whether fault injection holds back packets that are to be sent.
    #[inline]
    pub(crate) fn has_leaving(&self) -> bool {
        let faults = self.watch.as_ref().and_then(|watch| watch.faults.as_ref());
        faults.is_some_and(Faults::has_leaving)
    }

    /// Takes the packets of the trains from index `from` on; [`RnicPort::next_leaving`] returns each when its time has come. `shared` tells
    /// which paths go by shared memory.
    pub(crate) fn take_trains(
        &mut self,
        now: Time,
        buf: &TransmitBuf,
        from: usize,
        shared: impl Fn(&Path) -> bool,
    ) {
        let Some(watch) = &mut self.watch else { return };
        let Watch { faults, capture } = &mut **watch;
        let Some(faults) = faults else { return };
        let mut fates = Vec::new();
        for train in &buf.trains()[from..] {
            let bytes = &buf.bytes()[train.range.clone()];
            each_packet(bytes, train.segment_bytes, train.local, |packet| {
                let fate = faults.leave(now, &train.path, train.local, packet);
                if let Some(capture) = capture {
                    let (path, shared) = (&train.path, shared(&train.path));
                    capture.sent(&self.rnic, path, shared, packet, packet.len(), Some(&fate));
                }
                fates.push(fate);
            });
        }
        for fate in &fates {
            self.note_fate(now, fate, true);
        }
    }

    pub(super) fn next_leaving(&mut self, now: Time) -> Option<Leaving> {
        self.faults()?.next_leaving(now)
    }
}

/// Calls `each` with every packet of a train.
fn each_packet(train: &[u8], segment_bytes: usize, local: bool, mut each: impl FnMut(&[u8])) {
    for packet in train.chunks(segment_bytes.max(1)) {
        if local {
            coalesced::split(packet, &mut each);
        } else {
            each(packet);
        }
    }
}
