//! The rules in the syntax of `iptables-restore` and `iptables-save`; pure functions.
//!
//! Each line is written exactly as `iptables-save` prints it, so rules can be compared as text.

use std::collections::BTreeMap;
use std::fmt::Write;

use ipnet::IpNet;
use tulle_core::ports::PortSet;

use crate::iptables_chains::{self, TABLES, TPROXY_REPLIES, is_mesh_chain};
use crate::options::Family;
use crate::rules::{Action, COMMENT_PREFIX, Chain, Direction, Match, Rule, Rules, Side};

/// The output of `iptables-save` for the tables that tulle uses.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct SavedRules {
    lines_by_table: BTreeMap<&'static str, Vec<String>>,
}

/// One rule line, with its table and chain.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Line {
    table: &'static str,
    chain: &'static str,
    /// The rule without its `-A CHAIN` prefix.
    text: String,
}

impl SavedRules {
    /// Parses the output of `iptables-save`. Lines other than chains and rules are ignored, and so are other tables.
    pub(crate) fn parse(text: &str) -> Self {
        let mut saved = Self::default();
        let mut table = None;
        for line in text.lines().map(str::trim_end) {
            if let Some(name) = line.strip_prefix('*') {
                table = TABLES.iter().map(|(table, _)| *table).find(|table| *table == name);
            } else if let Some(table) = table.filter(|_| line.starts_with(':') || line.starts_with('-')) {
                saved.lines_by_table.entry(table).or_default().push(line.to_owned());
            }
        }
        saved
    }

    /// A section that restores a table as it was, with the rules of other programs.
    fn restore_section(&self, table: &str) -> String {
        let lines = self.lines(table).fold(String::new(), |lines, line| lines + line + "\n");
        format!("*{table}\n{lines}COMMIT\n")
    }

    /// Whether any chain or jump of tulle or Linkerd exists.
    pub(crate) fn has_mesh_rules(&self) -> bool {
        TABLES.iter().any(|(table, _)| self.has_mesh_rules_in(table))
    }

    /// Whether one table contains any chain or jump of tulle or Linkerd.
    fn has_mesh_rules_in(&self, table: &str) -> bool {
        !self.mesh_chains(table).is_empty() || self.jumps_to_mesh_chains(table).next().is_some()
    }

    /// The ports to which the rules of tulle or Linkerd redirect.
    pub(crate) fn redirect_ports(&self) -> Vec<u16> {
        let lines = self.lines("nat").filter(|line| is_mesh_chain(line_chain(line)));
        lines
            .filter_map(|line| line.split(" --to-ports ").nth(1)?.trim().parse().ok())
            .collect()
    }

    /// Chains of other programs that translate destinations.
    pub(crate) fn foreign_dnat_chains(&self) -> Vec<String> {
        let foreign = self.lines("nat").filter(|line| !is_mesh_chain(line_chain(line)));
        let mut chains: Vec<String> = foreign
            .filter(|line| [" -j REDIRECT", " -j DNAT"].iter().any(|target| line.contains(target)))
            .map(|line| line_chain(line).to_owned())
            .collect();
        chains.dedup();
        chains
    }

    fn lines(&self, table: &str) -> impl Iterator<Item = &str> {
        self.lines_by_table.get(table).into_iter().flatten().map(String::as_str)
    }

    /// The chains of tulle or Linkerd in a table.
    fn mesh_chains(&self, table: &str) -> Vec<&str> {
        let declared = self
            .lines(table)
            .filter_map(|line| line.strip_prefix(':')?.split(' ').next());
        declared.filter(|chain| is_mesh_chain(chain)).collect()
    }

    /// Rules in other chains that jump to those of tulle or Linkerd.
    fn jumps_to_mesh_chains(&self, table: &str) -> impl Iterator<Item = &str> {
        self.lines(table).filter(|line| {
            line.starts_with("-A ") && !is_mesh_chain(line_chain(line)) && is_mesh_chain(line_target(line))
        })
    }
}

