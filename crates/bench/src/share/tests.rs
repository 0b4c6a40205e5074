use super::isolation::longest_gap;
use super::*;

#[test]
fn jain__of_equal_rates_is_1_and_of_one_that_has_all_1_nth() {
    assert_eq!(jain(&[7.0; 5]), 1.0);
    assert_eq!(jain(&[0.0, 3.0, 0.0, 0.0]), 0.25);
    assert_eq!(jain(&[0.0; 3]), 0.0);
}

#[test]
fn longest_gap__counts_empty_periods_in_succession() {
    assert_eq!(longest_gap(&[]), 0);
    assert_eq!(longest_gap(&[1, 2, 3]), 0);
    assert_eq!(longest_gap(&[0, 1, 0, 0, 0, 5, 0, 0]), 3);
}

#[test]
fn suites__have_keys_of_their_own() {
    let mut keys: Vec<&str> = suites(1).iter().map(|suite| suite.key).collect();
    let all = keys.len();
    keys.sort_unstable();
    keys.dedup();
    assert_eq!(keys.len(), all);
}
