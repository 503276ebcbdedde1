//! The rules in the words of `iptables-restore` and `iptables-save`, pure.
//!
//! Every line is written exactly as `iptables-save` prints it, so that comparing texts is comparing rules.

use std::collections::BTreeMap;
use std::fmt::Write;

use ipnet::IpNet;
use tulle_core::ports::PortSet;

use crate::netlink::foreign::IPTABLES_ANSWERS as ANSWERS;
use crate::rules::{Action, COMMENT_PREFIX, Chain, Family, Rule, Rules, Side, Test, Way};

/// What `iptables-save` prints of the tables that we write to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Saved {
    sections: BTreeMap<&'static str, Vec<String>>,
}

/// One rule line and where it is.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Line {
    table: &'static str,
    /// Without the `-A CHAIN` in front.
    chain: &'static str,
    text: String,
}

impl Saved {
    /// Reads the output of `iptables-save`; lines that are no rules are of no interest here, nor are tables of others.
    pub(crate) fn parse(text: &str) -> Self {
        let mut saved = Self::default();
        let mut table = None;
        for line in text.lines().map(str::trim_end) {
            if let Some(name) = line.strip_prefix('*') {
                table = TABLES.iter().map(|(table, _)| *table).find(|table| *table == name);
            } else if let Some(table) = table.filter(|_| line.starts_with(':') || line.starts_with('-')) {
                saved.sections.entry(table).or_default().push(line.to_owned());
            }
        }
        saved
    }

    /// A section that brings a table back as it was, strangers' rules included.
    fn whole(&self, table: &str) -> String {
        let lines = self.lines(table).fold(String::new(), |lines, line| lines + line + "\n");
        format!("*{table}\n{lines}COMMIT\n")
    }

    /// Whether anything of ours, or of Linkerd's, is there.
    pub(crate) fn has_ours(&self) -> bool {
        TABLES
            .iter()
            .any(|(table, _)| !self.chains(table).is_empty() || self.jumps(table).next().is_some())
    }

    /// Whether one table holds anything of ours.
    fn has_ours_in(&self, table: &str) -> bool {
        !self.chains(table).is_empty() || self.jumps(table).next().is_some()
    }

    /// The ports to which our rules redirect.
    pub(crate) fn redirect_ports(&self) -> Vec<u16> {
        let lines = self.lines("nat").filter(|line| ours(chain_of(line)));
        lines
            .filter_map(|line| line.split(" --to-ports ").nth(1)?.trim().parse().ok())
            .collect()
    }

    /// Chains of strangers that translate destinations.
    pub(crate) fn redirectors(&self) -> Vec<String> {
        let strange = self.lines("nat").filter(|line| !ours(chain_of(line)));
        let mut chains: Vec<String> = strange
            .filter(|line| [" -j REDIRECT", " -j DNAT"].iter().any(|target| line.contains(target)))
            .map(|line| chain_of(line).to_owned())
            .collect();
        chains.dedup();
        chains
    }

    fn lines(&self, table: &str) -> impl Iterator<Item = &str> {
        self.sections.get(table).into_iter().flatten().map(String::as_str)
    }

    fn chains(&self, table: &str) -> Vec<&str> {
        let declared = self
            .lines(table)
            .filter_map(|line| line.strip_prefix(':')?.split(' ').next());
        declared.filter(|chain| ours(chain)).collect()
    }

    /// Rules of strangers' chains that jump to ours.
    fn jumps(&self, table: &str) -> impl Iterator<Item = &str> {
        self.lines(table)
            .filter(|line| line.starts_with("-A ") && !ours(chain_of(line)) && ours(target_of(line)))
    }
}

/// A script that puts the rules of one family in the place of what is saved, without touching anything else.
///
/// The programs commit table by table. A table that is right already is therefore left out: who is cut off between two
/// commits leaves redirecting rules that are wholly the old or the new ones, and the same of those that drop.
pub(crate) fn apply(rules: &Rules, family: Family, saved: &Saved) -> String {
    let lines = lines(rules, family);
    let mut text = String::new();
    let mut tables = TABLES;
    if !rules.keep_clients() {
        tables.reverse(); // between two commits what goes is still there, rather than what comes not yet
    }
    for (table, _) in tables {
        let wanted: Vec<&Line> = lines.iter().filter(|line| line.table == table).collect();
        if holds(&wanted, table, saved) {
            continue;
        }
        if !wanted.is_empty() {
            section(&mut text, table, saved, &wanted);
        } else if saved.has_ours_in(table) {
            removal(&mut text, table, saved);
        }
    }
    text
}

