//! The budgets of `budgets.toml`, and their check.

use anyhow::{Context as _, bail};
use clap::ValueEnum as _;

use super::metric::Metric;
use super::rows::Scenario;
use super::setup::Peer;

/// The content of `budgets.toml` at build time.
pub(super) const COMMITTED_BUDGETS: &str = include_str!("../../budgets.toml");

/// One line of `budgets.toml`.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Budget {
    pub(super) row: Scenario,
    pub(super) metric: Metric,
    pub(super) comparison: Comparison,
    pub(super) limit: f64,
    /// The measured value of which `limit` is a multiple. `None` if `limit` is an absolute value.
    pub(super) reference: Option<Reference>,
    /// The text in the file.
    pub(super) text: String,
}

/// The value to which a limit is relative: the same metric of another peer, or of tulle in another scenario.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Reference {
    Peer(Peer),
    Scenario(Scenario),
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Comparison {
    AtMost,
    AtLeast,
}

impl Budget {
    /// Whether `value` satisfies the budget. `reference` is the measured value of `self.reference`.
    pub(super) fn holds(&self, value: f64, reference: Option<f64>) -> bool {
        let limit = self.limit * reference.unwrap_or(1.0);
        match self.comparison {
            Comparison::AtMost => value <= limit,
            Comparison::AtLeast => value >= limit,
        }
    }
}

/// Parses the budgets. The file has comments, and lines of the form `row.metric = "text"`. Unlike in TOML, a key can occur more
/// than once; all budgets with the same key apply.
pub(super) fn parse(text: &str) -> anyhow::Result<Vec<Budget>> {
    let lines = text
        .lines()
        .map(str::trim)
        .enumerate()
        .filter(|(_, line)| !line.is_empty() && !line.starts_with('#'));
    lines
        .map(|(n, line)| parse_budget(line).with_context(|| format!("line {} of budgets.toml, {line:?}", n + 1)))
        .collect()
}

fn parse_budget(line: &str) -> anyhow::Result<Budget> {
    let (key, value) = line.split_once('=').context("has no \"=\"")?;
    let (row, metric) = key.trim().split_once('.').context("the key is not row.metric")?;
    let row = Scenario::from_str(row, false).map_err(|_| anyhow::anyhow!("there is no row {row:?}"))?;
    let metric = serde_json::from_value(metric.into()).with_context(|| format!("there is no metric {metric:?}"))?;
    let text = value
        .trim()
        .strip_prefix('"')
        .and_then(|v| v.strip_suffix('"'))
        .context("the value is not a string")?;
    let words: Vec<&str> = text.split_whitespace().collect();
    let (comparison, limit, reference) = match words[..] {
        ["at", "most", limit] => (Comparison::AtMost, limit, None),
        ["at", "least", limit] => (Comparison::AtLeast, limit, None),
        ["at", "most", limit, "x", reference] => (Comparison::AtMost, limit, Some(reference)),
        ["at", "least", limit, "x", reference] => (Comparison::AtLeast, limit, Some(reference)),
        _ => bail!("the value is not a budget; expected one such as \"at most 16\" or \"at least 1.3 x haproxy\""),
    };
    let limit = limit.parse().with_context(|| format!("{limit:?} is not a number"))?;
    let reference = reference.map(|name| {
        let peer = Peer::from_str(name, false).map(Reference::Peer);
        let reference = peer.or_else(|_| Scenario::from_str(name, false).map(Reference::Scenario));
        reference.map_err(|_| anyhow::anyhow!("there is no peer and no row {name:?}"))
    });
    Ok(Budget {
        row,
        metric,
        comparison,
        limit,
        reference: reference.transpose()?,
        text: text.to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_committed_budgets_are_readable() {
        let budgets = parse(COMMITTED_BUDGETS).unwrap();
        assert!(
            budgets
                .iter()
                .any(|b| b.row == Scenario::HttpC64 && b.metric == Metric::ClientCpuUs && b.limit == 1.15)
        );
        assert!(
            budgets
                .iter()
                .any(|b| b.row == Scenario::Idle && b.comparison == Comparison::AtMost && b.reference.is_none())
        );
    }

    #[test]
    fn a_budget_holds_up_to_its_limit() {
        for (text, value, reference, holds) in [
            ("at most 1.3 x haproxy", 13.0, Some(10.0), true),
            ("at most 1.3 x haproxy", 13.1, Some(10.0), false),
            ("at least 0.7 x haproxy", 8.0, Some(10.0), true),
            ("at least 0.7 x haproxy", 6.9, Some(10.0), false),
            ("at least 1.5 x workers-1", 15.0, Some(10.0), true),
            ("at most 16", 15.9, None, true),
            ("at most 16", 16.1, None, false),
        ] {
            let budget = parse_budget(&format!("grpc.p50_us = \"{text}\"")).unwrap();
            assert_eq!(budget.holds(value, reference), holds, "{value} {text}");
        }
    }

    #[test]
    fn bad_lines_are_refused_with_their_number_and_reason() {
        for (line, reason) in [
            ("x", "no \"=\""),
            ("http-c64 = \"at most 1\"", "not row.metric"),
            ("http-c65.p50_us = \"at most 1\"", "no row \"http-c65\""),
            ("grpc.p51_us = \"at most 1\"", "no metric \"p51_us\""),
            ("grpc.p50_us = 3", "not a string"),
            ("grpc.p50_us = \"at most x\"", "\"x\" is not a number"),
            ("grpc.p50_us = \"at most 1 x squid\"", "no peer and no row \"squid\""),
            ("grpc.p50_us = \"about 3\"", "expected one such as \"at most"),
        ] {
            let error = format!("{:#}", parse(&format!("# comment\n{line}")).unwrap_err());
            assert!(error.contains("line 2") && error.contains(reason), "{error}");
        }
    }
}
