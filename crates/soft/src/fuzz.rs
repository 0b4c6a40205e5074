//! Entry points of the fuzz targets, for bytes that come from files and from other processes of the host. Each panics when something is
//! wrong.

use super::shm::message::LinkMessage;
use super::trace;
use rdmux_verbs::resources::Item;
use rdmux_verbs::resources::report::Page;

/// Parses a trace, as it lies in a user's runtime folder, and checks that everything read from it can be written and then reads the same.
pub fn trace(input: &[u8]) {
    trace::fuzz(input);
}

/// Parses a message that a device receives on its control socket, or a page that it answers, and checks that whatever is understood can be
/// written and means the same again.
pub fn report(input: &[u8]) {
    if let Some(message) = LinkMessage::decode(input) {
        assert_eq!(LinkMessage::decode(&message.encode()), Some(message));
    }
    let Some(page) = Page::decode(input) else { return };
    assert_eq!(Page::decode(&page.encode()).as_ref(), Some(&page));
    for record in &page.records {
        let Some(item) = Item::parse(page.object, record) else {
            continue;
        };
        // The record of an engine's queue pair holds data that only the engine has: `record` returns `None` for it.
        if let Some(again) = item.record() {
            assert_eq!(Item::parse(page.object, &again), Some(item));
        }
    }
}
