//! Congestion control: DCQCN, as published by Zhu et al., "Congestion Control for Large-Scale RDMA Deployments", SIGCOMM 2015.
//! Section 3 describes the algorithm, section 5 chooses its parameters.
//!
//! Switches mark packets (ECN). The receiver of marked packets, the notification point, notifies their sender by congestion
//! notification packets (CNP). The sender, the reaction point, cuts the rate of that QP and then lets it grow again.

use crate::time::Time;

/// Parameters of DCQCN. [`Parameters::default`] has the published values; hardware often ships others (mlx5, for one, lets rates
/// grow every 300 us).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Parameters {
    /// Rate of a QP that receives no CNPs: the link's.
    pub line_bps: u64,
    /// Lowest rate of a QP.
    pub min_bps: u64,
    /// g: weight of the newest observation in alpha.
    pub gain: f64,
    /// K: alpha decays when no CNP came for this long.
    pub alpha_timer_ns: u64,
    /// T: the rate grows each time this interval has passed,
    pub increase_timer_ns: u64,
    /// B: and each time this many bytes were sent.
    pub increase_bytes: u64,
    /// F: steps by which the rate returns to where it was before it grows beyond.
    pub fast_recovery_steps: u32,
    /// Rai: growth of the target rate in a step of additive increase.
    pub additive_increase_bps: u64,
    /// Rhai: the same in hyper increase.
    pub hyper_increase_bps: u64,
    /// N: shortest interval between two CNPs for a QP.
    pub cnp_interval_ns: u64,
}

impl Default for Parameters {
    fn default() -> Parameters {
        Parameters {
            // A QP recovers from too low a value by the growth of its rate, from too high a value by a few more CNPs.
            line_bps: 10_000_000_000,
            // Not in the paper; QCN's rpgMinRate (IEEE 802.1Qau).
            min_bps: 10_000_000,
            gain: 1.0 / 256.0,
            alpha_timer_ns: 55_000,
            increase_timer_ns: 55_000,
            increase_bytes: 10_000_000,
            fast_recovery_steps: 5,
            additive_increase_bps: 40_000_000,
            // Not in the paper; QCN has ten times the additive increase too.
            hyper_increase_bps: 400_000_000,
            cnp_interval_ns: 50_000,
        }
    }
}

/// The sender's side of one QP. It has no timers of its own: each call first makes up for the time since the last one.
#[derive(Clone, Copy, Debug, Default)]
pub struct ReactionPoint(Option<Limited>);

/// State of a QP that received a CNP, until its rate is back at the line's.
#[derive(Clone, Copy, Debug)]
struct Limited {
    /// Rt.
    target_bps: f64,
    /// Rc.
    current_bps: f64,
    alpha: f64,
    alpha_due: Time,
    increase_due: Time,
    bytes: u64,
    timer_steps: u32,
    byte_steps: u32,
}

impl ReactionPoint {
    /// Returns whether nothing limits the QP.
    pub fn is_idle(&self) -> bool {
        self.0.is_none()
    }

    /// Returns the rate that the QP may send at; `None` while nothing limits it.
    pub fn rate_bps(&mut self, now: Time, with: &Parameters) -> Option<u64> {
        self.pass_time(now, with);
        Some(self.0?.current_bps as u64)
    }

    /// Handles a CNP. Equation 1.
    pub fn handle_cnp(&mut self, now: Time, with: &Parameters) {
        self.pass_time(now, with);
        let line_bps = with.line_bps as f64;
        let (current_bps, alpha) = self.0.map_or((line_bps, 1.0), |l| (l.current_bps, l.alpha));
        self.0 = Some(Limited {
            target_bps: current_bps,
            current_bps: (current_bps * (1.0 - alpha / 2.0)).max(with.min_bps as f64),
            alpha: (1.0 - with.gain) * alpha + with.gain,
            alpha_due: now + with.alpha_timer_ns,
            increase_due: now + with.increase_timer_ns,
            bytes: 0,
            timer_steps: 0,
            byte_steps: 0,
        });
    }

