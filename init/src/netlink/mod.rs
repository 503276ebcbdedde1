//! Firewall rules and routes over netlink, without external programs; one transaction covers both families.
//!
//! [`attr`] encodes and decodes attributes, [`socket`] sends and receives messages, [`table`] encodes our rules, and
//! [`nftables`] applies them. [`iptables_nft`] finds rules of other programs and removes those of tulle or Linkerd made by
//! iptables-nft. [`conntrack`] counts the connections that still need the rules, and [`routing`] delivers marked packets locally.
//!
//! Constants with a prefix of the kernel (such as `NLM_F`, `NFTA`, `CTA`, `RTM`) have the names and numbers of its headers.

pub mod attr;
pub mod conntrack;
pub mod iptables_nft;
pub mod nftables;
pub mod routing;
pub mod socket;
pub mod table;
