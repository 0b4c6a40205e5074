//! The hierarchy against an ideal, fluid one.

mod fluid;
mod hierarchy;

use super::*;

#[test]
fn class_of__class_selectors() {
    for class in 0..CLASSES {
        let dscp = 8 * class as u8;
        assert_eq!(class_of(dscp << 2), class);
        assert_eq!(class_of((dscp + 7) << 2 | 3), class);
    }
}
