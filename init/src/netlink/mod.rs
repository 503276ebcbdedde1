//! Firewall rules and routes over netlink, in our own encoding: no program to start, one transaction for both families.
//!
//! [`attr`] writes and reads attributes, [`wire`] moves messages, [`table`] encodes our rules, [`native`] puts them in
//! place, [`foreign`] finds rules of others and removes what iptables' nft flavour has of ours, [`conntrack`]
//! counts the connections that still need the rules, and [`routing`] brings marked packets back.

pub mod attr;
pub mod conntrack;
pub mod foreign;
pub mod native;
pub mod routing;
pub mod table;
pub mod wire;
