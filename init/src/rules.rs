//! Options to one ordered list of rules, pure; every backend renders the same list.
//!
//! Two chains decide (inbound and outbound) and two hand them what they decide on (prerouting and output), as
//! connections start: only a segment that opens one is ever looked at. A connection that was open before the rules
//! came therefore lives on, where rules for all packets would pick it up half way and reset it.
//!
//! Where connections keep their client's address, nothing is translated: the first segment marks the connection, and
//! the marked ones are handed to the proxy's socket. The proxy dials the application as the client, so that the
//! application's answers would leave for the client; those are marked too, and routed back.

use ipnet::IpNet;
use tulle_core::ports::PortSet;

use crate::options::{Families, Inbound, InboundMode, Invalid, Options, Scope};

/// The rules in the order of their evaluation, chain by chain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rules {
    pub list: Vec<Rule>,
    pub families: Families,
    /// Of the NAT chains.
    pub priority: i32,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    pub chain: Chain,
    /// `None` is both.
    pub family: Option<Family>,
    /// All must hold.
    pub tests: Vec<Test>,
    pub action: Action,
    /// What the rule is for, as shown in listings (after `proxy-init/`).
    pub comment: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Chain {
    /// Decides on connections that arrive.
    Inbound,
    /// Decides on connections that processes here open.
    Outbound,
    /// Hands to [`Chain::Inbound`]; hooked before routing.
    Prerouting,
    /// Hands to [`Chain::Outbound`]; hooked where local packets leave.
    Output,
    /// Decides on connections that arrive and keep their client's address.
    TproxyInbound,
    /// Hands to [`Chain::TproxyInbound`], then to the proxy's socket what that has marked; hooked before routing.
    Tproxy,
    /// Brings back what the application answers to a proxy that dialled it as the client; hooked where local packets leave.
    Answers,
    /// Drops inbound connections of a family that is not redirected, apart from skipped ports and networks.
    UnredirectedInbound,
    /// Hands to [`Chain::UnredirectedInbound`]; hooked before routing.
    Unredirected,
    /// Drops what connection tracking cannot place; hooked before routing, ahead of NAT.
    Invalid,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    V4,
    V6,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Test {
    Tcp,
    /// The segment opens a connection: SYN without FIN, RST or ACK.
    Opens,
    /// The destination is an address of this namespace.
    ToLocal,
    /// The packet leaves over `lo`.
    OverLoopback,
    /// The packet comes over `lo`.
    FromLoopback,
    /// The source is no address of this namespace.
    FromForeign,
    /// The connection has this mark, and the packet goes this way of it.
    Marked(u32, Way),
    /// The destination port is one of these; `set` names them where the backend has sets.
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
    /// Connection tracking cannot place the packet.
    Invalid,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    Source,
    Destination,
}

/// The way of a packet within its connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// From who has opened it.
    Original,
    Reply,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Leave the connection as it is.
    Return,
    /// To this port of this namespace.
    Redirect(u16),
    /// To the socket that has the connection, else to the one that listens on this port for any address; else go on.
    Tproxy(u16),
    /// Mark the connection.
    MarkConnection(u32),
    /// Mark the packet, and route it again.
    MarkPacket(u32),
    Jump(Chain),
    Drop,
}

