//! Applications that disturb others by what they ask a device for, not by what they send.

use std::io::Read;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rdmux_verbs::{Device, Operation, RKey, SendFlags, SendRequest, Target};

use super::super::child::{say, say_ready};
use super::source::Lane;
use super::{Attack, RAMP, Report, SourceArgs, memory};

/// Longest time to wait for the end of a request that fails.
const PATIENCE: Duration = Duration::from_secs(5);

pub(super) fn run(args: &SourceArgs, attack: Attack) -> Result<()> {
    let device = Device::open(args.bind)?;
    let pd = device.alloc_pd()?;
    let mr = memory(&pd)?;
    let cq = device.create_cq(args.depth + 8)?;
    say_ready()?;
    std::io::stdin().read_to_end(&mut Vec::new())?;
    let begin = Instant::now();
    let time = RAMP + Duration::from_millis(args.time_ms);
    let mut times = 0;
    while begin.elapsed() < time {
        match attack {
            Attack::Registration => drop(memory(&pd)?),
            Attack::Connect => {
                Lane::connect(&pd, &cq, args, 0)?;
            }
            Attack::BadKey => {
                let lane = Lane::connect(&pd, &cq, args, 0)?;
                lane.qp.post_send(SendRequest {
                    wr_id: 0,
                    operation: Operation::Write {
                        va: lane.place.va,
                        rkey: RKey(!lane.place.rkey.0),
                        imm: None,
                    },
                    sges: mr.sge(0, args.bytes).into(),
                    flags: SendFlags::SIGNALED,
                    to: Target::Connected,
                })?;
                cq.wait(PATIENCE)?
                    .context("a request with a wrong key has no end")?;
                while cq.poll().is_some() {}
            }
        }
        times += 1;
    }
    let report = Report {
        messages: times,
        seconds: begin.elapsed().as_secs_f64(),
        ..Report::default()
    };
    say(&report.emit())
}
