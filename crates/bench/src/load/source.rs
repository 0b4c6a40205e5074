//! The source: keeps messages in flight on its connections, or posts them at random times, and times each.

use std::io::Read;
use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use hdrhistogram::Histogram;
use rdmux_verbs::{
    CompletionQueue, ConnectParams, Connection, Device, MemoryRegion, Operation, ProtectionDomain, QpOptions,
    QueuePair, SendFlags, SendRequest, Status, Target,
};

use super::super::child::{say, say_ready};
use super::{Kind, PERIOD, Place, RAMP, Report, Request, SourceArgs, memory};

/// Longest time that is measured; longer ones count as this.
const LATENCY_NS_MAX: u64 = 60_000_000_000;
/// Longest sleep while nothing completes.
const LOOK: Duration = Duration::from_millis(50);
/// Pause between attempts to open a device that is not there: no event reports that a node has started.
pub(super) const PAUSE: Duration = Duration::from_millis(2);

pub(super) fn run(args: &SourceArgs) -> Result<()> {
    let device = Device::open(args.bind)?;
    let threads = args.threads.max(1);
    let (connected, begin) = (Barrier::new(threads + 1), Barrier::new(threads + 1));
    let tallies = thread::scope(|scope| {
        let (device, connected, begin) = (&device, &connected, &begin);
        let posting: Vec<_> = (0..threads)
            .map(|thread| {
                scope.spawn(move || {
                    let pump = Pump::connect(device, args, thread);
                    connected.wait();
                    begin.wait();
                    pump?.run(Instant::now())
                })
            })
            .collect();
        connected.wait();
        // One that could not connect says so when it is to begin.
        say_ready()?;
        std::io::stdin().read_to_end(&mut Vec::new())?;
        begin.wait();
        let tallies = posting.into_iter().map(|thread| match thread.join() {
            Ok(tally) => tally,
            Err(_) => bail!("a posting thread panicked"),
        });
        tallies.collect::<Result<Vec<Tally>>>()
    })?;
    let mut tallies = tallies.into_iter();
    let mut all = tallies.next().context("no threads")?;
    for tally in tallies {
        all.add(&tally)?;
    }
    say(&all.report().emit())
}

/// One connection of a thread.
pub(super) struct Lane {
    pub(super) qp: QueuePair,
    pub(super) place: Place,
    _connection: Connection,
}

impl Lane {
    /// Connects to a sink.
    pub(super) fn connect(
        pd: &ProtectionDomain,
        cq: &CompletionQueue,
        args: &SourceArgs,
        nth: usize,
    ) -> Result<Lane> {
        let options = QpOptions {
            max_send_wr: args.depth + args.elephants + 1,
            max_recv_wr: 1,
            ..QpOptions::new(cq)
        };
        let qp = pd.create_qp(&options)?;
        let request = Request {
            receives: if args.kind == Kind::Send { args.receives } else { 0 },
            bytes: args.bytes,
            delay: Duration::from_millis(args.delay_ms.into()),
        };
        let params = ConnectParams {
            traffic_class: args.tos,
            ..ConnectParams::default()
        };
        let to = args.to[nth % args.to.len()];
        let connection = pd.device().connect(&qp, to, &params, &request.emit())?;
        let place = Place::parse(connection.private_data()).context("the sink gave no place")?;
        Ok(Lane {
            qp,
            place,
            _connection: connection,
        })
    }
}

/// A message that may be in flight.
#[derive(Clone, Copy)]
struct Slot {
    lane: usize,
    bytes: u32,
    posted: Instant,
    /// One of those that count; elephants beside them do not.
    counts: bool,
}

/// Requests that have completed.
struct Tally {
    latencies_ns: Histogram<u64>,
    bytes: u64,
    seconds: f64,
    periods: Vec<u64>,
}

impl Tally {
    fn new() -> Result<Tally> {
        Ok(Tally {
            latencies_ns: Histogram::new_with_max(LATENCY_NS_MAX, 3)?,
            bytes: 0,
            seconds: 0.0,
            periods: Vec::new(),
        })
    }

    fn count(&mut self, bytes: u32, latency: Duration, at: Duration) {
        let latency_ns = u64::try_from(latency.as_nanos()).unwrap_or(u64::MAX);
        self.latencies_ns.saturating_record(latency_ns.max(1));
        self.bytes += u64::from(bytes);
        let period = (at.as_nanos() / PERIOD.as_nanos()) as usize;
        if self.periods.len() <= period {
            self.periods.resize(period + 1, 0);
        }
        self.periods[period] += 1;
    }

    fn add(&mut self, other: &Tally) -> Result<()> {
        self.latencies_ns.add(&other.latencies_ns)?;
        self.bytes += other.bytes;
        self.seconds = self.seconds.max(other.seconds);
        if self.periods.len() < other.periods.len() {
            self.periods.resize(other.periods.len(), 0);
        }
        for (sum, more) in self.periods.iter_mut().zip(&other.periods) {
            *sum += more;
        }
        Ok(())
    }

    fn report(&self) -> Report {
        // Those at the end in which nothing completed count too.
        let mut periods = self.periods.clone();
        let whole = (self.seconds / PERIOD.as_secs_f64()) as usize;
        periods.resize(periods.len().max(whole), 0);
        let us = |quantile| self.latencies_ns.value_at_quantile(quantile) as f64 / 1e3;
        Report {
            messages: self.latencies_ns.len(),
            bytes: self.bytes,
            seconds: self.seconds,
            p50_us: us(0.5),
            p99_us: us(0.99),
            periods,
        }
    }
}

/// Objects of a thread, on a device that may go away.
struct Wired {
    cq: CompletionQueue,
    mr: MemoryRegion,
    lanes: Vec<Lane>,
}

