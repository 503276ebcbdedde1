//! The rules as a script for the `nft` program, equivalent to the messages of [`crate::netlink`].

use std::fmt::Write;

use crate::options::Family;
use crate::rules::{Action, COMMENT_PREFIX, Chain, Direction, HASH_CHAIN, Match, Rule, Rules, Side, TABLE};

/// A script that replaces our table, whether or not it exists.
#[must_use]
pub fn script(rules: &Rules) -> String {
    let body = body(rules);
    let hash_chain = format!(
        "\tchain {HASH_CHAIN} {{\n\t\treturn comment \"{}\"\n\t}}\n",
        fnv1a(&body)
    );
    // The table is declared first, because deleting a table that does not exist fails.
    format!("table inet {TABLE}\ndelete table inet {TABLE}\ntable inet {TABLE} {{\n{body}{hash_chain}}}\n")
}

/// A hash that identifies the rules. It changes with every detail of the rules.
#[must_use]
pub fn hash(rules: &Rules) -> String {
    fnv1a(&body(rules))
}

fn body(rules: &Rules) -> String {
    let mut text = String::new();
    for criterion in rules.list.iter().flat_map(|rule| &rule.matches) {
        if let Some((name, kind, elements)) = set(criterion) {
            // Writing to a String cannot fail; the same holds below.
            let _ = writeln!(
                text,
                "\tset {name} {{ type {kind}; flags interval; auto-merge; elements = {{ {elements} }} }}"
            );
        }
    }
    for chain in Chain::ALL {
        let list: Vec<&Rule> = rules.list.iter().filter(|rule| rule.chain == chain).collect();
        if list.is_empty() {
            continue;
        }
        let _ = writeln!(text, "\tchain {} {{", chain.name());
        if let Some(hook) = chain.hook(rules.priority) {
            let (kind, point, priority) = (hook.kind, hook.point_name, hook.priority);
            let _ = writeln!(text, "\t\ttype {kind} hook {point} priority {priority}; policy accept;");
        }
        for rule in list {
            let _ = writeln!(text, "\t\t{}", line(rule));
        }
        text.push_str("\t}\n");
    }
    text
}

fn line(rule: &Rule) -> String {
    let mut words: Vec<String> = Vec::new();
    // Address matches contain the family.
    let by_address = rule
        .matches
        .iter()
        .any(|criterion| matches!(criterion, Match::Nets { .. }));
    if let Some(family) = rule.family.filter(|_| !by_address) {
        words.push(format!("meta nfproto {}", family.name()));
    }
    words.extend(rule.matches.iter().map(|criterion| match_words(criterion, rule.family)));
    words.push("counter".to_owned());
    words.push(match rule.action {
        Action::Return => "return".to_owned(),
        Action::Drop => "drop".to_owned(),
        Action::Redirect(port) => format!("redirect to :{port}"),
        Action::Tproxy(port) => format!("tproxy to :{port} accept"),
        Action::MarkConnection(mark) => format!("ct mark set {mark:#x}"),
        Action::MarkPacket(mark) => format!("meta mark set {mark:#x}"),
        Action::Jump(chain) => format!("jump {}", chain.name()),
    });
    words.push(format!("comment \"{COMMENT_PREFIX}{}\"", rule.comment));
    words.join(" ")
}

fn match_words(criterion: &Match, family: Option<Family>) -> String {
    match criterion {
        Match::Tcp => "meta l4proto tcp".to_owned(),
        Match::NewConnection => "tcp flags & (fin|syn|rst|ack) == syn".to_owned(),
        Match::ToLocalAddress => "fib daddr type local".to_owned(),
        Match::OutputInterfaceLo => "oifname \"lo\"".to_owned(),
        Match::InputInterfaceLo => "iifname \"lo\"".to_owned(),
        Match::FromNonLocalAddress => "fib saddr type != local".to_owned(),
        Match::Marked(mark, direction) => {
            let direction = if *direction == Direction::Original {
                "original"
            } else {
                "reply"
            };
            format!("ct mark {mark:#x} ct direction {direction}")
        }
        Match::Ports { set, .. } => format!("tcp dport @{set}"),
        Match::Nets { set, side, .. } => {
            let ip = if family == Some(Family::V6) { "ip6" } else { "ip" };
            let addr = if *side == Side::Source { "saddr" } else { "daddr" };
            format!("{ip} {addr} @{set}")
        }
        Match::User(uid) => format!("meta skuid {uid}"),
        Match::Group(gid) => format!("meta skgid {gid}"),
        Match::Invalid => "ct state invalid".to_owned(),
    }
}

