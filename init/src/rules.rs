//! Converts options to one ordered list of rules; a pure function. All backends render the same list.
//!
//! Chains with a hook, such as prerouting and output, jump to chains that decide on a connection, such as inbound and outbound.
//! These chains see only the first segment of each connection. So connections that are open when the rules are applied are not
//! affected; a rule that redirected their later packets would break them. Only [`Chain::Invalid`] matches packets of all
//! connections.
//!
//! In tproxy mode inbound connections are not translated; outbound ones are, as in redirect mode. The first segment marks an
//! inbound connection, and packets of marked connections are delivered to the proxy's socket. The proxy dials the application
//! from the client's address, so the application's replies would leave for the client; they are marked too, and routed back to
//! the proxy.

use ipnet::IpNet;
use tulle_core::ports::PortSet;

use crate::options::{Families, Family, InboundMode, InboundPorts, InvalidPackets, Options, Scope};

/// The rules in the order of evaluation, chain by chain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rules {
    pub list: Vec<Rule>,
    pub families: Families,
    /// Priority of the NAT chains.
    pub priority: i32,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    pub chain: Chain,
    /// `None` means both.
    pub family: Option<Family>,
    /// The rule matches if all of these match.
    pub matches: Vec<Match>,
    pub action: Action,
    /// The purpose of the rule, shown in listings after `proxy-init/`.
    pub comment: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Chain {
    /// Decides on inbound connections.
    Inbound,
    /// Decides on connections that processes of this namespace open.
    Outbound,
    /// Jumps to [`Chain::Inbound`]; hooked before routing.
    Prerouting,
    /// Jumps to [`Chain::Outbound`]; hooked at local output.
    Output,
    /// Decides on inbound connections in tproxy mode.
    TproxyInbound,
    /// Jumps to [`Chain::TproxyInbound`], then delivers packets of marked connections to the proxy's socket; hooked before
    /// routing.
    TproxyPrerouting,
    /// Marks the application's replies to connections that the proxy dialled from the client's address; hooked at local
    /// output.
    TproxyReplies,
    /// Drops inbound connections of a family that is not redirected, except skipped ports and networks.
    UnredirectedInbound,
    /// Jumps to [`Chain::UnredirectedInbound`]; hooked before routing.
    UnredirectedPrerouting,
    /// Drops packets in an invalid connection tracking state; hooked before routing, before NAT.
    Invalid,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Match {
    Tcp,
    /// The segment opens a connection: SYN without FIN, RST or ACK.
    NewConnection,
    /// The destination is an address of this namespace.
    ToLocalAddress,
    /// The outgoing interface is `lo`.
    OutputInterfaceLo,
    /// The incoming interface is `lo`.
    InputInterfaceLo,
    /// The source is not an address of this namespace.
    FromNonLocalAddress,
    /// The connection has this mark, and the packet has this direction.
    Marked(u32, Direction),
    /// The destination port is one of these; `set` is the name for backends with named sets.
    Ports {
        set: &'static str,
        ports: PortSet,
    },
    /// The address on this side is in one of these networks, all of the rule's family.
    Nets {
        set: &'static str,
        side: Side,
        nets: Vec<IpNet>,
    },
    /// The socket belongs to this user.
    User(u32),
    /// The socket belongs to this group.
    Group(u32),
    /// The connection tracking state is invalid.
    Invalid,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    Source,
    Destination,
}

/// The direction of a packet within its connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the side that opened the connection.
    Original,
    Reply,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Skips the rest of the chain, which would redirect, mark or drop the connection.
    Return,
    /// Redirects to this local port.
    Redirect(u16),
    /// Delivers to the socket of the connection, else to a transparent listener on this port. Without one, nftables continues
    /// with the next rule, and iptables drops the packet.
    Tproxy(u16),
    /// Marks the connection.
    MarkConnection(u32),
    /// Marks the packet, and routes it again.
    MarkPacket(u32),
    Jump(Chain),
    Drop,
}