    /// Counts bytes that were sent.
    pub fn handle_sent(&mut self, now: Time, bytes: u64, with: &Parameters) {
        self.pass_time(now, with);
        let Some(limited) = &mut self.0 else { return };
        limited.bytes += bytes;
        if limited.bytes >= with.increase_bytes {
            limited.bytes -= with.increase_bytes;
            limited.byte_steps += 1;
            self.increase(with);
        }
    }

    /// Makes up for the time since the last call. The loop ends because each increase brings the rate nearer to the line's, where
    /// the limit is lifted.
    fn pass_time(&mut self, now: Time, with: &Parameters) {
        while let Some(limited) = &mut self.0 {
            if limited.alpha_due.min(limited.increase_due) > now {
                return;
            }
            if limited.alpha_due <= limited.increase_due {
                // Equation 2.
                limited.alpha *= 1.0 - with.gain;
                limited.alpha_due = limited.alpha_due + with.alpha_timer_ns.max(1);
            } else {
                limited.increase_due = limited.increase_due + with.increase_timer_ns.max(1);
                limited.timer_steps += 1;
                self.increase(with);
            }
        }
    }

    /// Does one step of figure 7: fast recovery, additive or hyper increase. Equations 3 and 4; hyper increase as in QCN, to which
    /// the paper refers.
    fn increase(&mut self, with: &Parameters) {
        let Some(limited) = &mut self.0 else { return };
        let line_bps = with.line_bps as f64;
        let steps = [limited.timer_steps, limited.byte_steps];
        let (least, most) = (steps[0].min(steps[1]), steps[0].max(steps[1]));
        if least > with.fast_recovery_steps {
            let steps = f64::from(least - with.fast_recovery_steps);
            limited.target_bps += steps * with.hyper_increase_bps as f64;
        } else if most > with.fast_recovery_steps {
            limited.target_bps += with.additive_increase_bps.max(1) as f64;
        }
        limited.target_bps = limited.target_bps.min(line_bps);
        limited.current_bps = (limited.target_bps + limited.current_bps) / 2.0;
        // Halving the remaining distance would never end, so the limit is lifted close to the line's rate.
        if limited.current_bps + with.additive_increase_bps.max(1) as f64 >= line_bps {
            self.0 = None;
        }
    }
}

/// The receiver's side of one QP.
#[derive(Clone, Copy, Debug, Default)]
pub struct NotificationPoint {
    told: Option<Time>,
}

