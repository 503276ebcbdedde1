//! Redirects the TCP traffic of a network namespace through the proxy, and checks that it is.
//!
//! [`options`] are checked flags, [`rules`] makes them one list, and [`redirect`] has that list carried out by
//! [`netlink`] or by [`iptables`]. [`verify`] and [`validate`] prove the result from inside the namespace.
//! Nothing here knows the proxy, but for its ports.

pub mod cli;
pub mod iptables;
pub mod lock;
pub mod netlink;
pub mod nft_text;
pub mod options;
pub mod redirect;
pub mod report;
pub mod rules;
pub mod surroundings;
pub mod validate;
pub mod verify;