/// A script that replaces the saved rules of tulle or Linkerd of one family and keeps all others; empty if nothing changes.
///
/// The programs commit table by table, so a table that is already correct is omitted. The table with the new rules for inbound
/// connections (mangle in tproxy mode, else nat) is committed first, so that old inbound rules in the other table are removed
/// last. If the run is interrupted between the two commits, the inbound rules, the outbound rules and the rules that drop packets
/// each exist in their old form, their new form, or both.
pub(crate) fn apply_script(rules: &Rules, family: Family, saved: &SavedRules) -> String {
    let lines = wanted_lines(rules, family);
    let mut text = String::new();
    let mut tables = TABLES; // mangle, then nat
    if !rules.is_tproxy() {
        tables.reverse();
    }
    for (table, _) in tables {
        let wanted: Vec<&Line> = lines.iter().filter(|line| line.table == table).collect();
        if table_matches(&wanted, table, saved) {
            continue;
        }
        if !wanted.is_empty() {
            write_table(&mut text, table, saved, &wanted);
        } else if saved.has_mesh_rules_in(table) {
            write_removal(&mut text, table, saved);
        }
    }
    text
}

/// A script that restores the tables that `script` writes.
pub(crate) fn undo_script(script: &str, saved: &SavedRules) -> String {
    let written = TABLES
        .iter()
        .filter(|(table, _)| script.contains(&format!("*{table}\n")));
    written.map(|(table, _)| saved.restore_section(table)).collect()
}

/// A script that removes all rules of tulle or Linkerd; empty if there are none.
pub(crate) fn removal_script(saved: &SavedRules) -> String {
    let mut text = String::new();
    for (table, _) in TABLES.iter().filter(|(table, _)| saved.has_mesh_rules_in(table)) {
        write_removal(&mut text, table, saved);
    }
    text
}

/// A script that makes the chains of tulle or Linkerd return new connections unchanged, while open connections stay translated.
pub(crate) fn bypass_script(saved: &SavedRules) -> String {
    let mut text = String::new();
    for (table, _) in TABLES.iter().filter(|(table, _)| saved.has_mesh_rules_in(table)) {
        let chains: Vec<&str> = saved
            .mesh_chains(table)
            .into_iter()
            .filter(|chain| *chain != TPROXY_REPLIES)
            .collect();
        let _ = writeln!(text, "*{table}");
        write_declarations(&mut text, chains.iter().copied());
        for chain in chains {
            let _ = writeln!(text, "-A {chain} -m conntrack --ctstate NEW -j RETURN");
        }
        text.push_str("COMMIT\n");
    }
    text
}

/// Whether the saved rules match the wanted rules exactly, in the chains of tulle or Linkerd and the jumps to them.
pub(crate) fn matches(rules: &Rules, family: Family, saved: &SavedRules) -> bool {
    apply_script(rules, family, saved).is_empty()
}

/// Whether the chains of tulle or Linkerd in a table have exactly the wanted lines, and the jumps to them precede all other rules.
fn table_matches(wanted: &[&Line], table: &str, saved: &SavedRules) -> bool {
    let mut expected: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    for line in wanted {
        let lines = expected.entry(line.chain).or_default();
        // A jump is inserted before the existing rules.
        let index = if is_mesh_chain(line.chain) { lines.len() } else { 0 };
        lines.insert(index, format!("-A {} {}", line.chain, line.text));
    }
    let mut shown: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    let rules = || saved.lines(table).filter(|line| line.starts_with("-A "));
    for line in rules().filter(|line| is_mesh_chain(line_chain(line)) || is_mesh_chain(line_target(line))) {
        shown.entry(line_chain(line)).or_default().push(line.to_owned());
    }
    let precedes_foreign_rules = |jump: &str| {
        let mut before = rules().filter(|line| line_chain(line) == line_chain(jump));
        before
            .by_ref()
            .take_while(|line| *line != jump)
            .all(|line| is_mesh_chain(line_target(line)))
    };
    expected == shown && saved.jumps_to_mesh_chains(table).all(precedes_foreign_rules)
}