/// A script that brings the tables back to which the other one writes.
pub(crate) fn undo(script: &str, saved: &Saved) -> String {
    let written = TABLES
        .iter()
        .filter(|(table, _)| script.contains(&format!("*{table}\n")));
    written.map(|(table, _)| saved.whole(table)).collect()
}

/// A script that removes all that is ours; empty when there is nothing.
pub(crate) fn remove(saved: &Saved) -> String {
    let mut text = String::new();
    for (table, _) in TABLES.iter().filter(|(table, _)| saved.has_ours_in(table)) {
        removal(&mut text, table, saved);
    }
    text
}

/// A script that makes our chains let new connections pass, while open ones keep being translated.
pub(crate) fn let_pass(saved: &Saved) -> String {
    let mut text = String::new();
    for (table, _) in TABLES.iter().filter(|(table, _)| saved.has_ours_in(table)) {
        let chains: Vec<&str> = saved
            .chains(table)
            .into_iter()
            .filter(|chain| *chain != ANSWERS)
            .collect();
        let _ = writeln!(text, "*{table}");
        declare(&mut text, chains.iter().copied());
        for chain in chains {
            let _ = writeln!(text, "-A {chain} -m conntrack --ctstate NEW -j RETURN");
        }
        text.push_str("COMMIT\n");
    }
    text
}

/// Whether what is saved is exactly what the rules say, for our chains and the jumps to them.
pub(crate) fn matches(rules: &Rules, family: Family, saved: &Saved) -> bool {
    apply(rules, family, saved).is_empty()
}

/// Whether a table has exactly the wanted lines in our chains, and the jumps to them ahead of all strangers' rules.
fn holds(wanted: &[&Line], table: &str, saved: &Saved) -> bool {
    let mut expected: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    for line in wanted {
        let there = expected.entry(line.chain).or_default();
        // What is inserted comes before what was.
        let place = if ours(line.chain) { there.len() } else { 0 };
        there.insert(place, format!("-A {} {}", line.chain, line.text));
    }
    let mut shown: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    let rules = || saved.lines(table).filter(|line| line.starts_with("-A "));
    for line in rules().filter(|line| ours(chain_of(line)) || ours(target_of(line))) {
        shown.entry(chain_of(line)).or_default().push(line.to_owned());
    }
    let ahead = |jump: &str| {
        let mut before = rules().filter(|line| chain_of(line) == chain_of(jump));
        before
            .by_ref()
            .take_while(|line| *line != jump)
            .all(|line| ours(target_of(line)))
    };
    expected == shown && saved.jumps(table).all(ahead)
}

fn section(text: &mut String, table: &str, saved: &Saved, wanted: &[&Line]) {
    let used = |chain: &&str| wanted.iter().any(|line| line.chain == *chain);
    let of_table = TABLES.iter().filter(|(name, _)| *name == table);
    let (used, unused): (Vec<&str>, Vec<&str>) =
        of_table.flat_map(|(_, chains)| chains.iter().copied()).partition(used);
    let there = saved.chains(table);
    let gone: Vec<&str> = unused.into_iter().filter(|chain| there.contains(chain)).collect();
    // Writing to a String cannot fail, here and below.
    let _ = writeln!(text, "*{table}");
    declare(text, used.into_iter().chain(gone.iter().copied()));
    for jump in saved.jumps(table) {
        let _ = writeln!(text, "-D {}", jump.trim_start_matches("-A "));
    }
    for line in wanted {
        // A stranger's rule that redirects would win if it came first.
        let verb = if ours(line.chain) { "-A" } else { "-I" };
        let _ = writeln!(text, "{verb} {} {}", line.chain, line.text);
    }
    for chain in gone {
        let _ = writeln!(text, "-X {chain}");
    }
    text.push_str("COMMIT\n");
}