fn set(criterion: &Match) -> Option<(&'static str, &'static str, String)> {
    match criterion {
        Match::Ports { set, ports } => Some((set, "inet_service", ports.to_string().replace(',', ", "))),
        Match::Nets { set, nets, .. } => {
            let kind = match nets.first().map(Family::of_network) {
                Some(Family::V6) => "ipv6_addr",
                _ => "ipv4_addr",
            };
            let elements: Vec<String> = nets.iter().map(ToString::to_string).collect();
            Some((set, kind, elements.join(", ")))
        }
        _ => None,
    }
}

/// FNV-1a, 64 bits: the same in every build. A cryptographic hash is not needed, because forging it gains nothing.
fn fnv1a(text: &str) -> String {
    let hash = text.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    format!("{hash:016x}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::{Families, InboundMode, InvalidPackets, Options};
    use crate::rules::{build_rules, tests::example};

    #[test]
    fn the_script_is_the_specified_ruleset() {
        let rules = build_rules(&example());
        let expected = format!(
            r#"table inet l5d_init
delete table inet l5d_init
table inet l5d_init {{
	set in_skip_ports {{ type inet_service; flags interval; auto-merge; elements = {{ 4190-4191, 4567-4568 }} }}
	set in_skip_src4 {{ type ipv4_addr; flags interval; auto-merge; elements = {{ 10.0.0.0/8 }} }}
	set in_skip_src6 {{ type ipv6_addr; flags interval; auto-merge; elements = {{ fd00::/8 }} }}
	set out_skip_ports {{ type inet_service; flags interval; auto-merge; elements = {{ 4567-4568 }} }}
	set out_skip_dst4 {{ type ipv4_addr; flags interval; auto-merge; elements = {{ 192.168.0.0/16 }} }}
	set out_skip_dst6 {{ type ipv6_addr; flags interval; auto-merge; elements = {{ fe00::/8 }} }}
	chain inbound {{
		tcp dport @in_skip_ports counter return comment "proxy-init/ignore-port"
		ip saddr @in_skip_src4 counter return comment "proxy-init/ignore-subnet"
		ip6 saddr @in_skip_src6 counter return comment "proxy-init/ignore-subnet"
		meta l4proto tcp counter redirect to :4143 comment "proxy-init/redirect-all-incoming-to-proxy-port"
	}}
	chain outbound {{
		meta skuid 2102 counter return comment "proxy-init/ignore-proxy-user-id"
		oifname "lo" counter return comment "proxy-init/ignore-loopback"
		tcp dport @out_skip_ports counter return comment "proxy-init/ignore-port"
		ip daddr @out_skip_dst4 counter return comment "proxy-init/ignore-subnet"
		ip6 daddr @out_skip_dst6 counter return comment "proxy-init/ignore-subnet"
		meta l4proto tcp counter redirect to :4140 comment "proxy-init/redirect-all-outgoing-to-proxy-port"
	}}
	chain prerouting {{
		type nat hook prerouting priority -100; policy accept;
		tcp flags & (fin|syn|rst|ack) == syn fib daddr type local counter jump inbound comment "proxy-init/install-proxy-init-prerouting"
	}}
	chain output {{
		type nat hook output priority -100; policy accept;
		tcp flags & (fin|syn|rst|ack) == syn counter jump outbound comment "proxy-init/install-proxy-init-output"
	}}
	chain rules_hash {{
		return comment "{}"
	}}
}}
"#,
            hash(&rules)
        );
        assert_eq!(script(&rules), expected);
    }

    #[test]
    fn the_hash_differs_for_different_options() {
        let hashes: std::collections::HashSet<String> = [
            example(),
            Options {
                proxy_uid: Some(7),
                ..example()
            },
            Options {
                families: Families::V4,
                ..example()
            },
            Options {
                families: Families::V4DropV6,
                ..example()
            },
            Options {
                invalid: InvalidPackets::Drop,
                ..example()
            },
            Options {
                priority: -101,
                ..example()
            },
            Options {
                outbound_skip_nets: Vec::new(),
                ..example()
            },
            Options {
                inbound_mode: InboundMode::Tproxy,
                ..example()
            },
        ]
        .map(|options| hash(&build_rules(&options)))
        .into();
        assert_eq!(hashes.len(), 8);
    }
}