fn write_table(text: &mut String, table: &str, saved: &SavedRules, wanted: &[&Line]) {
    let is_used = |chain: &&str| wanted.iter().any(|line| line.chain == *chain);
    let tables = TABLES.iter().filter(|(name, _)| *name == table);
    let (used, unused): (Vec<&str>, Vec<&str>) =
        tables.flat_map(|(_, chains)| chains.iter().copied()).partition(is_used);
    let existing = saved.mesh_chains(table);
    let deleted: Vec<&str> = unused.into_iter().filter(|chain| existing.contains(chain)).collect();
    // Writing to a String cannot fail; the same holds below.
    let _ = writeln!(text, "*{table}");
    write_declarations(text, used.into_iter().chain(deleted.iter().copied()));
    for jump in saved.jumps_to_mesh_chains(table) {
        let _ = writeln!(text, "-D {}", jump.trim_start_matches("-A "));
    }
    for line in wanted {
        // An earlier rule of another program would take precedence, so the jump is inserted first.
        let verb = if is_mesh_chain(line.chain) { "-A" } else { "-I" };
        let _ = writeln!(text, "{verb} {} {}", line.chain, line.text);
    }
    for chain in deleted {
        let _ = writeln!(text, "-X {chain}");
    }
    text.push_str("COMMIT\n");
}

fn write_removal(text: &mut String, table: &str, saved: &SavedRules) {
    let _ = writeln!(text, "*{table}");
    write_declarations(text, saved.mesh_chains(table).iter().copied());
    for jump in saved.jumps_to_mesh_chains(table) {
        let _ = writeln!(text, "-D {}", jump.trim_start_matches("-A "));
    }
    for chain in saved.mesh_chains(table) {
        let _ = writeln!(text, "-X {chain}");
    }
    text.push_str("COMMIT\n");
}

/// Creates chains, or empties them within the transaction.
fn write_declarations<'a>(text: &mut String, chains: impl Iterator<Item = &'a str>) {
    for chain in chains {
        let _ = writeln!(text, ":{chain} - [0:0]");
    }
}

/// The lines of the wanted rules of one family. The jumps are last, as in a first run of Linkerd's init.
fn wanted_lines(rules: &Rules, family: Family) -> Vec<Line> {
    let hooked = HOOKED_CHAINS
        .into_iter()
        .filter(|(chain, ..)| rules.for_family(family).any(|rule| rule.chain == *chain));
    let jumps = hooked.map(|(_, builtin, target, comment)| Line {
        table: "mangle",
        chain: builtin,
        text: format!("-p tcp -m comment --comment \"{COMMENT_PREFIX}{comment}\" -j {target}"),
    });
    let own = rules.for_family(family).flat_map(|rule| rule_lines(rule, family));
    own.chain(jumps).collect()
}

/// The table and the name of a chain. The base chains `Prerouting` and `Output` are built-in chains here; the other base chains
/// are chains of tulle, to which built-in chains jump ([`HOOKED_CHAINS`]).
fn location(chain: Chain) -> (&'static str, &'static str) {
    match chain {
        Chain::Inbound => ("nat", iptables_chains::INBOUND),
        Chain::Outbound => ("nat", iptables_chains::OUTBOUND),
        Chain::Prerouting => ("nat", "PREROUTING"),
        Chain::Output => ("nat", "OUTPUT"),
        Chain::TproxyInbound => ("mangle", iptables_chains::TPROXY_INBOUND),
        Chain::TproxyPrerouting => ("mangle", iptables_chains::TPROXY),
        Chain::TproxyReplies => ("mangle", TPROXY_REPLIES),
        Chain::UnredirectedInbound => ("mangle", iptables_chains::UNREDIRECTED_INBOUND),
        Chain::UnredirectedPrerouting => ("mangle", iptables_chains::UNREDIRECTED),
        Chain::Invalid => ("mangle", iptables_chains::INVALID),
    }
}

fn rule_lines(rule: &Rule, family: Family) -> Vec<Line> {
    let (table, chain) = location(rule.chain);
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
    match rule.matches.as_slice() {
        [Match::Ports { ports, .. }] if matches!(rule.action, Action::Redirect(_)) => port_ranges(ports)
            .map(|range| {
                line(
                    &format!("-p tcp -m tcp --dport {range}"),
                    &format!("{comment}-{range}-to-proxy-port"),
                )
            })
            .collect(),
        [Match::Ports { ports, .. }] => multiport_groups(ports)
            .map(|group| {
                line(
                    &format!("-p tcp -m multiport --dports {group}"),
                    &format!("{comment}-{group}"),
                )
            })
            .collect(),
        [Match::Nets { side, nets, .. }] => nets
            .iter()
            .map(|net| line(&address(*side, net), &format!("{comment}-{net}")))
            .collect(),
        matches => vec![line(&match_words(matches), comment)],
    }
}