/// The rules for these options.
#[must_use]
pub fn build_rules(options: &Options) -> Rules {
    let mut list = Vec::new();
    list.extend(inbound_rules(options));
    list.extend(outbound_rules(options));
    let new_inbound = new_inbound(options);
    if options.inbound_mode == InboundMode::Redirect {
        list.push(base_chain_rule(
            options,
            Chain::Prerouting,
            new_inbound.clone(),
            Action::Jump(Chain::Inbound),
            "install-proxy-init-prerouting",
        ));
    }
    list.push(base_chain_rule(
        options,
        Chain::Output,
        vec![Match::NewConnection],
        Action::Jump(Chain::Outbound),
        "install-proxy-init-output",
    ));
    if options.inbound_mode == InboundMode::Tproxy {
        list.extend(tproxy_rules(options, new_inbound));
    }
    if options.families == Families::V4DropV6 {
        list.extend(unredirected_ipv6_rules(options));
    }
    if options.invalid == InvalidPackets::Drop {
        list.push(base_chain_rule(
            options,
            Chain::Invalid,
            vec![Match::Tcp, Match::Invalid],
            Action::Drop,
            "drop-invalid",
        ));
    }
    Rules {
        list,
        families: options.families,
        priority: options.priority,
    }
}

/// A rule of a base chain, which has a netfilter hook.
fn base_chain_rule(options: &Options, chain: Chain, matches: Vec<Match>, action: Action, comment: &str) -> Rule {
    Rule {
        chain,
        // One table serves both families. Without IPv6, its hooks must ignore IPv6.
        family: (!options.families.redirects(Family::V6)).then_some(Family::V4),
        matches,
        action,
        comment: comment.to_owned(),
    }
}

/// Hands inbound connections to the proxy without changing their addresses; `new_inbound` matches their first segments.
fn tproxy_rules(options: &Options, new_inbound: Vec<Match>) -> Vec<Rule> {
    let inbound_packets = || vec![Match::Tcp, Match::Marked(INBOUND_MARK, Direction::Original)];
    let proxy_connections = vec![
        Match::NewConnection,
        Match::OutputInterfaceLo,
        Match::FromNonLocalAddress,
    ];
    let replies = vec![Match::Tcp, Match::Marked(TPROXY_CLIENT_MARK, Direction::Reply)];
    let tproxy = Action::Tproxy(options.inbound_port.get());
    let rules = [
        // Packets over loopback, such as the proxy's to the application, are not handed to the proxy again.
        (
            Chain::TproxyPrerouting,
            vec![Match::InputInterfaceLo],
            Action::Return,
            "ignore-loopback",
        ),
        (
            Chain::TproxyPrerouting,
            new_inbound,
            Action::Jump(Chain::TproxyInbound),
            "match-inbound-syn",
        ),
        (Chain::TproxyPrerouting, inbound_packets(), tproxy, "tproxy-inbound"),
        // If the proxy does not listen, the packet must not reach the application.
        (
            Chain::TproxyPrerouting,
            inbound_packets(),
            Action::Drop,
            "drop-without-proxy",
        ),
        (
            Chain::TproxyReplies,
            proxy_connections,
            Action::MarkConnection(TPROXY_CLIENT_MARK),
            "mark-connections-from-client-address",
        ),
        (
            Chain::TproxyReplies,
            replies,
            Action::MarkPacket(TPROXY_CLIENT_MARK),
            "mark-replies-for-proxy",
        ),
    ];
    rules
        .into_iter()
        .map(|(chain, matches, action, comment)| base_chain_rule(options, chain, matches, action, comment))
        .collect()
}