fn removal(text: &mut String, table: &str, saved: &Saved) {
    let _ = writeln!(text, "*{table}");
    declare(text, saved.chains(table).iter().copied());
    for jump in saved.jumps(table) {
        let _ = writeln!(text, "-D {}", jump.trim_start_matches("-A "));
    }
    for chain in saved.chains(table) {
        let _ = writeln!(text, "-X {chain}");
    }
    text.push_str("COMMIT\n");
}

/// Makes chains, or empties them within the transaction.
fn declare<'a>(text: &mut String, chains: impl Iterator<Item = &'a str>) {
    for chain in chains {
        let _ = writeln!(text, ":{chain} - [0:0]");
    }
}

/// The lines of one family; the jumps come last, as they do in a first run of Linkerd's init.
fn lines(rules: &Rules, family: Family) -> Vec<Line> {
    let hooked = HOOKED
        .into_iter()
        .filter(|(chain, ..)| rules.of(family).any(|rule| rule.chain == *chain));
    let jumps = hooked.map(|(_, builtin, own, comment)| Line {
        table: "mangle",
        chain: builtin,
        text: format!("-p tcp -m comment --comment \"{COMMENT_PREFIX}{comment}\" -j {own}"),
    });
    let own = rules.of(family).flat_map(|rule| rule_lines(rule, family));
    own.chain(jumps).collect()
}

fn rule_lines(rule: &Rule, family: Family) -> Vec<Line> {
    let (table, chain) = match rule.chain {
        Chain::Inbound => ("nat", "PROXY_INIT_REDIRECT"),
        Chain::Outbound => ("nat", "PROXY_INIT_OUTPUT"),
        Chain::Prerouting => ("nat", "PREROUTING"),
        Chain::Output => ("nat", "OUTPUT"),
        Chain::TproxyInbound => ("mangle", "PROXY_INIT_TPROXY_INBOUND"),
        Chain::Tproxy => ("mangle", "PROXY_INIT_TPROXY"),
        Chain::Answers => ("mangle", ANSWERS),
        Chain::UnredirectedInbound => ("mangle", "PROXY_INIT_UNREDIRECTED_IN"),
        Chain::Unredirected => ("mangle", "PROXY_INIT_UNREDIRECTED"),
        Chain::Invalid => ("mangle", "PROXY_INIT_INVALID"),
    };
    let line = |matches: &str, comment: &str| {
        let words = [
            matches.to_owned(),
            format!("-m comment --comment \"{COMMENT_PREFIX}{comment}\""),
            target(rule.action, family),
        ];
        let words: Vec<String> = words.into_iter().filter(|word| !word.is_empty()).collect();
        Line {
            table,
            chain,
            text: words.join(" "),
        }
    };
    let comment = rule.comment.as_str();
    match rule.tests.as_slice() {
        [Test::Ports { ports, .. }] if matches!(rule.action, Action::Redirect(_)) => each_port(ports)
            .map(|port| {
                line(
                    &format!("-p tcp -m tcp --dport {port}"),
                    &format!("{comment}-{port}-to-proxy-port"),
                )
            })
            .collect(),
        [Test::Ports { ports, .. }] => groups(ports)
            .map(|group| {
                line(
                    &format!("-p tcp -m multiport --dports {group}"),
                    &format!("{comment}-{group}"),
                )
            })
            .collect(),
        [Test::Nets { side, nets, .. }] => nets
            .iter()
            .map(|net| line(&address(*side, net), &format!("{comment}-{net}")))
            .collect(),
        tests => vec![line(&conditions(tests), comment)],
    }
}

