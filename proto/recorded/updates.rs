//! Combines the messages of a stream of `Destination.Get`, for the tests that include this file.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use tulle_proto::destination::{Update, WeightedAddr, update};

/// Returns the endpoints after all updates of a stream, each with the labels of its set, and `exists` of the last `NoEndpoints`
/// message, if there is one.
///
/// Linkerd sends the endpoints of each cluster in a message of their own, and tulle all in one.
pub(crate) fn endpoints_after(updates: Vec<Update>) -> (BTreeMap<String, WeightedAddr>, Option<bool>) {
    let socket = |addr| SocketAddr::try_from(addr).unwrap().to_string();
    let (mut endpoints, mut exists) = (BTreeMap::new(), None);
    for update in updates {
        match update.update.unwrap() {
            update::Update::Add(set) => {
                for mut addr in set.addrs {
                    for (name, value) in &set.metric_labels {
                        let label = addr.metric_labels.entry(name.clone());
                        label.or_insert_with(|| value.clone());
                    }
                    endpoints.insert(socket(addr.addr.unwrap()), addr);
                }
            }
            update::Update::Remove(set) => {
                for addr in set.addrs {
                    endpoints.remove(&socket(addr));
                }
            }
            update::Update::NoEndpoints(none) => exists = Some(none.exists),
        }
    }
    (endpoints, exists)
}
