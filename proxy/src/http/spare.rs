//! Header maps that served a message before: a request's map has room for the response's headers.

use std::cell::RefCell;

use http::HeaderMap;

thread_local! {
    static SPARE: RefCell<Vec<HeaderMap>> = const { RefCell::new(Vec::new()) };
}

/// Maps that a thread keeps.
const MAPS: usize = 64;
/// Larger ones are not kept.
const LARGEST: usize = 64;
/// Lines that proxies add to a message.
const ADDED: usize = 2;

/// An empty map with room for so many lines, and for those that proxies add.
pub(crate) fn headers(lines: usize) -> HeaderMap {
    match SPARE.with_borrow_mut(Vec::pop) {
        Some(mut map) => {
            map.reserve(lines + ADDED);
            map
        }
        None => HeaderMap::with_capacity(lines + ADDED),
    }
}

/// Keeps the room of a map whose message has been written.
pub(crate) fn keep(mut map: HeaderMap) {
    // Repeated lines are in its length only.
    if (1..=LARGEST).contains(&map.capacity()) && map.len() <= LARGEST {
        map.clear();
        SPARE.with_borrow_mut(|spare| {
            if spare.len() < MAPS {
                spare.push(map);
            }
        });
    }
}