impl NotificationPoint {
    /// Handles a marked packet; returns whether a CNP is to be sent for it.
    pub fn handle_marked(&mut self, now: Time, with: &Parameters) -> bool {
        if self
            .told
            .is_some_and(|told| now.since_ns(told) < with.cnp_interval_ns)
        {
            return false;
        }
        self.told = Some(now);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const G: f64 = 1_000_000_000.0;

    fn with() -> Parameters {
        Parameters {
            line_bps: 40_000_000_000,
            ..Parameters::default()
        }
    }

    fn rate(point: &mut ReactionPoint, at_us: u64) -> f64 {
        point.rate_bps(Time(at_us * 1000), &with()).unwrap() as f64
    }

    fn close(a: f64, b: f64) -> bool {
        (a - b).abs() <= 2.0
    }

    #[test]
    fn rate__no_limit_before_the_first_cnp() {
        let mut point = ReactionPoint::default();
        point.handle_sent(Time(5), 1 << 40, &with());
        assert_eq!(point.rate_bps(Time(9), &with()), None);
    }

    #[test]
    fn handle_cnp__equation_1() {
        let mut point = ReactionPoint::default();
        point.handle_cnp(Time(0), &with());
        // Alpha is 1 at first.
        assert!(close(rate(&mut point, 0), 20.0 * G));
        assert_eq!(point.0.unwrap().target_bps, 40.0 * G);
        point.handle_cnp(Time(50_000), &with());
        assert_eq!(point.0.unwrap().target_bps, 20.0 * G);
        assert!(close(rate(&mut point, 50), 10.0 * G));
        for n in 2..60 {
            point.handle_cnp(Time(n * 50_000), &with());
        }
        assert_eq!(rate(&mut point, 59 * 50), with().min_bps as f64);
        assert_eq!(point.0.unwrap().alpha, 1.0);
    }

    #[test]
    fn alpha__equations_1_and_2() {
        let mut point = ReactionPoint::default();
        point.handle_cnp(Time(0), &with());
        let g: f64 = 1.0 / 256.0;
        rate(&mut point, 55 * 3);
        let alpha = (1.0 - g).powi(3);
        assert!((point.0.unwrap().alpha - alpha).abs() < 1e-12);
        let before = rate(&mut point, 55 * 3);
        point.handle_cnp(Time(55_000 * 3), &with());
        assert!(close(rate(&mut point, 55 * 3), before * (1.0 - alpha / 2.0)));
        assert!((point.0.unwrap().alpha - ((1.0 - g) * alpha + g)).abs() < 1e-12);
    }

    #[test]
    fn increase__fast_recovery_halves_the_way_to_the_target() {
        let mut point = ReactionPoint::default();
        point.handle_cnp(Time(0), &with());
        point.handle_cnp(Time(0), &with());
        let (target, mut current) = (20.0 * G, 10.0 * G);
        for step in 1..=5 {
            current = (target + current) / 2.0;
            assert!(close(rate(&mut point, 55 * step), current), "step {step}");
            assert_eq!(point.0.unwrap().target_bps, target);
        }
    }

    #[test]
    fn increase__additive_after_five_steps_of_the_timer() {
        let mut point = ReactionPoint::default();
        point.handle_cnp(Time(0), &with());
        point.handle_cnp(Time(0), &with());
        let mut current = rate(&mut point, 55 * 5);
        for step in 1..=20 {
            let target = 20.0 * G + f64::from(step) * 0.04 * G;
            current = (target + current) / 2.0;
            assert!(
                close(rate(&mut point, 55 * (5 + u64::from(step as u32))), current),
                "step {step}"
            );
        }
    }

    #[test]
    fn increase__the_byte_counter_steps_too_and_both_make_it_hyper() {
        let mut point = ReactionPoint::default();
        for _ in 0..4 {
            point.handle_cnp(Time(0), &with());
        }
        let target = point.0.unwrap().target_bps;
        for _ in 0..6 {
            point.handle_sent(Time(1), 10_000_000, &with());
        }
        // Additive: one of the counters has passed five.
        assert!(close(point.0.unwrap().target_bps, target + 0.04 * G));
        rate(&mut point, 55 * 5);
        assert!(close(point.0.unwrap().target_bps, target + 6.0 * 0.04 * G));
        // Hyper: both counters have passed five.
        rate(&mut point, 55 * 6);
        assert!(close(
            point.0.unwrap().target_bps,
            target + 6.0 * 0.04 * G + 0.4 * G
        ));
    }

    #[test]
    fn increase__ends_at_the_line_after_any_time() {
        let mut point = ReactionPoint::default();
        point.handle_cnp(Time(0), &with());
        assert_eq!(point.rate_bps(Time(u64::MAX / 2), &with()), None);
        // The next CNP begins again with the initial state.
        point.handle_cnp(Time(u64::MAX / 2), &with());
        assert_eq!(point.rate_bps(Time(u64::MAX / 2), &with()), Some(20_000_000_000));
    }

    #[test]
    fn handle_marked__one_cnp_in_50_us() {
        let mut point = NotificationPoint::default();
        let owed: Vec<u64> = (0..200u64)
            .filter(|us| point.handle_marked(Time(us * 1000), &with()))
            .collect();
        assert_eq!(owed, [0, 50, 100, 150]);
    }
}
