//! The tables and chains that tulle and Linkerd use with the iptables programs, for all code that finds or removes them.
//!
//! The names are those of Linkerd where it has such a chain, so that either tool can repair the rules of the other.

/// The tables, and the chains of tulle or Linkerd in them.
pub(crate) const TABLES: [(&str, &[&str]); 2] = [
    (
        "mangle",
        &[
            TPROXY_INBOUND,
            TPROXY,
            TPROXY_REPLIES,
            UNREDIRECTED_INBOUND,
            UNREDIRECTED,
            INVALID,
        ],
    ),
    ("nat", &[INBOUND, OUTBOUND]),
];
pub(crate) const INBOUND: &str = "PROXY_INIT_REDIRECT";
pub(crate) const OUTBOUND: &str = "PROXY_INIT_OUTPUT";
pub(crate) const TPROXY_INBOUND: &str = "PROXY_INIT_TPROXY_INBOUND";
pub(crate) const TPROXY: &str = "PROXY_INIT_TPROXY";
/// Open connections need this chain until they end.
pub(crate) const TPROXY_REPLIES: &str = "PROXY_INIT_TPROXY_REPLIES";
pub(crate) const UNREDIRECTED_INBOUND: &str = "PROXY_INIT_UNREDIRECTED_IN";
pub(crate) const UNREDIRECTED: &str = "PROXY_INIT_UNREDIRECTED";
pub(crate) const INVALID: &str = "PROXY_INIT_INVALID";

/// Whether a chain of this name, in any table, is one of tulle or Linkerd.
pub(crate) fn is_mesh_chain(chain: &str) -> bool {
    TABLES.iter().any(|(_, chains)| chains.contains(&chain))
}
