//! Runs of loom, which tries the orders in which threads may run.

use std::panic::{AssertUnwindSafe, catch_unwind};

/// Returns whether a model holds in all orders with so many preemptions, unless `LOOM_MAX_PREEMPTIONS` sets another number.
///
/// # Panics
/// The model is too large.
pub(crate) fn holds(preemptions: usize, model: impl Fn() + Send + Sync + 'static) -> bool {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound.get_or_insert(preemptions);
    let Err(panic) = catch_unwind(AssertUnwindSafe(|| builder.check(model))) else {
        return true;
    };
    let text = panic.downcast_ref::<String>().map_or("", String::as_str);
    assert!(!text.contains("exceeded maximum"), "{text}");
    false
}