impl Wired {
    fn connect(device: &Device, args: &SourceArgs, thread: usize) -> Result<Wired> {
        let nth = |nth: &usize| nth % args.threads == thread;
        let connections: Vec<usize> = (0..args.connections).filter(nth).collect();
        let entries = connections.len() as u32 * (args.depth + 1) + args.elephants + 8;
        let cq = device.create_cq(entries)?;
        let pd = device.alloc_pd()?;
        let mr = memory(&pd)?;
        let lanes = connections.into_iter();
        let lanes = lanes.map(|nth| Lane::connect(&pd, &cq, args, nth));
        let lanes = lanes.collect::<Result<_>>()?;
        Ok(Wired { cq, mr, lanes })
    }
}

/// A thread that posts.
struct Pump<'a> {
    args: &'a SourceArgs,
    thread: usize,
    wired: Wired,
    slots: Vec<Slot>,
    /// Slots that wait for the next arrival.
    free: Vec<usize>,
}

impl<'a> Pump<'a> {
    fn connect(device: &Device, args: &'a SourceArgs, thread: usize) -> Result<Pump<'a>> {
        Ok(Pump {
            args,
            thread,
            wired: Wired::connect(device, args, thread)?,
            slots: Vec::new(),
            free: Vec::new(),
        })
    }

    fn run(mut self, begin: Instant) -> Result<Tally> {
        let args = self.args;
        let ramp = if args.messages.is_some() {
            Duration::ZERO
        } else {
            RAMP
        };
        let from = begin + ramp;
        let end = from + Duration::from_millis(args.time_ms);
        let mut tally = Tally::new()?;
        loop {
            match self.post_until(from, end, &mut tally) {
                Ok(()) => break,
                Err(error) if !args.again => return Err(error),
                Err(_) => {
                    // The device has gone: connect anew.
                    self.wired = loop {
                        let device = Device::open(args.bind).map_err(anyhow::Error::from);
                        match device.and_then(|device| Wired::connect(&device, args, self.thread)) {
                            Ok(wired) => break wired,
                            // A node that comes back tells nobody.
                            Err(_) if Instant::now() < end => thread::sleep(PAUSE),
                            Err(error) => return Err(error),
                        }
                    };
                }
            }
        }
        let took = if args.messages.is_some() {
            from.elapsed()
        } else {
            end - from
        };
        tally.seconds = took.as_secs_f64();
        Ok(tally)
    }

    /// Posts and takes completions until the time or the messages are over.
    fn post_until(&mut self, from: Instant, end: Instant, tally: &mut Tally) -> Result<()> {
        let args = self.args;
        let mut to_post = args.messages.unwrap_or(u64::MAX);
        let slot = |lane, bytes, counts| Slot {
            lane,
            bytes,
            posted: from,
            counts,
        };
        self.slots.clear();
        self.free.clear();
        for lane in 0..self.wired.lanes.len() {
            let beside = if lane == 0 { args.elephants } else { 0 };
            self.slots
                .extend((0..beside).map(|_| slot(lane, args.elephant_bytes, false)));
            self.slots
                .extend((0..args.depth).map(|_| slot(lane, args.bytes, true)));
        }
        let mut arrivals = args.per_second.map(|rate| (rate, Instant::now()));
        for nth in 0..self.slots.len() {
            if self.slots[nth].counts && arrivals.is_some() {
                self.free.push(nth);
            } else if to_post > 0 {
                to_post -= u64::from(self.slots[nth].counts);
                self.post(nth)?;
            }
        }
        let mut left = args.messages.unwrap_or(u64::MAX);
        loop {
            let now = Instant::now();
            if left == 0 || (now >= end && args.messages.is_none()) {
                return Ok(());
            }
            let mut sleep = LOOK.min(end.saturating_duration_since(now));
            if let Some((rate, next)) = &mut arrivals {
                while *next <= now
                    && let Some(nth) = self.free.pop()
                {
                    self.post(nth)?;
                    // Exponential: -ln of a number in (0, 1].
                    *next += Duration::from_secs_f64(-(1.0 - fastrand::f64()).ln() / *rate);
                }
                sleep = sleep.min(next.saturating_duration_since(now));
            }
            let found = match self.wired.cq.poll() {
                Some(found) => Some(found),
                None if sleep.is_zero() => None,
                None => self.wired.cq.wait(sleep)?,
            };
            let Some(found) = found else {
                continue;
            };
            ensure!(
                found.status == Status::Success,
                "a message failed: {}",
                found.status
            );
            let nth = found.wr_id as usize;
            let slot = *self.slots.get(nth).context("a completion of no message")?;
            let at = Instant::now();
            if slot.counts && at >= from && (at < end || args.messages.is_some()) {
                tally.count(slot.bytes, at - slot.posted, at - from);
            }
            if slot.counts {
                left -= 1;
            }
            if slot.counts && arrivals.is_some() {
                self.free.push(nth);
            } else if to_post > 0 {
                to_post -= u64::from(slot.counts);
                self.post(nth)?;
            }
        }
    }

    fn post(&mut self, nth: usize) -> Result<()> {
        let slot = &mut self.slots[nth];
        let Wired { mr, lanes, .. } = &self.wired;
        let lane = &lanes[slot.lane];
        let Place { va, rkey } = lane.place;
        slot.posted = Instant::now();
        lane.qp.post_send(SendRequest {
            wr_id: nth as u64,
            operation: match self.args.kind {
                Kind::Write => Operation::Write { va, rkey, imm: None },
                Kind::Read => Operation::Read { va, rkey },
                Kind::Send => Operation::Send { imm: None },
            },
            sges: mr.sge(0, slot.bytes).into(),
            flags: SendFlags::SIGNALED,
            to: Target::Connected,
        })?;
        Ok(())
    }
}
