//! The tables of the control plane once more, with an API server where the tests of `tulle-control` have a directory: every
//! manifest passes its admission and defaults and the watches before proxies are told of it.

#![allow(clippy::unwrap_used)] // as in every test; clippy sees only the functions marked as such

#[path = "../../../control/tests/streams/harness.rs"]
#[expect(dead_code, reason = "other tests of tulle-control use more of it")]
mod harness;
#[path = "../../../control/tests/streams/inbound_rows.rs"]
mod inbound_rows;
#[path = "../../../control/tests/streams/outbound_rows.rs"]
mod outbound_rows;
mod place;
#[path = "../../../control/tests/streams/profiles.rs"]
mod profiles;
#[path = "../../../control/tests/streams/recorded.rs"]
mod recorded;
#[path = "../../../control/tests/streams/route_rows.rs"]
mod route_rows;
#[path = "../../../control/tests/streams/rows.rs"]
mod rows;
#[path = "../../../control/tests/streams/show.rs"]
mod show;
mod stored;