/// The rules that carry these options out.
#[must_use]
pub fn plan(options: &Options) -> Rules {
    let mut list = Vec::new();
    list.extend(inbound(options));
    list.extend(outbound(options));
    let hooked = |chain, tests, action, comment: &str| Rule {
        chain,
        // One table serves both families; without IPv6 its hooks must leave IPv6 alone.
        family: (!options.families.contain(Family::V6)).then_some(Family::V4),
        tests,
        action,
        comment: comment.to_owned(),
    };
    let arrives = match options.scope {
        Scope::Local => vec![Test::Opens, Test::ToLocal],
        Scope::All => vec![Test::Opens],
    };
    if options.inbound_mode == InboundMode::Redirect {
        list.push(hooked(
            Chain::Prerouting,
            arrives.clone(),
            Action::Jump(Chain::Inbound),
            "install-proxy-init-prerouting",
        ));
    }
    list.push(hooked(
        Chain::Output,
        vec![Test::Opens],
        Action::Jump(Chain::Outbound),
        "install-proxy-init-output",
    ));
    if options.inbound_mode == InboundMode::Tproxy {
        let taken = || vec![Test::Tcp, Test::Marked(TAKEN, Way::Original)];
        let dialled = vec![Test::Opens, Test::OverLoopback, Test::FromForeign];
        let answers = vec![Test::Tcp, Test::Marked(AS_CLIENT, Way::Reply)];
        let tproxy = Action::Tproxy(options.inbound_port.get());
        for (chain, tests, action, comment) in [
            // What the proxy dials here is for the application.
            (
                Chain::Tproxy,
                vec![Test::FromLoopback],
                Action::Return,
                "ignore-loopback",
            ),
            (
                Chain::Tproxy,
                arrives,
                Action::Jump(Chain::TproxyInbound),
                "choose-incoming",
            ),
            (Chain::Tproxy, taken(), tproxy, "hand-incoming-to-proxy-port"),
            // Without a proxy it must not go on to the application.
            (Chain::Tproxy, taken(), Action::Drop, "drop-without-proxy"),
            (
                Chain::Answers,
                dialled,
                Action::MarkConnection(AS_CLIENT),
                "remember-dialled-as-client",
            ),
            (
                Chain::Answers,
                answers,
                Action::MarkPacket(AS_CLIENT),
                "return-answers-to-proxy",
            ),
        ] {
            list.push(hooked(chain, tests, action, comment));
        }
    }
    if options.families == Families::V4DropV6 {
        list.extend(drop_unredirected(options));
    }
    if options.invalid == Invalid::Drop {
        list.push(hooked(
            Chain::Invalid,
            vec![Test::Tcp, Test::Invalid],
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

fn inbound(options: &Options) -> Vec<Rule> {
    let tproxy = options.inbound_mode == InboundMode::Tproxy;
    let chain = if tproxy { Chain::TproxyInbound } else { Chain::Inbound };
    let mut list = Vec::new();
    list.extend(skip_ports(chain, "in_skip_ports", &options.inbound_skip_ports));
    let sets = [(Family::V4, "in_skip_src4"), (Family::V6, "in_skip_src6")];
    let sets = sets.into_iter().filter(|(family, _)| options.families.contain(*family));
    list.extend(skip_nets(chain, sets, Side::Source, &options.inbound_skip_nets));
    let (test, comment) = match &options.inbound {
        Inbound::All => (Test::Tcp, "redirect-all-incoming-to-proxy-port"),
        Inbound::Listed(ports) => (
            Test::Ports {
                set: "in_ports",
                ports: ports.clone(),
            },
            "redirect-port",
        ),
    };
    list.push(match tproxy {
        true => rule(chain, test, Action::MarkConnection(TAKEN), "take-incoming"),
        false => rule(chain, test, Action::Redirect(options.inbound_port.get()), comment),
    });
    list
}

/// Drops inbound IPv6 connections to every port that would be redirected; loopback and what is skipped stay direct.
fn drop_unredirected(options: &Options) -> Vec<Rule> {
    let chain = Chain::UnredirectedInbound;
    let mut list = Vec::new();
    list.extend(skip_ports(chain, "v6_skip_ports", &options.inbound_skip_ports));
    let sets = [(Family::V6, "v6_skip_src")];
    list.extend(skip_nets(chain, sets, Side::Source, &options.inbound_skip_nets));
    let dropped = match &options.inbound {
        Inbound::All => Test::Tcp,
        Inbound::Listed(ports) => Test::Ports {
            set: "v6_ports",
            ports: ports.clone(),
        },
    };
    list.push(rule(chain, dropped, Action::Drop, "drop-unredirected-ipv6"));
    let hook = Chain::Unredirected;
    list.push(rule(hook, Test::FromLoopback, Action::Return, "ignore-loopback"));
    list.push(Rule {
        tests: vec![Test::Opens, Test::ToLocal],
        ..rule(hook, Test::Opens, Action::Jump(chain), "choose-unredirected")
    });
    for rule in &mut list {
        rule.family = Some(Family::V6);
    }
    list
}

fn outbound(options: &Options) -> Vec<Rule> {
    let chain = Chain::Outbound;
    let user = options
        .proxy_uid
        .map(|uid| rule(chain, Test::User(uid), Action::Return, "ignore-proxy-user-id"));
    let group = options
        .proxy_gid
        .map(|gid| rule(chain, Test::Group(gid), Action::Return, "ignore-proxy-group-id"));
    let mut list: Vec<Rule> = user.into_iter().chain(group).collect();
    list.push(rule(chain, Test::OverLoopback, Action::Return, "ignore-loopback"));
    list.extend(skip_ports(chain, "out_skip_ports", &options.outbound_skip_ports));
    let sets = [(Family::V4, "out_skip_dst4"), (Family::V6, "out_skip_dst6")];
    let sets = sets.into_iter().filter(|(family, _)| options.families.contain(*family));
    list.extend(skip_nets(chain, sets, Side::Destination, &options.outbound_skip_nets));
    let redirect = Action::Redirect(options.outbound_port.get());
    list.push(rule(chain, Test::Tcp, redirect, "redirect-all-outgoing-to-proxy-port"));
    list
}

fn rule(chain: Chain, test: Test, action: Action, comment: &str) -> Rule {
    Rule {
        chain,
        family: None,
        tests: vec![test],
        action,
        comment: comment.to_owned(),
    }
}

fn skip_ports(chain: Chain, set: &'static str, ports: &PortSet) -> Option<Rule> {
    let ports = (!ports.is_empty()).then(|| ports.clone())?;
    Some(rule(chain, Test::Ports { set, ports }, Action::Return, "ignore-port"))
}

/// One rule a family that has networks to skip.
fn skip_nets<'a>(
    chain: Chain,
    sets: impl IntoIterator<Item = (Family, &'static str)> + 'a,
    side: Side,
    nets: &'a [IpNet],
) -> impl Iterator<Item = Rule> + 'a {
    sets.into_iter().filter_map(move |(family, set)| {
        let nets: Vec<IpNet> = nets.iter().filter(|net| Family::of(net) == family).copied().collect();
        let skips = !nets.is_empty();
        let rule = Rule {
            family: Some(family),
            ..rule(chain, Test::Nets { set, side, nets }, Action::Return, "ignore-subnet")
        };
        skips.then_some(rule)
    })
}

impl Rules {
    /// The rules that one family sees, in order.
    pub fn of(&self, family: Family) -> impl Iterator<Item = &Rule> {
        let redirected = self.families.contain(family);
        self.list
            .iter()
            .filter(move |rule| rule.family.map_or(redirected, |only| only == family))
    }

    /// The families that have rules, IPv4 first.
    pub fn present_families(&self) -> impl Iterator<Item = Family> {
        let families = [Family::V4, Family::V6].into_iter();
        families.filter(|family| self.of(*family).next().is_some())
    }

    /// Whether connections that arrive keep their client's address.
    #[must_use]
    pub fn keep_clients(&self) -> bool {
        self.list.iter().any(|rule| rule.chain == Chain::Tproxy)
    }

    /// The same without the test that the destination is local, for kernels that have none; `None` if it is not used,
    /// or cannot be done without.
    #[must_use]
    pub fn any_destination(&self) -> Option<Self> {
        if self.keep_clients() {
            return None;
        }
        let mut rules = self.clone();
        rules
            .list
            .iter_mut()
            .for_each(|rule| rule.tests.retain(|test| *test != Test::ToLocal));
        (rules != *self).then_some(rules)
    }
}

impl Families {
    /// Whether this family is redirected.
    #[must_use]
    pub fn contain(self, family: Family) -> bool {
        self == Self::Both || family == Family::V4
    }

    /// The families that are redirected, IPv4 first.
    pub fn each(self) -> impl Iterator<Item = Family> {
        [Family::V4, Family::V6]
            .into_iter()
            .filter(move |family| self.contain(*family))
    }
}

impl Family {
    #[must_use]
    pub fn of(net: &IpNet) -> Self {
        match net {
            IpNet::V4(_) => Self::V4,
            IpNet::V6(_) => Self::V6,
        }
    }

    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::V4 => "ipv4",
            Self::V6 => "ipv6",
        }
    }
}

/// The mark of connections that arrive and that the proxy takes.
pub const TAKEN: u32 = 0x2043;
/// The mark of connections that the proxy dials as their client, and of the packets that answer them.
///
/// Neither has a bit of those that Kubernetes (0xc000), Cilium (0xf00), Calico and Tailscale (above 0xffff) use.
pub const AS_CLIENT: u32 = 0x2044;
/// What every comment of ours starts with; Linkerd's tools look for it too.
pub const COMMENT_PREFIX: &str = "proxy-init/";

#[cfg(test)]
pub(crate) mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::options::{self, BadEntry, DEFAULT_PRIORITY};

    pub(crate) fn example() -> Options {
        Options {
            inbound_port: options::proxy_port("-p", 4143).unwrap(),
            outbound_port: options::proxy_port("-o", 4140).unwrap(),
            proxy_uid: Some(2102),
            proxy_gid: None,
            inbound: Inbound::All,
            inbound_mode: InboundMode::Redirect,
            inbound_skip_ports: ports("4190-4191,4567-4568"),
            inbound_skip_nets: options::networks("-s", &["10.0.0.0/8,fd00::/8".to_owned()]).unwrap(),
            outbound_skip_ports: ports("4567-4568"),
            outbound_skip_nets: options::networks("-s", &["192.168.0.0/16,fe00::/8".to_owned()]).unwrap(),
            scope: Scope::Local,
            invalid: Invalid::Pass,
            priority: DEFAULT_PRIORITY,
            families: Families::Both,
        }
    }

    pub(crate) fn ports(list: &str) -> PortSet {
        options::ports("--ports", &[list.to_owned()], BadEntry::Refuse).unwrap()
    }

    /// The order of the table in the specification: (chain, comment, family).
    #[test]
    fn rules_come_in_the_order_that_decides_right() {
        let rules = plan(&Options {
            proxy_gid: Some(7),
            invalid: Invalid::Drop,
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
    fn connections_that_keep_their_clients_address_are_marked_and_answered_through_the_proxy() {
        let rules = plan(&Options {
            inbound_mode: InboundMode::Tproxy,
            ..example()
        });
        let seen: Vec<(Chain, &str)> = rules
            .list
            .iter()
            .map(|rule| (rule.chain, rule.comment.as_str()))
            .collect();
        let outbound = |rule: &&(Chain, &str)| !matches!(rule.0, Chain::Outbound | Chain::Output);
        assert_eq!(
            seen.iter().filter(outbound).collect::<Vec<_>>(),
            [
                &(Chain::TproxyInbound, "ignore-port"),
                &(Chain::TproxyInbound, "ignore-subnet"),
                &(Chain::TproxyInbound, "ignore-subnet"),
                &(Chain::TproxyInbound, "take-incoming"),
                &(Chain::Tproxy, "ignore-loopback"),
                &(Chain::Tproxy, "choose-incoming"),
                &(Chain::Tproxy, "hand-incoming-to-proxy-port"),
                &(Chain::Tproxy, "drop-without-proxy"),
                &(Chain::Answers, "remember-dialled-as-client"),
                &(Chain::Answers, "return-answers-to-proxy"),
            ]
        );
        assert!(rules.keep_clients() && rules.any_destination().is_none());
    }

    #[test]
    fn without_ipv6_nothing_touches_ipv6() {
        let rules = plan(&Options {
            families: Families::V4,
            ..example()
        });
        assert!(rules.list.iter().all(|rule| rule.family != Some(Family::V6)));
        let hooks = [Chain::Prerouting, Chain::Output];
        let hooked = rules.list.iter().filter(|rule| hooks.contains(&rule.chain));
        assert!(hooked.map(|rule| rule.family).eq([Some(Family::V4); 2]));
    }

    #[test]
    fn inbound_ipv6_that_is_not_redirected_is_dropped_apart_from_what_is_skipped() {
        let rules = plan(&Options {
            families: Families::V4DropV6,
            ..example()
        });
        let seen: Vec<(Chain, &str)> = rules
            .of(Family::V6)
            .map(|rule| (rule.chain, rule.comment.as_str()))
            .collect();
        assert_eq!(
            seen,
            [
                (Chain::UnredirectedInbound, "ignore-port"),
                (Chain::UnredirectedInbound, "ignore-subnet"),
                (Chain::UnredirectedInbound, "drop-unredirected-ipv6"),
                (Chain::Unredirected, "ignore-loopback"),
                (Chain::Unredirected, "choose-unredirected"),
            ]
        );
        let v4 = plan(&Options {
            families: Families::V4,
            ..example()
        });
        assert!(rules.of(Family::V4).eq(v4.of(Family::V4)));
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
            let rules = plan(&Options { inbound_skip_nets, ..example() });
            for family in [Family::V4, Family::V6] {
                for rule in rules.of(family) {
                    for test in &rule.tests {
                        if let Test::Nets { nets, .. } = test {
                            prop_assert!(nets.iter().all(|net| Family::of(net) == family));
                        }
                    }
                }
            }
        }
    }
}
