//! Redirects the TCP traffic of a network namespace through the proxy, and checks the redirection.
//!
//! [`options`] are validated flags, [`rules`] converts them to a list of rules, and [`redirect`] applies the list with
//! [`netlink`] or [`iptables`]. Two modules check the result from inside the namespace: with [`verify`] (`--verify`), a run
//! tests the rules that it has applied; [`validate`] is a command of its own, which knows no rules, only two addresses. This
//! crate does not use the proxy crate; of the proxy it knows only default port numbers and process names.

pub mod cli;
pub mod iptables;
mod iptables_chains;
pub mod lock;
pub mod namespace;
pub mod netlink;
pub mod nft_script;
pub mod options;
pub mod redirect;
pub mod report;
pub mod rules;
pub mod validate;
pub mod verify;