fn inbound_rules(options: &Options) -> Vec<Rule> {
    let tproxy = options.inbound_mode == InboundMode::Tproxy;
    let chain = if tproxy { Chain::TproxyInbound } else { Chain::Inbound };
    let mut list = Vec::new();
    list.extend(skip_ports(chain, "in_skip_ports", &options.inbound_skip_ports));
    let sets = [(Family::V4, "in_skip_src4"), (Family::V6, "in_skip_src6")];
    let sets = sets
        .into_iter()
        .filter(|(family, _)| options.families.redirects(*family));
    list.extend(skip_nets(chain, sets, Side::Source, &options.inbound_skip_nets));
    let (criterion, comment) = match &options.inbound_ports {
        InboundPorts::All => (Match::Tcp, "redirect-all-incoming-to-proxy-port"),
        InboundPorts::Listed(ports) => (
            Match::Ports {
                set: "in_ports",
                ports: ports.clone(),
            },
            "redirect-port",
        ),
    };
    list.push(match tproxy {
        true => rule(chain, criterion, Action::MarkConnection(INBOUND_MARK), "mark-inbound"),
        false => rule(chain, criterion, Action::Redirect(options.inbound_port.get()), comment),
    });
    list
}

/// The matches of the first packet of an inbound connection.
fn new_inbound(options: &Options) -> Vec<Match> {
    match options.scope {
        Scope::Local => vec![Match::NewConnection, Match::ToLocalAddress],
        Scope::All => vec![Match::NewConnection],
    }
}

/// Drops inbound IPv6 connections to every port that would be redirected, except loopback and skipped ports and networks.
fn unredirected_ipv6_rules(options: &Options) -> Vec<Rule> {
    let chain = Chain::UnredirectedInbound;
    let mut list = Vec::new();
    list.extend(skip_ports(chain, "v6_skip_ports", &options.inbound_skip_ports));
    let sets = [(Family::V6, "v6_skip_src")];
    list.extend(skip_nets(chain, sets, Side::Source, &options.inbound_skip_nets));
    let dropped = match &options.inbound_ports {
        InboundPorts::All => Match::Tcp,
        InboundPorts::Listed(ports) => Match::Ports {
            set: "v6_ports",
            ports: ports.clone(),
        },
    };
    list.push(rule(chain, dropped, Action::Drop, "drop-unredirected-ipv6"));
    let hook = Chain::UnredirectedPrerouting;
    list.push(rule(hook, Match::InputInterfaceLo, Action::Return, "ignore-loopback"));
    list.push(Rule {
        matches: new_inbound(options),
        ..rule(
            hook,
            Match::NewConnection,
            Action::Jump(chain),
            "match-inbound-ipv6-syn",
        )
    });
    for rule in &mut list {
        rule.family = Some(Family::V6);
    }
    list
}

fn outbound_rules(options: &Options) -> Vec<Rule> {
    let chain = Chain::Outbound;
    let user = options
        .proxy_uid
        .map(|uid| rule(chain, Match::User(uid), Action::Return, "ignore-proxy-user-id"));
    let group = options
        .proxy_gid
        .map(|gid| rule(chain, Match::Group(gid), Action::Return, "ignore-proxy-group-id"));
    let mut list: Vec<Rule> = user.into_iter().chain(group).collect();
    list.push(rule(chain, Match::OutputInterfaceLo, Action::Return, "ignore-loopback"));
    list.extend(skip_ports(chain, "out_skip_ports", &options.outbound_skip_ports));
    let sets = [(Family::V4, "out_skip_dst4"), (Family::V6, "out_skip_dst6")];
    let sets = sets
        .into_iter()
        .filter(|(family, _)| options.families.redirects(*family));
    list.extend(skip_nets(chain, sets, Side::Destination, &options.outbound_skip_nets));
    let redirect = Action::Redirect(options.outbound_port.get());
    list.push(rule(chain, Match::Tcp, redirect, "redirect-all-outgoing-to-proxy-port"));
    list
}

fn rule(chain: Chain, criterion: Match, action: Action, comment: &str) -> Rule {
    Rule {
        chain,
        family: None,
        matches: vec![criterion],
        action,
        comment: comment.to_owned(),
    }
}

