//! Runs the table tests of `tulle-control` again, with an API server instead of a directory as the source. `manifest_store`
//! replaces their module of that name.

#![allow(clippy::unwrap_used)] // allowed in tests; clippy recognizes only functions with a test attribute

#[path = "../../../control/tests/streams/destination_rows.rs"]
mod destination_rows;
#[path = "../../../control/tests/streams/harness.rs"]
#[expect(dead_code, reason = "other tests of tulle-control use more of it")]
mod harness;
#[path = "../../../control/tests/streams/inbound_rows.rs"]
mod inbound_rows;
mod manifest_store;
#[path = "../../../control/tests/streams/outbound_rows.rs"]
mod outbound_rows;
#[path = "../../../control/tests/streams/profiles.rs"]
mod profiles;
#[path = "../../../control/tests/streams/recorded.rs"]
mod recorded;
#[path = "../../../control/tests/streams/route_rows.rs"]
mod route_rows;
#[path = "../../../control/tests/streams/show.rs"]
mod show;
mod stored;
