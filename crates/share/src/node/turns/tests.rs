use super::*;

const COST_NS: u64 = 20_000;

/// Takes the turns of application 1, which wants one whenever it has none, for `ns`, a pass each microsecond; returns their number.
/// `moves`: applications whose data moves in each pass.
fn storm(turns: &mut Turns, now: &mut Time, ns: u64, moves: &[u32], is_beside_short: bool) -> u64 {
    let end = *now + ns;
    let mut taken = 0;
    while *now < end {
        *now = *now + 1_000;
        moves
            .iter()
            .for_each(|application| turns.moved(*now, *application));
        turns.want(Turn::Message(1));
        if let Some(turn) = turns.next(*now, is_beside_short) {
            *now = *now + COST_NS;
            turns.took(*now, turn, COST_NS);
            taken += 1;
        }
    }
    taken
}

#[test]
fn next__all_the_time_while_nobody_else_has_data() {
    let mut now = Time(1);
    for moves in [&[][..], &[1]] {
        let mut turns = Turns::new(now);
        let taken = storm(&mut turns, &mut now, 1_000_000_000, moves, true);
        assert!(taken >= 1_000_000_000 / (COST_NS + 1_000) - 1, "{taken}");
    }
}

#[test]
fn next__a_small_part_of_the_time_beside_data_of_others() {
    for (is_beside_short, part) in [(true, PART_BESIDE_SHORT), (false, PART_BESIDE_LONG)] {
        let mut now = Time(1);
        let mut turns = Turns::new(now);
        let moves = [0, 1];
        let burst = storm(&mut turns, &mut now, 10_000_000, &moves, is_beside_short);
        assert!(burst >= BURST_NS as u64 / COST_NS, "{burst}");
        let taken = storm(&mut turns, &mut now, 1_000_000_000, &moves, is_beside_short);
        let expected = 1_000_000_000 / part / COST_NS;
        assert!(
            (expected - 2..=expected + 2).contains(&taken),
            "{taken} of {expected}"
        );
    }
}

#[test]
fn next__in_the_order_in_which_they_were_wanted() {
    let now = Time(1);
    let mut turns = Turns::new(now);
    for turn in [
        Turn::Message(3),
        Turn::Serve,
        Turn::Message(3),
        Turn::Leave,
        Turn::Message(4),
    ] {
        turns.want(turn);
    }
    turns.forget(Turn::Message(4));
    let taken: Vec<Turn> = std::iter::from_fn(|| turns.next(now, true)).collect();
    assert_eq!(taken, [Turn::Message(3), Turn::Serve, Turn::Leave]);
}

#[test]
fn next__who_has_data_alone_does_not_wait_for_those_who_wait() {
    let mut now = Time(1);
    let mut turns = Turns::new(now);
    storm(&mut turns, &mut now, 100_000_000, &[0], true);
    assert!(turns.is_waiting.contains(&Turn::Message(1)));
    turns.want(Turn::Message(0));
    assert_eq!(turns.next(now, true), Some(Turn::Message(0)));
    assert_eq!(turns.next(now, true), None);
}

#[test]
fn next_time__is_when_a_turn_is_due() {
    let mut now = Time(1);
    let mut turns = Turns::new(now);
    assert_eq!(turns.next_time(true), None);
    turns.want(Turn::Serve);
    assert!(turns.next_time(true).unwrap() <= now);
    turns.forget(Turn::Serve);
    // By the time that it may use, and because nobody else has had data for long.
    for cost_ns in [COST_NS, 10_000_000] {
        storm(&mut turns, &mut now, 50_000_000, &[0], true);
        turns.credit_ns = -(cost_ns as i64);
        let at = turns.next_time(true).unwrap();
        assert_eq!(turns.next(Time(at.0 - 1), true), None);
        assert_eq!(turns.next(at, true), Some(Turn::Message(1)));
        now = at;
    }
}

#[test]
fn next_time__after_the_part_has_changed() {
    // What is left over of a small part is more than the large part asks for.
    let mut turns = Turns::new(Time(1));
    turns.want(Turn::Serve);
    turns.moved(Time(1), 0);
    turns.credit_ns = 0;
    let now = Time(PART_BESIDE_SHORT);
    assert_eq!(turns.next(now, true), None);
    assert_eq!(turns.next_time(false), Some(now));
    assert_eq!(turns.next(now, false), Some(Turn::Serve));
}

/// Returns how many pieces of these lengths a batch has, and their bytes.
fn taken(mut batch: Batches, bytes: u32) -> (u32, u64) {
    let mut taken = (0, 0);
    while batch.has_room() {
        batch.posted(bytes);
        taken = (taken.0 + 1, taken.1 + u64::from(bytes));
    }
    taken
}

#[test]
fn batches__short_pieces_up_to_the_bytes_of_four_long_ones() {
    let alone = Batches::of(true, false);
    assert_eq!(taken(alone, 64), (16, 1 << 10));
    assert_eq!(taken(alone, 4 << 10), (16, 64 << 10));
    assert_eq!(taken(alone, 16 << 10), (4, 64 << 10));
    assert_eq!(taken(alone, u32::MAX).0, 1);
    let together = Batches::of(true, true);
    assert_eq!(taken(together, 64).0, 4);
    assert_eq!(taken(together, u32::MAX).0, 4);
    assert_eq!(taken(Batches::of(false, true), u32::MAX).0, 64);
}

#[test]
fn are_together__while_data_of_two_applications_flows() {
    let mut turns = Turns::new(Time(1));
    assert!(!turns.are_together(Time(1)));
    turns.moved(Time(1), 1);
    turns.moved(Time(2), 1);
    assert!(!turns.are_together(Time(2)));
    turns.moved(Time(3), 2);
    turns.moved(Time(4), 1);
    assert!(turns.are_together(Time(3 + FLOWING_NS - 1)));
    assert!(!turns.are_together(Time(3 + FLOWING_NS)));
    turns.moved(Time(3 + FLOWING_NS), 2);
    assert!(turns.are_together(Time(3 + FLOWING_NS)));
}