fn conditions(tests: &[Test]) -> String {
    let (mut interface, mut tcp) = ("", "");
    let words = tests.iter().map(|test| match test {
        Test::Tcp => {
            tcp = "-p tcp";
            String::new()
        }
        Test::Opens => {
            tcp = "-p tcp";
            "-m tcp --tcp-flags FIN,SYN,RST,ACK SYN".to_owned()
        }
        Test::ToLocal => "-m addrtype --dst-type LOCAL".to_owned(),
        Test::OverLoopback => {
            interface = "-o lo";
            String::new()
        }
        Test::FromLoopback => {
            interface = "-i lo";
            String::new()
        }
        Test::FromForeign => "-m addrtype ! --src-type LOCAL".to_owned(),
        Test::Marked(mark, way) => {
            let way = if *way == Way::Original { "ORIGINAL" } else { "REPLY" };
            format!("-m connmark --mark {mark:#x} -m conntrack --ctdir {way}")
        }
        Test::User(uid) => format!("-m owner --uid-owner {uid}"),
        Test::Group(gid) => format!("-m owner --gid-owner {gid}"),
        Test::Invalid => "-m conntrack --ctstate INVALID".to_owned(),
        // These become several lines and stand alone in their rules.
        Test::Ports { .. } | Test::Nets { .. } => String::new(),
    });
    let words: Vec<String> = words.filter(|word| !word.is_empty()).collect();
    [interface, tcp, &words.join(" ")]
        .into_iter()
        .filter(|word| !word.is_empty())
        .collect::<Vec<_>>()
        .join(" ")
}

/// The network of all addresses is no test, and is not printed as one; only TCP gets here, and each test costs time.
fn address(side: Side, net: &IpNet) -> String {
    let option = if side == Side::Source { "-s" } else { "-d" };
    if net.prefix_len() == 0 {
        String::new()
    } else {
        format!("{option} {net}")
    }
}

fn target(action: Action, family: Family) -> String {
    match action {
        Action::Return => "-j RETURN".to_owned(),
        Action::Drop => "-j DROP".to_owned(),
        Action::Redirect(port) => format!("-j REDIRECT --to-ports {port}"),
        Action::Tproxy(port) => {
            let any = if family == Family::V4 { "0.0.0.0" } else { "::" };
            format!("-j TPROXY --on-port {port} --on-ip {any} --tproxy-mark 0x0/0x0")
        }
        Action::MarkConnection(mark) => format!("-j CONNMARK --set-xmark {mark:#x}/0xffffffff"),
        Action::MarkPacket(mark) => format!("-j MARK --set-xmark {mark:#x}/0xffffffff"),
        Action::Jump(Chain::TproxyInbound) => "-j PROXY_INIT_TPROXY_INBOUND".to_owned(),
        Action::Jump(Chain::UnredirectedInbound) => "-j PROXY_INIT_UNREDIRECTED_IN".to_owned(),
        Action::Jump(Chain::Inbound) => "-j PROXY_INIT_REDIRECT".to_owned(),
        Action::Jump(_) => "-j PROXY_INIT_OUTPUT".to_owned(),
    }
}

fn each_port(ports: &PortSet) -> impl Iterator<Item = String> + '_ {
    ports.ranges().map(|range| match range.start() == range.end() {
        true => range.start().to_string(),
        false => format!("{}:{}", range.start(), range.end()),
    })
}

/// One match takes 15 ports, and a range counts as two.
fn groups(ports: &PortSet) -> impl Iterator<Item = String> + '_ {
    let mut groups: Vec<(usize, Vec<String>)> = Vec::new();
    for port in each_port(ports) {
        let cost = if port.contains(':') { 2 } else { 1 };
        match groups.last_mut() {
            Some((used, group)) if *used + cost <= MULTIPORT_SLOTS => {
                *used += cost;
                group.push(port);
            }
            _ => groups.push((cost, vec![port])),
        }
    }
    groups.into_iter().map(|(_, group)| group.join(","))
}

fn chain_of(line: &str) -> &str {
    line.strip_prefix("-A ")
        .and_then(|rest| rest.split(' ').next())
        .unwrap_or_default()
}

fn target_of(line: &str) -> &str {
    let target = line.rsplit(" -j ").next().filter(|_| line.contains(" -j "));
    target.and_then(|target| target.split(' ').next()).unwrap_or_default()
}

fn ours(chain: &str) -> bool {
    TABLES.iter().any(|(_, chains)| chains.contains(&chain))
}