fn match_words(matches: &[Match]) -> String {
    let (mut interface, mut tcp) = ("", "");
    let words = matches.iter().map(|criterion| match criterion {
        Match::Tcp => {
            tcp = "-p tcp";
            String::new()
        }
        Match::NewConnection => {
            tcp = "-p tcp";
            "-m tcp --tcp-flags FIN,SYN,RST,ACK SYN".to_owned()
        }
        Match::ToLocalAddress => "-m addrtype --dst-type LOCAL".to_owned(),
        Match::OutputInterfaceLo => {
            interface = "-o lo";
            String::new()
        }
        Match::InputInterfaceLo => {
            interface = "-i lo";
            String::new()
        }
        Match::FromNonLocalAddress => "-m addrtype ! --src-type LOCAL".to_owned(),
        Match::Marked(mark, direction) => {
            let direction = if *direction == Direction::Original {
                "ORIGINAL"
            } else {
                "REPLY"
            };
            format!("-m connmark --mark {mark:#x} -m conntrack --ctdir {direction}")
        }
        Match::User(uid) => format!("-m owner --uid-owner {uid}"),
        Match::Group(gid) => format!("-m owner --gid-owner {gid}"),
        Match::Invalid => "-m conntrack --ctstate INVALID".to_owned(),
        // `rule_lines` renders these matches.
        Match::Ports { .. } | Match::Nets { .. } => String::new(),
    });
    let words: Vec<String> = words.filter(|word| !word.is_empty()).collect();
    [interface, tcp, &words.join(" ")]
        .into_iter()
        .filter(|word| !word.is_empty())
        .collect::<Vec<_>>()
        .join(" ")
}

/// The `-s` or `-d` match; empty for the network of all addresses, which `iptables-save` omits.
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
        Action::Jump(chain) => format!("-j {}", location(chain).1),
    }
}

/// Each range as `8080:8081`, and a range of one port as `80`.
fn port_ranges(ports: &PortSet) -> impl Iterator<Item = String> + '_ {
    ports.ranges().map(|range| match range.start() == range.end() {
        true => range.start().to_string(),
        false => format!("{}:{}", range.start(), range.end()),
    })
}

/// Groups of ports that fit into one multiport match each. A match has 15 slots, of which a range uses two.
fn multiport_groups(ports: &PortSet) -> impl Iterator<Item = String> + '_ {
    let mut groups: Vec<(usize, Vec<String>)> = Vec::new();
    for range in port_ranges(ports) {
        let cost = if range.contains(':') { 2 } else { 1 };
        match groups.last_mut() {
            Some((used, group)) if *used + cost <= MULTIPORT_SLOTS => {
                *used += cost;
                group.push(range);
            }
            _ => groups.push((cost, vec![range])),
        }
    }
    groups.into_iter().map(|(_, group)| group.join(","))
}

fn line_chain(line: &str) -> &str {
    line.strip_prefix("-A ")
        .and_then(|rest| rest.split(' ').next())
        .unwrap_or_default()
}

fn line_target(line: &str) -> &str {
    let target = line.rsplit(" -j ").next().filter(|_| line.contains(" -j "));
    target.and_then(|target| target.split(' ').next()).unwrap_or_default()
}

