//! The writer's copy of the log, and its transfer to the replicas.

use super::replica::{Op, Phase};
use super::{BATCH, OPS_MAX, What, Writer, segment};
use crate::defect::defect;
use crate::format::{Frame, Header};

impl Writer {
    pub(super) fn area(&self) -> u64 {
        self.log.map_or(0, |(_, area)| area)
    }

    pub(super) fn room(&self) -> u64 {
        self.head.position + self.area() - self.tail.position
    }

    /// Appends a frame to the copy.
    pub(super) fn push(&mut self, record: Option<&[u8]>) {
        let (frame, bytes) = Frame::emit(&self.tail, record, self.epoch, self.acknowledged.1);
        self.copy.extend(&bytes);
        self.tail = frame.end;
        self.frames.push_back(frame);
    }

    /// Returns bytes between head and tail.
    pub(super) fn bytes(&self, position: u64, length: u64) -> Vec<u8> {
        let from = (position - self.head.position) as usize;
        let until = from + length as usize;
        let (front, back) = self.copy.as_slices();
        let of = |part: &[u8], begins: usize| {
            let inside = |at: usize| at.saturating_sub(begins).min(part.len());
            part[inside(from)..inside(until)].to_vec()
        };
        let mut bytes = of(front, 0);
        bytes.append(&mut of(back, front.len()));
        bytes
    }

    /// Drops acknowledged frames from the front as long as `goes` returns true for a frame's start and the frame.
    pub(super) fn drop_before(&mut self, goes: impl Fn(u64, &Frame) -> bool) {
        let acknowledged = self.acknowledged.0;
        self.drop_frames(|begin, frame| frame.end.position <= acknowledged && goes(begin, frame));
    }

    pub(super) fn drop_frames(&mut self, goes: impl Fn(u64, &Frame) -> bool) {
        while let Some(frame) = self
            .frames
            .front()
            .filter(|frame| goes(self.head.position, frame))
        {
            self.copy
                .drain(..(frame.end.position - self.head.position) as usize);
            self.head = frame.end;
            self.frames.pop_front();
        }
    }

    pub(super) fn pump_all(&mut self) {
        for at in 0..self.replicas.len() {
            self.pump(at);
        }
    }

    /// Sends a replica the frames that it lacks, within the limit on requests in flight.
    pub(super) fn pump(&mut self, at: usize) {
        let (head, tail, area) = (self.head, self.tail.position, self.area());
        let acknowledged = self.acknowledged.1;
        while self.replicas[at].phase == Phase::Streaming {
            let r = &mut self.replicas[at];
            let room_until = r.room_from.map(|from| from + area);
            let blocked =
                r.sent < head.position || room_until.is_none_or(|until| r.sent < tail && r.sent >= until);
            if (blocked || r.header_wanted) && !r.header_busy {
                let joining =
                    r.joining.is_some_and(|target| r.durable < target || blocked) && !defect!(JoiningHasSay);
                r.header_wanted = false;
                let generation = r.header.map_or(0, |h| h.generation) + 1;
                let replica = r.header.map_or(self.settings.replica_ids[at], |h| h.replica);
                // A replica whose log begins later than this one may lack the frames before.
                let own = r
                    .header
                    .map(|h| h.head)
                    .filter(|own| r.room_from.is_some() && own.position > head.position);
                let head = own.unwrap_or(head);
                let header = Header {
                    joining,
                    replica,
                    generation,
                    head,
                    acknowledged,
                    ..self.new_header(at)
                };
                self.write_header(at, header);
                continue;
            }
            if blocked || r.ops.len() > OPS_MAX {
                return;
            }
            let end = tail.min(r.sent + BATCH).min(room_until.unwrap_or(0));
            if end <= r.sent {
                return;
            }
            let from = r.sent;
            r.sent = end;
            self.write_range(at, from, end);
        }
    }

    pub(super) fn write_range(&mut self, at: usize, from: u64, end: u64) {
        let pieces = |mut position: u64, area: u64| {
            let mut pieces = Vec::with_capacity(2);
            while position < end {
                let (offset, length) = segment(area, position, end - position);
                pieces.push((position, offset, length));
                position += length;
            }
            pieces
        };
        let pieces = pieces(from, self.area());
        for (position, offset, length) in &pieces {
            let bytes = self.bytes(*position, *length);
            self.post(
                at,
                Op::Other,
                What::Write {
                    offset: *offset,
                    bytes,
                },
            );
        }
        let last = pieces.len() - 1;
        for (nth, (_, offset, length)) in pieces.into_iter().enumerate() {
            let op = if nth == last { Op::Durable(end) } else { Op::Other };
            let length = if defect!(FlushTooShort) {
                length.saturating_sub(64).max(1)
            } else {
                length
            };
            self.post(at, op, What::Flush { offset, length });
        }
    }
}