fn skip_ports(chain: Chain, set: &'static str, ports: &PortSet) -> Option<Rule> {
    let ports = (!ports.is_empty()).then(|| ports.clone())?;
    Some(rule(chain, Match::Ports { set, ports }, Action::Return, "ignore-port"))
}

/// One rule for each family with networks to skip.
fn skip_nets<'a>(
    chain: Chain,
    sets: impl IntoIterator<Item = (Family, &'static str)> + 'a,
    side: Side,
    nets: &'a [IpNet],
) -> impl Iterator<Item = Rule> + 'a {
    sets.into_iter().filter_map(move |(family, set)| {
        let nets: Vec<IpNet> = nets
            .iter()
            .filter(|net| Family::of_network(net) == family)
            .copied()
            .collect();
        let skips = !nets.is_empty();
        let rule = Rule {
            family: Some(family),
            ..rule(chain, Match::Nets { set, side, nets }, Action::Return, "ignore-subnet")
        };
        skips.then_some(rule)
    })
}

impl Rules {
    /// The rules that apply to one family, in order.
    pub fn for_family(&self, family: Family) -> impl Iterator<Item = &Rule> {
        let redirected = self.families.redirects(family);
        self.list
            .iter()
            .filter(move |rule| rule.family.map_or(redirected, |only| only == family))
    }

    /// The families that have rules, IPv4 first.
    pub fn present_families(&self) -> impl Iterator<Item = Family> {
        let families = [Family::V4, Family::V6].into_iter();
        families.filter(|family| self.for_family(*family).next().is_some())
    }

    #[must_use]
    pub fn is_tproxy(&self) -> bool {
        self.list.iter().any(|rule| rule.chain == Chain::TproxyPrerouting)
    }

    /// The rules without the match on local destinations, for kernels that lack it; `None` if it is not used, or is
    /// required.
    #[must_use]
    pub fn without_local_match(&self) -> Option<Self> {
        if self.is_tproxy() {
            return None;
        }
        let mut rules = self.clone();
        rules
            .list
            .iter_mut()
            .for_each(|rule| rule.matches.retain(|criterion| *criterion != Match::ToLocalAddress));
        (rules != *self).then_some(rules)
    }
}

/// The netfilter hook of a base chain.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Hook {
    pub(crate) kind: &'static str,
    pub(crate) point_name: &'static str,
    /// `enum nf_inet_hooks`.
    pub(crate) point: u32,
    pub(crate) priority: i32,
}

impl Chain {
    /// Chains before the chains that jump to them.
    pub(crate) const ALL: [Self; 10] = [
        Self::Inbound,
        Self::Outbound,
        Self::TproxyInbound,
        Self::UnredirectedInbound,
        Self::Prerouting,
        Self::Output,
        Self::TproxyPrerouting,
        Self::TproxyReplies,
        Self::UnredirectedPrerouting,
        Self::Invalid,
    ];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Inbound => "inbound",
            Self::Outbound => "outbound",
            Self::Prerouting => "prerouting",
            Self::Output => "output",
            Self::TproxyInbound => "tproxy_inbound",
            Self::TproxyPrerouting => "tproxy_prerouting",
            Self::TproxyReplies => "tproxy_replies",
            Self::UnredirectedInbound => "unredirected_inbound",
            Self::UnredirectedPrerouting => "unredirected_prerouting",
            Self::Invalid => "invalid",
        }
    }

    pub(crate) fn hook(self, priority: i32) -> Option<Hook> {
        let at = |kind, (point_name, point), priority| {
            Some(Hook {
                kind,
                point_name,
                point,
                priority,
            })
        };
        let (prerouting, output) = (("prerouting", 0), ("output", 3));
        match self {
            Self::Inbound | Self::Outbound | Self::TproxyInbound | Self::UnredirectedInbound => None,
            Self::Prerouting => at("nat", prerouting, priority),
            Self::Output => at("nat", output, priority),
            Self::TproxyPrerouting | Self::UnredirectedPrerouting | Self::Invalid => {
                at("filter", prerouting, MANGLE_PRIORITY)
            }
            Self::TproxyReplies => at("route", output, MANGLE_PRIORITY),
        }
    }
}