/// The tables we write to, and the chains we own in them; the names are Linkerd's, so that either repairs the other.
const TABLES: [(&str, &[&str]); 2] = [
    (
        "mangle",
        &[
            "PROXY_INIT_TPROXY_INBOUND",
            "PROXY_INIT_TPROXY",
            ANSWERS,
            "PROXY_INIT_UNREDIRECTED_IN",
            "PROXY_INIT_UNREDIRECTED",
            "PROXY_INIT_INVALID",
        ],
    ),
    ("nat", &["PROXY_INIT_REDIRECT", "PROXY_INIT_OUTPUT"]),
];
/// Chains that are jumped to from a chain of the system: that, their name, and the jump's comment.
const HOOKED: [(Chain, &str, &str, &str); 4] = [
    (
        Chain::Tproxy,
        "PREROUTING",
        "PROXY_INIT_TPROXY",
        "install-proxy-init-tproxy",
    ),
    (Chain::Answers, "OUTPUT", ANSWERS, "install-proxy-init-answers"),
    (
        Chain::Unredirected,
        "PREROUTING",
        "PROXY_INIT_UNREDIRECTED",
        "install-proxy-init-unredirected",
    ),
    (
        Chain::Invalid,
        "PREROUTING",
        "PROXY_INIT_INVALID",
        "install-proxy-init-invalid",
    ),
];
const MULTIPORT_SLOTS: usize = 15;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::{Inbound, InboundMode, Invalid, Options};
    use crate::rules::plan;
    use crate::rules::tests::{example, ports};

    #[test]
    fn a_first_run_appends_chains_and_jumps() {
        let rules = plan(&Options {
            outbound_skip_nets: Vec::new(),
            ..example()
        });
        assert_eq!(
            apply(&rules, Family::V4, &Saved::default()),
            r#"*nat
:PROXY_INIT_REDIRECT - [0:0]
:PROXY_INIT_OUTPUT - [0:0]
-A PROXY_INIT_REDIRECT -p tcp -m multiport --dports 4190:4191,4567:4568 -m comment --comment "proxy-init/ignore-port-4190:4191,4567:4568" -j RETURN
-A PROXY_INIT_REDIRECT -s 10.0.0.0/8 -m comment --comment "proxy-init/ignore-subnet-10.0.0.0/8" -j RETURN
-A PROXY_INIT_REDIRECT -p tcp -m comment --comment "proxy-init/redirect-all-incoming-to-proxy-port" -j REDIRECT --to-ports 4143
-A PROXY_INIT_OUTPUT -m owner --uid-owner 2102 -m comment --comment "proxy-init/ignore-proxy-user-id" -j RETURN
-A PROXY_INIT_OUTPUT -o lo -m comment --comment "proxy-init/ignore-loopback" -j RETURN
-A PROXY_INIT_OUTPUT -p tcp -m multiport --dports 4567:4568 -m comment --comment "proxy-init/ignore-port-4567:4568" -j RETURN
-A PROXY_INIT_OUTPUT -p tcp -m comment --comment "proxy-init/redirect-all-outgoing-to-proxy-port" -j REDIRECT --to-ports 4140
-I PREROUTING -p tcp -m tcp --tcp-flags FIN,SYN,RST,ACK SYN -m addrtype --dst-type LOCAL -m comment --comment "proxy-init/install-proxy-init-prerouting" -j PROXY_INIT_REDIRECT
-I OUTPUT -p tcp -m tcp --tcp-flags FIN,SYN,RST,ACK SYN -m comment --comment "proxy-init/install-proxy-init-output" -j PROXY_INIT_OUTPUT
COMMIT
"#
        );
    }

    const LINKERD: &str = r#"# Generated