/// Jumps from built-in chains to those of tulle: the chain in the rules, the built-in chain, the name of tulle's chain, and the
/// comment.
const HOOKED_CHAINS: [(Chain, &str, &str, &str); 4] = [
    (
        Chain::TproxyPrerouting,
        "PREROUTING",
        iptables_chains::TPROXY,
        "install-proxy-init-tproxy",
    ),
    (
        Chain::TproxyReplies,
        "OUTPUT",
        TPROXY_REPLIES,
        "install-proxy-init-tproxy-replies",
    ),
    (
        Chain::UnredirectedPrerouting,
        "PREROUTING",
        iptables_chains::UNREDIRECTED,
        "install-proxy-init-unredirected",
    ),
    (
        Chain::Invalid,
        "PREROUTING",
        iptables_chains::INVALID,
        "install-proxy-init-invalid",
    ),
];
const MULTIPORT_SLOTS: usize = 15;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::{InboundMode, InboundPorts, InvalidPackets, Options};
    use crate::rules::build_rules;
    use crate::rules::tests::{example, ports};

    #[test]
    fn a_first_run_appends_chains_and_jumps() {
        let rules = build_rules(&Options {
            outbound_skip_nets: Vec::new(),
            ..example()
        });
        assert_eq!(
            apply_script(&rules, Family::V4, &SavedRules::default()),
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
    fn existing_jumps_are_replaced_and_other_rules_are_kept() {
        let saved = SavedRules::parse(LINKERD);
        let script = apply_script(&build_rules(&example()), Family::V4, &saved);
        let deleted: Vec<&str> = script.lines().filter(|line| line.starts_with("-D")).collect();
        assert_eq!(
            deleted,
            [
                "-D PREROUTING -m comment --comment \"proxy-init/install-proxy-init-prerouting\" -j PROXY_INIT_REDIRECT",
                "-D OUTPUT -m comment --comment \"proxy-init/install-proxy-init-output\" -j PROXY_INIT_OUTPUT",
            ]
        );
        assert!(!script.contains("DNAT"));
        assert_eq!(saved.foreign_dnat_chains(), ["PREROUTING"]);
        assert_eq!(saved.redirect_ports(), [4143]);
        assert!(removal_script(&saved).ends_with("-X PROXY_INIT_OUTPUT\n-X PROXY_INIT_REDIRECT\nCOMMIT\n"));
        assert_eq!(
            removal_script(&SavedRules::parse("*nat\n:OUTPUT ACCEPT [0:0]\nCOMMIT\n")),
            ""
        );
    }

    #[test]
    fn only_the_applied_rules_match() {
        let rules = build_rules(&Options {
            invalid: InvalidPackets::Drop,
            ..example()
        });
        for family in [Family::V4, Family::V6] {
            let script = apply_script(&rules, family, &SavedRules::default());
            assert!(!script.contains("TPROXY"), "{script}");
            let saved = SavedRules::parse(&script.replace("-I ", "-A "));
            assert!(matches(&rules, family, &saved));
            assert!(!matches(&build_rules(&example()), family, &saved));
            let restored = undo_script(&script, &saved);
            assert_eq!(SavedRules::parse(&restored), saved);
            let twice = restored.replace("COMMIT", "-A OUTPUT -j PROXY_INIT_OUTPUT\nCOMMIT");
            assert!(!matches(&rules, family, &SavedRules::parse(&twice)));
            let behind = restored.replace("-A OUTPUT", "-A OUTPUT -j ACCEPT\n-A OUTPUT");
            let script = apply_script(&rules, family, &SavedRules::parse(&behind));
            assert!(
                script.starts_with("*nat\n") && script.contains("\n-I OUTPUT "),
                "{script}"
            );
        }
        assert!(!matches(&rules, Family::V4, &SavedRules::default()));
    }

    #[test]
    fn tproxy_mode_uses_rules_in_the_mangle_table() {
        let tproxy = build_rules(&Options {
            inbound_mode: InboundMode::Tproxy,
            inbound_skip_nets: Vec::new(),
            ..example()
        });
        let script = apply_script(&tproxy, Family::V6, &SavedRules::default());
        let mangle = script.split("*nat\n").next().unwrap();
        assert_eq!(
            mangle,
            r#"*mangle
:PROXY_INIT_TPROXY_INBOUND - [0:0]
:PROXY_INIT_TPROXY - [0:0]
:PROXY_INIT_TPROXY_REPLIES - [0:0]
-A PROXY_INIT_TPROXY_INBOUND -p tcp -m multiport --dports 4190:4191,4567:4568 -m comment --comment "proxy-init/ignore-port-4190:4191,4567:4568" -j RETURN
-A PROXY_INIT_TPROXY_INBOUND -p tcp -m comment --comment "proxy-init/mark-inbound" -j CONNMARK --set-xmark 0x2043/0xffffffff
-A PROXY_INIT_TPROXY -i lo -m comment --comment "proxy-init/ignore-loopback" -j RETURN
-A PROXY_INIT_TPROXY -p tcp -m tcp --tcp-flags FIN,SYN,RST,ACK SYN -m addrtype --dst-type LOCAL -m comment --comment "proxy-init/match-inbound-syn" -j PROXY_INIT_TPROXY_INBOUND
-A PROXY_INIT_TPROXY -p tcp -m connmark --mark 0x2043 -m conntrack --ctdir ORIGINAL -m comment --comment "proxy-init/tproxy-inbound" -j TPROXY --on-port 4143 --on-ip :: --tproxy-mark 0x0/0x0
-A PROXY_INIT_TPROXY -p tcp -m connmark --mark 0x2043 -m conntrack --ctdir ORIGINAL -m comment --comment "proxy-init/drop-without-proxy" -j DROP
-A PROXY_INIT_TPROXY_REPLIES -o lo -p tcp -m tcp --tcp-flags FIN,SYN,RST,ACK SYN -m addrtype ! --src-type LOCAL -m comment --comment "proxy-init/mark-connections-from-client-address" -j CONNMARK --set-xmark 0x2044/0xffffffff
-A PROXY_INIT_TPROXY_REPLIES -p tcp -m connmark --mark 0x2044 -m conntrack --ctdir REPLY -m comment --comment "proxy-init/mark-replies-for-proxy" -j MARK --set-xmark 0x2044/0xffffffff
-I PREROUTING -p tcp -m comment --comment "proxy-init/install-proxy-init-tproxy" -j PROXY_INIT_TPROXY
-I OUTPUT -p tcp -m comment --comment "proxy-init/install-proxy-init-tproxy-replies" -j PROXY_INIT_TPROXY_REPLIES
COMMIT
"#
        );
        // Back to redirect mode: the redirect rules are committed before the others are removed.
        let saved = rules_after_script(&script);
        assert!(matches(&tproxy, Family::V6, &saved));
        let back = apply_script(&build_rules(&example()), Family::V6, &saved);
        assert!(back.starts_with("*nat\n:PROXY_INIT_REDIRECT "), "{back}");
        assert!(back.ends_with("-X PROXY_INIT_TPROXY_REPLIES\nCOMMIT\n"), "{back}");
        // While connections drain, replies are still routed to the proxy.
        let draining = bypass_script(&saved);
        assert!(
            draining.contains(":PROXY_INIT_TPROXY ") && !draining.contains(TPROXY_REPLIES),
            "{draining}"
        );
        // Two jumps from one chain are recognised in their final order.
        let dropping = build_rules(&Options {
            inbound_mode: InboundMode::Tproxy,
            invalid: InvalidPackets::Drop,
            ..example()
        });
        let script = apply_script(&dropping, Family::V4, &SavedRules::default());
        assert!(matches(&dropping, Family::V4, &rules_after_script(&script)), "{script}");
        assert!(!matches(
            &dropping,
            Family::V4,
            &SavedRules::parse(&script.replace("-I ", "-A "))
        ));
    }

    /// The state after running a script in an empty namespace.
    fn rules_after_script(script: &str) -> SavedRules {
        let mut saved = SavedRules::parse(script);
        for lines in saved.lines_by_table.values_mut() {
            lines.retain(|line| !line.starts_with("-I "));
        }
        let mut table = "";
        for line in script.lines() {
            table = line.strip_prefix('*').unwrap_or(table);
            if let Some(rule) = line.strip_prefix("-I ") {
                saved
                    .lines_by_table
                    .get_mut(table)
                    .unwrap()
                    .insert(0, format!("-A {rule}"));
            }
        }
        saved
    }

    #[test]
    fn ports_are_grouped_by_fifteen_slots() {
        let list: Vec<String> = (0..20).map(|n| format!("{}", 100 + 2 * n)).collect();
        let set = ports(&format!("{},1000-1010,2000-2010", list.join(",")));
        let groups: Vec<String> = multiport_groups(&set).collect();
        assert_eq!(groups[0].split(',').count(), 15);
        assert_eq!(groups[1], "130,132,134,136,138,1000:1010,2000:2010");
    }

    #[test]
    fn each_listed_range_has_its_own_rule() {
        let rules = build_rules(&Options {
            inbound_ports: InboundPorts::Listed(ports("80,8080-8081")),
            ..example()
        });
        let script = apply_script(&rules, Family::V4, &SavedRules::default());
        for range in ["80", "8080:8081"] {
            let line = format!(
                "-A PROXY_INIT_REDIRECT -p tcp -m tcp --dport {range} -m comment --comment \
                 \"proxy-init/redirect-port-{range}-to-proxy-port\" -j REDIRECT --to-ports 4143\n"
            );
            assert!(script.contains(&line), "{script}");
        }
    }
}