/// The name of our table.
pub const TABLE: &str = "l5d_init";
/// A chain without a hook; the comment of its only rule contains the hash of the rules ([`crate::nft_script::hash`]).
pub(crate) const HASH_CHAIN: &str = "rules_hash";
/// After connection tracking (-200), before NAT (-100).
const MANGLE_PRIORITY: i32 = -150;
/// The mark of inbound connections that the proxy accepts.
pub const INBOUND_MARK: u32 = 0x2043;
/// The mark of connections that the proxy dials from the client's address, and of packets that reply to them.
///
/// The marks share no bit with those of Kubernetes (0xc000), Cilium (0xf00), Calico and Tailscale (above 0xffff).
pub const TPROXY_CLIENT_MARK: u32 = 0x2044;
/// The prefix of the comments of [`Rules`]; Linkerd's tools search for it too. The rule with the hash and the rules while
/// draining do not have it.
pub const COMMENT_PREFIX: &str = "proxy-init/";

#[cfg(test)]
pub(crate) mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::options::{self, DEFAULT_PRIORITY, OnInvalidEntry};

    pub(crate) fn example() -> Options {
        Options {
            inbound_port: options::proxy_port("-p", 4143).unwrap(),
            outbound_port: options::proxy_port("-o", 4140).unwrap(),
            proxy_uid: Some(2102),
            proxy_gid: None,
            inbound_ports: InboundPorts::All,
            inbound_mode: InboundMode::Redirect,
            inbound_skip_ports: ports("4190-4191,4567-4568"),
            inbound_skip_nets: options::networks("-s", &["10.0.0.0/8,fd00::/8".to_owned()]).unwrap(),
            outbound_skip_ports: ports("4567-4568"),
            outbound_skip_nets: options::networks("-s", &["192.168.0.0/16,fe00::/8".to_owned()]).unwrap(),
            scope: Scope::Local,
            invalid: InvalidPackets::Pass,
            priority: DEFAULT_PRIORITY,
            families: Families::Both,
        }
    }

    pub(crate) fn ports(list: &str) -> PortSet {
        options::ports("--ports", &[list.to_owned()], OnInvalidEntry::Refuse).unwrap()
    }

    /// (chain, comment, family) in the order that the redirection depends on.
    #[test]
    fn rules_have_the_right_order() {
        let rules = build_rules(&Options {
            proxy_gid: Some(7),
            invalid: InvalidPackets::Drop,
            ..example()
        });
        let seen: Vec<(Chain, &str, Option<Family>)> = rules
            .list
            .iter()
            .map(|rule| (rule.chain, rule.comment.as_str(), rule.family))
            .collect();
        assert_eq!(
            seen,
            [
                (Chain::Inbound, "ignore-port", None),
                (Chain::Inbound, "ignore-subnet", Some(Family::V4)),
                (Chain::Inbound, "ignore-subnet", Some(Family::V6)),
                (Chain::Inbound, "redirect-all-incoming-to-proxy-port", None),
                (Chain::Outbound, "ignore-proxy-user-id", None),
                (Chain::Outbound, "ignore-proxy-group-id", None),
                (Chain::Outbound, "ignore-loopback", None),
                (Chain::Outbound, "ignore-port", None),
                (Chain::Outbound, "ignore-subnet", Some(Family::V4)),
                (Chain::Outbound, "ignore-subnet", Some(Family::V6)),
                (Chain::Outbound, "redirect-all-outgoing-to-proxy-port", None),
                (Chain::Prerouting, "install-proxy-init-prerouting", None),
                (Chain::Output, "install-proxy-init-output", None),
                (Chain::Invalid, "drop-invalid", None),
            ]
        );
    }

    #[test]
    fn tproxy_connections_are_marked_and_their_replies_go_through_the_proxy() {
        let rules = build_rules(&Options {
            inbound_mode: InboundMode::Tproxy,
            ..example()
        });
        let seen: Vec<(Chain, &str)> = rules
            .list
            .iter()
            .map(|rule| (rule.chain, rule.comment.as_str()))
            .collect();
        let is_not_outbound = |rule: &&(Chain, &str)| !matches!(rule.0, Chain::Outbound | Chain::Output);
        assert_eq!(
            seen.iter().filter(is_not_outbound).collect::<Vec<_>>(),
            [
                &(Chain::TproxyInbound, "ignore-port"),
                &(Chain::TproxyInbound, "ignore-subnet"),
                &(Chain::TproxyInbound, "ignore-subnet"),
                &(Chain::TproxyInbound, "mark-inbound"),
                &(Chain::TproxyPrerouting, "ignore-loopback"),
                &(Chain::TproxyPrerouting, "match-inbound-syn"),
                &(Chain::TproxyPrerouting, "tproxy-inbound"),
                &(Chain::TproxyPrerouting, "drop-without-proxy"),
                &(Chain::TproxyReplies, "mark-connections-from-client-address"),
                &(Chain::TproxyReplies, "mark-replies-for-proxy"),
            ]
        );
        assert!(rules.is_tproxy() && rules.without_local_match().is_none());
    }

    #[test]
    fn without_ipv6_no_rule_applies_to_ipv6() {
        let rules = build_rules(&Options {
            families: Families::V4,
            ..example()
        });
        assert!(rules.list.iter().all(|rule| rule.family != Some(Family::V6)));
        let hooks = [Chain::Prerouting, Chain::Output];
        let base_chain_rules = rules.list.iter().filter(|rule| hooks.contains(&rule.chain));
        assert!(base_chain_rules.map(|rule| rule.family).eq([Some(Family::V4); 2]));
    }

    #[test]
    fn unredirected_inbound_ipv6_is_dropped_except_skipped_ports_and_networks() {
        let rules = build_rules(&Options {
            families: Families::V4DropV6,
            ..example()
        });
        let seen: Vec<(Chain, &str)> = rules
            .for_family(Family::V6)
            .map(|rule| (rule.chain, rule.comment.as_str()))
            .collect();
        assert_eq!(
            seen,
            [
                (Chain::UnredirectedInbound, "ignore-port"),
                (Chain::UnredirectedInbound, "ignore-subnet"),
                (Chain::UnredirectedInbound, "drop-unredirected-ipv6"),
                (Chain::UnredirectedPrerouting, "ignore-loopback"),
                (Chain::UnredirectedPrerouting, "match-inbound-ipv6-syn"),
            ]
        );
        let v4 = build_rules(&Options {
            families: Families::V4,
            ..example()
        });
        assert!(rules.for_family(Family::V4).eq(v4.for_family(Family::V4)));
        assert!(rules.present_families().eq([Family::V4, Family::V6]));
        assert!(v4.present_families().eq([Family::V4]));
    }

    proptest! {
        #[test]
        fn every_network_is_skipped_in_its_own_family(v4: Vec<(u32, u8)>, v6: Vec<(u128, u8)>) {
            let nets = v4.iter().map(|(ip, len)| format!("{}/{}", std::net::Ipv4Addr::from(*ip), len % 33))
                .chain(v6.iter().map(|(ip, len)| format!("{}/{}", std::net::Ipv6Addr::from(*ip), len % 129)))
                .collect::<Vec<_>>();
            let inbound_skip_nets = options::networks("-s", &nets).unwrap();
            let rules = build_rules(&Options { inbound_skip_nets, ..example() });
            for family in [Family::V4, Family::V6] {
                for rule in rules.for_family(family) {
                    for criterion in &rule.matches {
                        if let Match::Nets { nets, .. } = criterion {
                            prop_assert!(nets.iter().all(|net| Family::of_network(net) == family));
                        }
                    }
                }
            }
        }
    }
}
