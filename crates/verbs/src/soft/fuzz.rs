//! What the fuzz targets give bytes to: what comes from files and from other processes of the host. Each panics when something is wrong.

use super::resources::Item;
use super::shm::message::Message;
use super::shm::report::Page;
use super::trace;

/// A trace, as it lies in a user's runtime folder: what is read from it can be written, and then reads the same.
pub fn trace(input: &[u8]) {
    trace::fuzz(input);
}

/// What a device hears on its control socket, and what it answers: whatever is understood can be written and means the same again.
pub fn report(input: &[u8]) {
    if let Some(message) = Message::decode(input) {
        assert_eq!(Message::decode(&message.encode()), Some(message));
    }
    let Some(page) = Page::decode(input) else { return };
    assert_eq!(Page::decode(&page.encode()).as_ref(), Some(&page));
    for record in &page.records {
        let Some(item) = Item::parse(page.object, record) else {
            continue;
        };
        // A queue pair is told of with what only its engine knows.
        if let Some(again) = item.record() {
            assert_eq!(Item::parse(page.object, &again), Some(item));
        }
    }
}