*nat
:PREROUTING ACCEPT [0:0]
:OUTPUT ACCEPT [0:0]
:PROXY_INIT_OUTPUT - [0:0]
:PROXY_INIT_REDIRECT - [0:0]
-A PREROUTING -p tcp -m tcp --dport 1 -j DNAT --to-destination 10.0.0.1
-A PREROUTING -m comment --comment "proxy-init/install-proxy-init-prerouting" -j PROXY_INIT_REDIRECT
-A OUTPUT -m comment --comment "proxy-init/install-proxy-init-output" -j PROXY_INIT_OUTPUT
-A PROXY_INIT_REDIRECT -p tcp -j REDIRECT --to-ports 4143
COMMIT
# Completed
"#;

    #[test]
    fn jumps_that_are_there_are_replaced_and_strangers_are_left_alone() {
        let saved = Saved::parse(LINKERD);
        let script = apply(&plan(&example()), Family::V4, &saved);
        let deleted: Vec<&str> = script.lines().filter(|line| line.starts_with("-D")).collect();
        assert_eq!(
            deleted,
            [
                "-D PREROUTING -m comment --comment \"proxy-init/install-proxy-init-prerouting\" -j PROXY_INIT_REDIRECT",
                "-D OUTPUT -m comment --comment \"proxy-init/install-proxy-init-output\" -j PROXY_INIT_OUTPUT",
            ]
        );
        assert!(!script.contains("DNAT"));
        assert_eq!(saved.redirectors(), ["PREROUTING"]);
        assert_eq!(saved.redirect_ports(), [4143]);
        assert!(remove(&saved).ends_with("-X PROXY_INIT_OUTPUT\n-X PROXY_INIT_REDIRECT\nCOMMIT\n"));
        assert_eq!(remove(&Saved::parse("*nat\n:OUTPUT ACCEPT [0:0]\nCOMMIT\n")), "");
    }

    #[test]
    fn what_was_applied_matches_and_nothing_else_does() {
        let rules = plan(&Options {
            invalid: Invalid::Drop,
            ..example()
        });
        for family in [Family::V4, Family::V6] {
            let script = apply(&rules, family, &Saved::default());
            assert!(!script.contains("TPROXY") && !script.contains("ANSWERS"), "{script}");
            let saved = Saved::parse(&script.replace("-I ", "-A "));
            assert!(matches(&rules, family, &saved));
            assert!(!matches(&plan(&example()), family, &saved));
            let whole = undo(&script, &saved);
            assert_eq!(Saved::parse(&whole), saved);
            let twice = whole.replace("COMMIT", "-A OUTPUT -j PROXY_INIT_OUTPUT\nCOMMIT");
            assert!(!matches(&rules, family, &Saved::parse(&twice)));
            let behind = whole.replace("-A OUTPUT", "-A OUTPUT -j ACCEPT\n-A OUTPUT");
            let script = apply(&rules, family, &Saved::parse(&behind));
            assert!(
                script.starts_with("*nat\n") && script.contains("\n-I OUTPUT "),
                "{script}"
            );
        }
        assert!(!matches(&rules, Family::V4, &Saved::default()));
    }

    #[test]
    fn clients_keep_their_address_by_rules_of_the_mangle_table() {
        let tproxy = plan(&Options {
            inbound_mode: InboundMode::Tproxy,
            inbound_skip_nets: Vec::new(),
            ..example()
        });
        let script = apply(&tproxy, Family::V6, &Saved::default());
        let mangle = script.split("*nat\n").next().unwrap();
        assert_eq!(
            mangle,
            r#"*mangle
:PROXY_INIT_TPROXY_INBOUND - [0:0]
:PROXY_INIT_TPROXY - [0:0]
:PROXY_INIT_ANSWERS - [0:0]
-A PROXY_INIT_TPROXY_INBOUND -p tcp -m multiport --dports 4190:4191,4567:4568 -m comment --comment "proxy-init/ignore-port-4190:4191,4567:4568" -j RETURN
-A PROXY_INIT_TPROXY_INBOUND -p tcp -m comment --comment "proxy-init/take-incoming" -j CONNMARK --set-xmark 0x2043/0xffffffff
-A PROXY_INIT_TPROXY -i lo -m comment --comment "proxy-init/ignore-loopback" -j RETURN
-A PROXY_INIT_TPROXY -p tcp -m tcp --tcp-flags FIN,SYN,RST,ACK SYN -m addrtype --dst-type LOCAL -m comment --comment "proxy-init/choose-incoming" -j PROXY_INIT_TPROXY_INBOUND
-A PROXY_INIT_TPROXY -p tcp -m connmark --mark 0x2043 -m conntrack --ctdir ORIGINAL -m comment --comment "proxy-init/hand-incoming-to-proxy-port" -j TPROXY --on-port 4143 --on-ip :: --tproxy-mark 0x0/0x0
-A PROXY_INIT_TPROXY -p tcp -m connmark --mark 0x2043 -m conntrack --ctdir ORIGINAL -m comment --comment "proxy-init/drop-without-proxy" -j DROP
-A PROXY_INIT_ANSWERS -o lo -p tcp -m tcp --tcp-flags FIN,SYN,RST,ACK SYN -m addrtype ! --src-type LOCAL -m comment --comment "proxy-init/remember-dialled-as-client" -j CONNMARK --set-xmark 0x2044/0xffffffff
-A PROXY_INIT_ANSWERS -p tcp -m connmark --mark 0x2044 -m conntrack --ctdir REPLY -m comment --comment "proxy-init/return-answers-to-proxy" -j MARK --set-xmark 0x2044/0xffffffff
-I PREROUTING -p tcp -m comment --comment "proxy-init/install-proxy-init-tproxy" -j PROXY_INIT_TPROXY
-I OUTPUT -p tcp -m comment --comment "proxy-init/install-proxy-init-answers" -j PROXY_INIT_ANSWERS
COMMIT
"#
        );
        // Back to redirection: first the rules that redirect, then what they replace goes.
        let saved = made_by(&script);
        assert!(matches(&tproxy, Family::V6, &saved));
        let back = apply(&plan(&example()), Family::V6, &saved);
        assert!(back.starts_with("*nat\n:PROXY_INIT_REDIRECT "), "{back}");
        assert!(back.ends_with("-X PROXY_INIT_ANSWERS\nCOMMIT\n"), "{back}");
        // While connections drain, answers still find their way.
        let draining = let_pass(&saved);
        assert!(
            draining.contains(":PROXY_INIT_TPROXY ") && !draining.contains(ANSWERS),
            "{draining}"
        );
        // Two jumps from one chain are known again in the order in which they end up.
        let dropping = plan(&Options {
            inbound_mode: InboundMode::Tproxy,
            invalid: Invalid::Drop,
            ..example()
        });
        let script = apply(&dropping, Family::V4, &Saved::default());
        assert!(matches(&dropping, Family::V4, &made_by(&script)), "{script}");
        assert!(!matches(
            &dropping,
            Family::V4,
            &Saved::parse(&script.replace("-I ", "-A "))
        ));
    }

    /// What a script leaves where nothing was.
    fn made_by(script: &str) -> Saved {
        let mut saved = Saved::parse(script);
        for line in saved.sections.values_mut() {
            line.retain(|line| !line.starts_with("-I "));
        }
        let mut table = "";
        for line in script.lines() {
            table = line.strip_prefix('*').unwrap_or(table);
            if let Some(rule) = line.strip_prefix("-I ") {
                saved.sections.get_mut(table).unwrap().insert(0, format!("-A {rule}"));
            }
        }
        saved
    }

    #[test]
    fn ports_are_grouped_by_fifteen_slots() {
        let list: Vec<String> = (0..20).map(|n| format!("{}", 100 + 2 * n)).collect();
        let set = ports(&format!("{},1000-1010,2000-2010", list.join(",")));
        let groups: Vec<String> = groups(&set).collect();
        assert_eq!(groups[0].split(',').count(), 15);
        assert_eq!(groups[1], "130,132,134,136,138,1000:1010,2000:2010");
    }

    #[test]
    fn listed_ports_are_redirected_one_by_one() {
        let rules = plan(&Options {
            inbound: Inbound::Listed(ports("80,8080-8081")),
            ..example()
        });
        let script = apply(&rules, Family::V4, &Saved::default());
        for port in ["80", "8080:8081"] {
            let line = format!(
                "-A PROXY_INIT_REDIRECT -p tcp -m tcp --dport {port} -m comment --comment \
                 \"proxy-init/redirect-port-{port}-to-proxy-port\" -j REDIRECT --to-ports 4143\n"
            );
            assert!(script.contains(&line), "{script}");
        }
    }
}
