//! Pool of header maps, one per thread: a message reuses the memory of an earlier one.

use std::cell::RefCell;

use http::HeaderMap;

thread_local! {
    static SPARE_MAPS: RefCell<Vec<HeaderMap>> = const { RefCell::new(Vec::new()) };
}

/// Maximum number of maps that a thread keeps.
const MAX_SPARE_MAPS: usize = 64;
/// A map with more headers than this, or with capacity for more, is dropped.
const MAX_SPARE_MAP_HEADERS: usize = 64;
/// Capacity for the headers that the proxy adds to a message.
const N_ADDED_HEADERS: usize = 2;

/// Returns an empty map with capacity for `n_headers` and for [`N_ADDED_HEADERS`].
pub(crate) fn take(n_headers: usize) -> HeaderMap {
    match SPARE_MAPS.with_borrow_mut(Vec::pop) {
        Some(mut map) => {
            map.reserve(n_headers + N_ADDED_HEADERS);
            map
        }
        None => HeaderMap::with_capacity(n_headers + N_ADDED_HEADERS),
    }
}

/// Returns the map of a written message to the pool.
pub(crate) fn put(mut map: HeaderMap) {
    // `capacity` counts distinct names; repeated headers count in `len` only.
    if (1..=MAX_SPARE_MAP_HEADERS).contains(&map.capacity()) && map.len() <= MAX_SPARE_MAP_HEADERS {
        map.clear();
        SPARE_MAPS.with_borrow_mut(|spare| {
            if spare.len() < MAX_SPARE_MAPS {
                spare.push(map);
            }
        });
    }
}
